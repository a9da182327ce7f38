"""The smoke study from its file to its report."""

from __future__ import annotations

from pathlib import Path

from hpo.config.study_config import load_study
from hpo.report.report import write_report
from hpo.report.tables import StudyTables
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import best_trials
from hpo.study.running.open_study import open_study
from hpo.study.running.worker import run_study

STUDY = Path(__file__).parents[2] / "studies" / "smoke.yaml"


def test_the_smoke_study(sqlite_url: str, tmp_path: Path) -> None:
    study = load_study(STUDY)
    with open_study(study, sqlite_url, tmp_path) as opened:
        summary = run_study(opened)
        record = read_study(opened.storage, study.name)
    assert summary.ended == "finished"
    assert sum(summary.outcomes.values()) == len(record.trials) == study.n_trials == 6
    assert set(summary.outcomes) <= {"complete", "pruned"}
    for trial in record.trials:
        precision = trial.telemetry["precision"]
        assert precision["requested"] == precision["effective"] == trial.params["fp_precision"]
        assert precision["agrees"]
        assert trial.attributes["fp_precision_effective"] == trial.params["fp_precision"]
        assert trial.attributes["train_tokens_per_second"] > 0
        assert trial.evaluations
        assert {"score", "criteria", "evidence", "severity", "burden"} <= set(trial.evaluations[0].metrics)
    (best,) = best_trials(record)
    assert best.values == (max(trial.values[0] for trial in record.trials if trial.values),)
    assert StudyTables(record).by_precision["trials"].sum() == 6
    page = write_report(record, tmp_path / "report").read_text()
    assert "score while training" in page
    assert "No evaluation with" not in page
