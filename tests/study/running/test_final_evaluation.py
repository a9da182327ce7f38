"""The detailed evaluation at the end of a study: once, and without harm to the study."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.detailed_documents import document, task_document
from support.tiny import CPU
from support.worker_process import result, run_trials, study

from hpo.errors import DeviceLostError, RunError
from hpo.study.reading.reader import read_study
from hpo.study.running import final_evaluation
from hpo.study.running.final_evaluation import evaluate_best
from hpo.study.running.worker import WorkerOptions
from hpo.study.store.storage import Storage
from hpo.study.store.studies import create_or_resume_study


def evaluated(name: str, split: str) -> dict[str, Any]:
    """The document of the checkpoint in the folder `name`."""
    return document({name: task_document("regression", {})}, split)


class Evaluating:
    """A finished study for an evaluation, which calls `on_batch`."""

    def __init__(self, storage: Storage, folder: Path) -> None:
        self.storage, self.folder = storage, folder
        self.splits: tuple[str, ...] = ("train", "validation", "test")
        self.stop = threading.Event()
        self.evaluated: list[tuple[str, str]] = []
        """The folder of the checkpoint and the split, of each begun evaluation."""
        self.on_batch: Callable[[str], None] = lambda _: None
        self.remote: Any = None

    def run(self) -> None:
        data: Any = SimpleNamespace(splits=dict.fromkeys(self.splits))
        executor: Any = SimpleNamespace(study=study(), dataset=data, device=CPU)
        folder = lambda number: self.folder / f"trial-{number}"  # noqa: E731
        evaluate_best(executor, self.storage, folder, self.stop, self.remote)

    def split_predictions(
        self, _: Any, folder: Path, params: Any, split: str, on_batch: Callable[[], None]
    ) -> Any:
        trials = {f"trial-{one.number}": one for one in read_study(self.storage, "tiny").trials}
        assert params == trials[folder.name].params
        self.evaluated.append((folder.name, split))
        self.on_batch(folder.name)
        on_batch()
        return SimpleNamespace(as_json=lambda: evaluated(folder.name, split))

    @property
    def stored(self) -> dict[int, Any]:
        trials = read_study(self.storage, "tiny").trials
        return {trial.number: trial.detailed for trial in trials if trial.detailed}


@pytest.fixture
def evaluating(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Evaluating:
    caplog.set_level(logging.INFO, "hpo")
    found = Evaluating(storage, tmp_path)
    monkeypatch.setattr(final_evaluation, "split_predictions", found.split_predictions)
    monkeypatch.setattr(final_evaluation, "evaluate_predictions", lambda predicted, **_: predicted)
    return found


def finish(storage: Storage, *values: tuple[float, ...], left: int = 0) -> None:
    """Run a study with these values of its trials; `left` trials stay open."""
    goals = [{"metric": "score"}, {"metric": "peak_memory_bytes", "direction": "minimize"}]
    config = study(len(values) + left, objective=goals[: len(values[0])])
    create_or_resume_study(storage, config)
    stop = threading.Event()
    options = WorkerOptions(after_trial=stop.set if left else lambda: None)
    values_of = lambda trial: result("complete", values=values[trial.number])  # noqa: E731
    run_trials(storage, config, values_of, options=options, stop=stop)


def test_best_trial_is_evaluated_once(evaluating: Evaluating) -> None:
    finish(evaluating.storage, (0.25,), (0.75,), (0.5,))
    evaluating.run()
    evaluating.run()
    assert evaluating.evaluated == [("trial-1", "test")]
    assert evaluating.stored == {1: {"test": evaluated("trial-1", "test")}}


def test_one_worker_of_a_folder_evaluates(evaluating: Evaluating) -> None:
    finish(evaluating.storage, (0.1,))
    with final_evaluation._held(evaluating.folder / "evaluation.lock"):
        evaluating.run()
    assert evaluating.evaluated == []


@pytest.mark.parametrize(
    ("error", "level", "text"),
    [
        (RunError("there is no checkpoint."), "INFO", "there is no checkpoint."),
        (ZeroDivisionError("of ours"), "WARNING", "ZeroDivisionError: of ours"),
        (DeviceLostError("the GPU is lost."), "WARNING", "the GPU is lost."),
    ],
)
def test_error_is_only_logged(
    evaluating: Evaluating, caplog: pytest.LogCaptureFixture, error: Exception, level: str, text: str
) -> None:
    def fail(_: str) -> None:
        raise error

    finish(evaluating.storage, (0.1,))
    evaluating.on_batch = fail
    evaluating.run()
    assert evaluating.stored == {}
    messages = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert (level, f"The best trial is not evaluated in detail: {text}") in messages


def test_stop_ends_the_evaluation_at_the_next_batch(
    evaluating: Evaluating, caplog: pytest.LogCaptureFixture
) -> None:
    finish(evaluating.storage, (0.1,))
    evaluating.on_batch = lambda _: evaluating.stop.set()
    evaluating.run()
    assert (evaluating.evaluated, evaluating.stored) == ([("trial-0", "test")], {})
    assert "not evaluated in detail: told to stop." in caplog.text
