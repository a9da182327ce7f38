"""The detailed evaluation at the end of a study: once, and never to its harm."""

from __future__ import annotations

import fcntl
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from support.detailed_documents import document, task_document
from support.worker_process import result, run_trials, study

from hpo.device import DeviceInfo
from hpo.errors import CheckpointError, DeviceLostError, RunError
from hpo.study.reading.reader import read_study
from hpo.study.running import final_evaluation
from hpo.study.running.final_evaluation import evaluate_best
from hpo.study.running.worker import WorkerOptions
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study
from hpo.trial import best_model

CPU = DeviceInfo(type="cpu", name="test CPU", torch_version="")


def evaluated(name: str, split: str) -> dict[str, Any]:
    """Of the checkpoint in the folder of that name."""
    return document({name: task_document("regression", {})}, split)


@dataclass
class Evaluating:
    """A study whose checkpoints are evaluated; `on_batch` is what happens while one is."""

    storage: Storage
    folder: Path
    splits: tuple[str, ...] = ("train", "validation", "test")
    stop: threading.Event = field(default_factory=threading.Event)
    evaluated: list[tuple[str, str]] = field(default_factory=list)
    """The folder of the checkpoint and the split, of each that was begun."""
    on_batch: Callable[[str], None] = lambda _: None
    remote: Any = None

    def run(self) -> None:
        executor: Any = SimpleNamespace(
            study=study(),
            dataset=SimpleNamespace(splits=dict.fromkeys(self.splits)),
            device=CPU,
        )
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
        found = evaluated(folder.name, split)
        return SimpleNamespace(as_json=lambda: found)

    @property
    def stored(self) -> dict[int, Any]:
        trials = read_study(self.storage, "tiny").trials
        return {trial.number: trial.detailed for trial in trials if trial.detailed}


@pytest.fixture
def evaluating(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Evaluating]:
    caplog.set_level(logging.INFO, "hpo")
    with open_storage(sqlite_url) as storage:
        found = Evaluating(storage, tmp_path)
        monkeypatch.setattr(best_model, "split_predictions", found.split_predictions)
        monkeypatch.setattr("hpo.evaluation.detailed.evaluate_predictions", lambda predicted, **_: predicted)
        yield found


def finish(storage: Storage, *values: tuple[float, ...], left: int = 0) -> None:
    """Run a study whose trials end with these values; `left` are to come."""
    directions = {"score": "maximize", "peak_memory_bytes": "minimize"}
    objective = [
        {"metric": metric, "direction": direction}
        for metric, direction in list(directions.items())[: len(values[0])]
    ]
    config = study(len(values) + left, objective=objective)
    create_or_resume_study(storage, config)
    stop = threading.Event()
    options = WorkerOptions(after_trial=stop.set if left else lambda: None)
    values_of = lambda trial: result("complete", values=values[trial.number])  # noqa: E731
    run_trials(storage, config, values_of, options=options, stop=stop)


def test_the_best_trial_is_evaluated_once(evaluating: Evaluating) -> None:
    finish(evaluating.storage, (0.25,), (0.75,), (0.5,))
    evaluating.run()
    evaluating.run()
    assert evaluating.evaluated == [("trial-1", "test")]
    assert evaluating.stored == {1: {"test": evaluated("trial-1", "test")}}


def test_the_first_of_a_pareto_front_on_validation_where_there_is_no_test_split(
    evaluating: Evaluating,
) -> None:
    finish(evaluating.storage, (0.1, 1.0), (0.2, 2.0), (0.5, 5.0), (0.4, 4.0), (0.05, 9.0))
    evaluating.splits = ("train", "validation")
    evaluating.run()
    assert evaluating.stored == {2: {"validation": evaluated("trial-2", "validation")}}


def test_not_before_the_last_trial(evaluating: Evaluating) -> None:
    finish(evaluating.storage, (0.25,), left=2)
    assert evaluating.storage.trial_counts("tiny")["open"] == 2
    evaluating.run()
    assert evaluating.evaluated == []


def test_of_two_workers_one_evaluates(evaluating: Evaluating) -> None:
    finish(evaluating.storage, (0.25,))
    with (evaluating.folder / "evaluation.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        evaluating.run()
        assert evaluating.evaluated == []
    evaluating.run()
    assert evaluating.evaluated == [("trial-0", "test")]


@pytest.mark.parametrize(
    ("error", "level", "text"),
    [
        (RunError("there is no intact checkpoint"), "INFO", "there is no intact checkpoint"),
        (MemoryError("no room"), "WARNING", "MemoryError: no room"),
        (ZeroDivisionError("of ours"), "WARNING", "ZeroDivisionError: of ours"),
        (DeviceLostError("the GPU is lost."), "WARNING", "the GPU is lost."),
    ],
)
def test_what_goes_wrong_is_said(
    evaluating: Evaluating, caplog: pytest.LogCaptureFixture, error: Exception, level: str, text: str
) -> None:
    finish(evaluating.storage, (0.1,))

    def fail(_: str) -> None:
        raise error

    evaluating.on_batch = fail
    evaluating.run()
    assert evaluating.stored == {}
    messages = [(record.levelname, record.getMessage()) for record in caplog.records]
    said = [one for one in messages if "not evaluated" in one[1]]
    assert said == [(level, f"The best trial is not evaluated in detail: {text}")]


@pytest.mark.parametrize("is_away", [False, True])
def test_a_checkpoint_is_downloaded(
    evaluating: Evaluating, caplog: pytest.LogCaptureFixture, is_away: bool
) -> None:
    finish(evaluating.storage, (0.1,), (0.2,))
    fetched: list[tuple[Any, ...]] = []

    def fetch(kind: str, folder: Path) -> None:
        fetched.append((kind, folder.name))
        if is_away:
            raise CheckpointError("the store is away.")

    evaluating.remote = SimpleNamespace(fetch_newest=fetch)
    evaluating.run()
    assert fetched == [("best", "trial-1")]
    assert evaluating.evaluated == ([] if is_away else [("trial-1", "test")])
    assert ("The best trial is not evaluated in detail: the store is away." in caplog.text) == is_away


def test_a_stop_ends_it_at_the_next_batch(evaluating: Evaluating, caplog: pytest.LogCaptureFixture) -> None:
    finish(evaluating.storage, (0.1,))
    evaluating.on_batch = lambda _: evaluating.stop.set()
    evaluating.run()
    assert evaluating.evaluated == [("trial-0", "test")]
    assert evaluating.stored == {}
    assert "The best trial is not evaluated in detail: told to stop." in caplog.text


def test_a_folder_that_cannot_be_written_or_a_study_that_is_gone(
    evaluating: Evaluating, caplog: pytest.LogCaptureFixture
) -> None:
    finish(evaluating.storage, (0.1,))
    evaluating.folder = evaluating.folder / "gone"
    evaluating.run()
    assert "The best trial is not evaluated in detail: FileNotFoundError" in caplog.text
    optuna.delete_study(study_name="tiny", storage=evaluating.storage.optuna)
    evaluating.folder = evaluating.folder.parent
    evaluating.run()
    assert "The best trial is not evaluated in detail: The study `tiny`" in caplog.text
    assert evaluating.evaluated == []


def test_it_locks_where_there_are_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with final_evaluation._held(tmp_path / "lock") as is_held:
        assert is_held
