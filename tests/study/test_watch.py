"""What other processes do to a study, as events."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import worker_process
from worker_process import result, study

from hpo.config.search_space import suggest
from hpo.study.leases import Lease
from hpo.study.storage import Storage, open_storage
from hpo.study.study_record import EvaluationRow
from hpo.study.watch import StudyWatch, TrialEvent, watching
from hpo.study.worker import run_worker


@pytest.fixture
def storage(storage_url: str) -> Iterator[Storage]:
    with open_storage(storage_url) as opened:
        yield opened


def evaluate(storage: Storage, trial: optuna.trial.Trial, step: int, **metrics: float) -> None:
    storage.report_evaluation(trial, step, metrics["score"], EvaluationRow(step, 1.0, 2.0, metrics))


def told(events: list[TrialEvent]) -> list[tuple[Any, ...]]:
    return [(event.kind, event.values, event.num_evaluations, event.outcome) for event in events]


@pytest.mark.parametrize("changes", [{}, {"search_space": {}, "sampler": {"name": "tpe"}}])
def test_each_change_is_told_once(storage: Storage, changes: dict[str, Any]) -> None:
    """Also of a study that searches nothing."""
    config = study(1, **changes)
    storage.create_or_resume_study(config)
    watch, events = StudyWatch(storage, "tiny"), []

    def look() -> None:
        events.extend(watch.look())

    def execute(trial: optuna.trial.Trial, _: Lease) -> Any:
        params = suggest(config.search_space, trial)
        for step in (1, 2):
            look()
            evaluate(storage, trial, step, score=step / 4)
            look()
        assert events[0].params == params
        return result("complete")

    run_worker(config, storage, execute)
    look()
    look()
    assert told(events) == [
        ("started", None, 0, ""),
        ("evaluated", (0.25,), 1, ""),
        ("evaluated", (0.5,), 2, ""),
        ("finished", (0.5,), 0, "complete"),
    ]
    assert {event.seconds for event in events if event.kind == "evaluated"} == {2.0}


def test_a_trial_starts_when_all_its_settings_are_suggested(storage: Storage) -> None:
    config = study(1)
    storage.create_or_resume_study(config)
    watch = StudyWatch(storage, "tiny")

    def execute(trial: optuna.trial.Trial, _: Lease) -> Any:
        trial.suggest_float("learning_rate", 1e-5, 1e-3, log=True)
        assert watch.look() == []
        suggest(config.search_space, trial)
        (event,) = watch.look()
        assert event.params.keys() == config.search_space.keys()
        return result("oom", reason="too long")

    run_worker(config, storage, execute)
    (event,) = watch.look()
    assert (event.kind, event.outcome, event.reason) == ("finished", "oom", "too long")


def test_a_trial_that_is_given_back_and_goes_on(storage: Storage) -> None:
    """It ends as preempted, and later goes on from the evaluations that it had."""
    config, stop = study(1), threading.Event()
    storage.create_or_resume_study(config)
    watch = StudyWatch(storage, "tiny")

    def first(trial: optuna.trial.Trial, _: Lease) -> Any:
        suggest(config.search_space, trial)
        evaluate(storage, trial, 1, score=0.25)
        events.extend(watch.look())
        stop.set()
        return result("preempted")

    def second(trial: optuna.trial.Trial, _: Lease) -> Any:
        suggest(config.search_space, trial)
        evaluate(storage, trial, 1, score=0.25)
        evaluate(storage, trial, 2, score=0.5)
        for each in (watch, later):
            events.extend(each.look())
        return result("complete")

    events: list[TrialEvent] = []
    run_worker(config, storage, first, stop=stop)
    events += watch.look()
    assert [event.kind for event in events] == ["started", "evaluated", "finished"]
    assert events[-1].outcome == "preempted"
    later = StudyWatch(storage, "tiny")
    events.clear()
    run_worker(config, storage, second)
    went_on = [("started", None, 1, ""), ("evaluated", (0.5,), 2, "")]
    assert told(events) == [*went_on, *went_on], "the watch that saw it leave, and one that came later"


def test_all_objectives_are_told(storage: Storage) -> None:
    objective = [{"metric": "score"}, {"metric": "peak_memory_bytes", "direction": "minimize"}]
    config = study(1, objective=objective)
    storage.create_or_resume_study(config)
    watch = StudyWatch(storage, "tiny")

    def execute(trial: optuna.trial.Trial, _: Lease) -> Any:
        suggest(config.search_space, trial)
        evaluate(storage, trial, 1, score=0.25, peak_memory_bytes=7.0)
        return result("complete", values=(0.25, 7.0))

    run_worker(config, storage, execute)
    assert [event.values for event in watch.look()] == [None, (0.25, 7.0), (0.25, 7.0)]


def test_a_worker_is_told_of_its_own_trials(storage: Storage, tmp_path: Path) -> None:
    config = study(6)
    storage.create_or_resume_study(config)
    other = worker_process.start(storage.url, config, tmp_path / "log", trial_seconds=0.01)
    events: list[TrialEvent] = []
    mine: list[int] = []

    def execute(trial: optuna.trial.Trial, _: Lease) -> Any:
        suggest(config.search_space, trial)
        mine.append(trial.number)
        if len(mine) == 1:
            worker_process.wait_for(lambda: storage.slot_counts("tiny")["done"] >= 3)
        return result("complete")

    with watching(storage, "tiny", events.append, own=True, seconds=0.01):
        run_worker(config, storage, execute)
    other.join(60)
    assert other.exitcode == 0
    assert 0 < len(mine) <= 3
    assert [event.number for event in events if event.kind == "finished"] == mine


def test_what_was_there_before_is_not_told(storage: Storage) -> None:
    def execute(trial: optuna.trial.Trial, _: Lease) -> Any:
        suggest(study().search_space, trial)
        return result("complete")

    run_worker(study(1), storage, execute)
    assert StudyWatch(storage, "tiny").look() == []
    events: list[TrialEvent] = []
    storage.create_or_resume_study(study(2))
    with watching(storage, "tiny", events.append, seconds=600):
        run_worker(study(2), storage, execute)
    assert [(event.kind, event.number) for event in events] == [("started", 1), ("finished", 1)]


def test_an_error_of_the_one_who_is_told_is_raised(storage: Storage) -> None:
    def fail(_: TrialEvent) -> None:
        seen.set()
        raise ZeroDivisionError

    def execute(trial: optuna.trial.Trial, _: Lease) -> Any:
        suggest(study().search_space, trial)
        assert seen.wait(60)
        return result("complete")

    seen = threading.Event()
    storage.create_or_resume_study(study(1))
    with pytest.raises(ZeroDivisionError), watching(storage, "tiny", fail, seconds=0.01):
        run_worker(study(1), storage, execute)
