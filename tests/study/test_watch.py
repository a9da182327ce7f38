"""What other processes do to a study, as events."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import worker_process
from worker_process import result, study

from hpo.config.search_space import suggest
from hpo.study.storage import Storage
from hpo.study.watch import StudyWatch, TrialEvent, watching
from hpo.study.worker import run_worker


def evaluate(storage: Storage, trial: optuna.trial.Trial, step: int, **metrics: float) -> None:
    worker_process.evaluate(storage, trial, step, metrics["score"], metrics=metrics, seconds=2.0)


def run(
    storage: Storage,
    config: Any,
    during: Callable[[optuna.trial.Trial], None] = lambda _: None,
    ended: Any = None,
    **options: Any,
) -> None:
    """Run the study; `during` is called with each trial after its parameters were suggested."""

    def execute(trial: optuna.trial.Trial, _: Any) -> Any:
        suggest(config.search_space, trial)
        during(trial)
        return ended or result("complete")

    run_worker(config, storage, execute, **options)


def told(events: list[TrialEvent]) -> list[tuple[Any, ...]]:
    return [(event.kind, event.values, event.num_evaluations, event.outcome) for event in events]


@pytest.mark.parametrize("changes", [{}, {"search_space": {}, "sampler": {"name": "tpe"}}])
def test_each_change_is_told_once(storage: Storage, changes: dict[str, Any]) -> None:
    """Also of a study that searches nothing."""
    config = study(1, **changes)
    storage.create_or_resume_study(config)
    watch, events = StudyWatch(storage, config), []

    def during(trial: optuna.trial.Trial) -> None:
        for step in (1, 2):
            events.extend(watch.look())
            evaluate(storage, trial, step, score=step / 4)
            events.extend(watch.look())
        assert events[0].params == trial.params

    run(storage, config, during)
    events += watch.look() + watch.look()
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
    watch = StudyWatch(storage, config)

    def execute(trial: optuna.trial.Trial, _: Any) -> Any:
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
    watch = StudyWatch(storage, config)
    events: list[TrialEvent] = []

    def first(trial: optuna.trial.Trial) -> None:
        evaluate(storage, trial, 1, score=0.25)
        events.extend(watch.look())
        stop.set()

    def second(trial: optuna.trial.Trial) -> None:
        evaluate(storage, trial, 1, score=0.25)
        evaluate(storage, trial, 2, score=0.5)
        for each in (watch, later):
            events.extend(each.look())

    run(storage, config, first, result("preempted"), stop=stop)
    events += watch.look()
    assert [event.kind for event in events] == ["started", "evaluated", "finished"]
    assert events[-1].outcome == "preempted"
    later = StudyWatch(storage, config)
    events.clear()
    run(storage, config, second)
    went_on = [("started", None, 1, ""), ("evaluated", (0.5,), 2, "")]
    assert told(events) == [*went_on, *went_on], "the watch that saw it leave, and one that came later"


def test_all_objectives_are_told(storage: Storage) -> None:
    objective = [{"metric": "score"}, {"metric": "peak_memory_bytes", "direction": "minimize"}]
    config = study(1, objective=objective)
    storage.create_or_resume_study(config)
    watch = StudyWatch(storage, config)
    metrics = {"score": 0.25, "peak_memory_bytes": 7.0}
    run(
        storage,
        config,
        lambda trial: evaluate(storage, trial, 1, **metrics),
        result("complete", values=tuple(metrics.values())),
    )
    assert [event.values for event in watch.look()] == [None, (0.25, 7.0), (0.25, 7.0)]


def test_a_worker_is_told_of_its_own_trials(storage: Storage, tmp_path: Path) -> None:
    config = study(6)
    storage.create_or_resume_study(config)
    other = worker_process.start(storage.url, config, tmp_path / "log", trial_seconds=0.01)
    events: list[TrialEvent] = []
    mine: list[int] = []

    def during(trial: optuna.trial.Trial) -> None:
        mine.append(trial.number)
        if len(mine) == 1:
            worker_process.wait_for(lambda: storage.slot_counts("tiny")["done"] >= 3)

    with watching(storage, config, events.append, own=True, seconds=0.01):
        run(storage, config, during)
    other.join(60)
    assert other.exitcode == 0
    assert 0 < len(mine) <= 3
    assert [event.number for event in events if event.kind == "finished"] == mine


def test_what_was_there_before_is_not_told(storage: Storage) -> None:
    run(storage, study(1))
    assert StudyWatch(storage, study(1)).look() == []
    events: list[TrialEvent] = []
    storage.create_or_resume_study(study(2))
    with watching(storage, study(2), events.append, seconds=600):
        run(storage, study(2))
    assert [(event.kind, event.number) for event in events] == [("started", 1), ("finished", 1)]


def test_an_error_of_the_one_who_is_told_is_raised(storage: Storage) -> None:
    def fail(_: TrialEvent) -> None:
        seen.set()
        raise ZeroDivisionError

    def during(_: optuna.trial.Trial) -> None:
        assert seen.wait(60)

    seen = threading.Event()
    storage.create_or_resume_study(study(1))
    with pytest.raises(ZeroDivisionError), watching(storage, study(1), fail, seconds=0.01):
        run(storage, study(1), during)
