"""The example studies that are small enough to run in a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpo.config.study_config import load_study
from hpo.study.reading.reader import read_study
from hpo.study.running.open_study import open_study
from hpo.study.running.worker import run_study

STUDIES = Path(__file__).parents[2] / "studies"


def test_the_study_of_several_sources(tmp_path: Path) -> None:
    study = load_study(STUDIES / "examples" / "several_sources" / "study.yaml")
    with open_study(study, f"sqlite:///{tmp_path / 'hpo.db'}", tmp_path) as opened:
        assert run_study(opened).ended == "finished"
        record = read_study(opened.storage, study.name)
    assert [trial.outcome for trial in record.trials] == ["complete"] * study.n_trials
    for trial in record.trials:
        forum, clinic = (trial.telemetry["data"]["sources"][name] for name in ("forum", "clinic"))
        assert (forum["num_windows"], clinic["num_windows"]) == (200, 40)
        root, weight = 1 / trial.params["sampling_temperature"], trial.params["sampling_weight.clinic"]
        share = weight * 40**root / (200**root + weight * 40**root)
        assert trial.telemetry["drawn_share"]["clinic"] == pytest.approx(share, abs=1 / 240)
        assert {"severity", "clinic_severity"} <= trial.telemetry["metrics"].keys()
