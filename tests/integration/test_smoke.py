"""The smoke study from its file to its report, and the files on the way to an optimiser step."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
from support.command_line import ROOT, hpo_command, ok
from support.tiny import write_study

import hpo
from hpo.config.study_config import load_study
from hpo.report.report import write_report
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import best_trials
from hpo.study.running.open_study import open_study
from hpo.study.running.worker import run_study
from hpo.training import loop


def test_smoke_study(sqlite_url: str, tmp_path: Path) -> None:
    study = load_study(ROOT / "studies" / "smoke.yaml")
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
        assert trial.attributes["train_tokens_per_second"] > 0
        assert {"score", "criteria", "evidence", "severity", "burden"} <= set(trial.evaluations[0].metrics)
    (best,) = best_trials(record)
    assert best.values == (max(trial.values[0] for trial in record.trials if trial.values),)
    page = write_report(record, tmp_path / "report").read_text()
    assert "score while training" in page
    assert "No evaluation with" not in page


def test_path_from_the_command_to_the_optimiser_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of the path in `hpo/README.md`; its claim and its parts return before the first step."""
    seen: list[list[str]] = []

    def note(*args: Any) -> None:
        files = [Path(frame.filename) for frame in traceback.extract_stack()]
        seen.append([str(file.relative_to(package)) for file in files if package in file.parents])
        step_unless(*args)

    package, step_unless = Path(hpo.__file__).parent, loop.step_unless
    monkeypatch.setattr(loop, "step_unless", note)
    write_study(tmp_path, n_trials=1)
    ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    after_command = seen[0][seen[0].index("cli/search.py") :]
    assert list(dict.fromkeys(after_command)) == [
        "cli/search.py",
        "api/study.py",
        "study/running/worker.py",
        "trial/executor.py",
        "trial/run.py",
        "training/loop.py",
    ]
