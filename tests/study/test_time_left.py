"""Which trials a worker begins that has to leave at a given time."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from worker_process import result, store_seconds, study

from hpo.study import time_left as time_left_module
from hpo.study.stopping import Stop
from hpo.study.storage import Storage
from hpo.study.time_left import TimeLeft
from hpo.study.worker import Stint, run_worker

HOUR = 3600.0


def stop_with(seconds_left: float) -> Stop:
    """Of a worker that was given an hour, and has to leave in so many seconds."""
    stop = Stop(time.time() + HOUR)
    stop.reserve(stop.seconds_left - seconds_left)
    return stop


@pytest.mark.parametrize(
    ("trials", "needed"),
    [
        ([], HOUR / 2 - 30),  # nothing is known
        ([(40.0,)], 80),
        ([(40.0, 70.0, 160.0), (30.0, 60.0)], 180),
        ([(20 * 60.0,)], HOUR / 2 - 30),  # less than twice as long
        ([(35 * 60.0,)], 1.25 * 35 * 60),  # more than half of the job
    ],
)
def test_seconds_to_the_next_evaluation(
    storage: Storage, trials: list[tuple[float, ...]], needed: float
) -> None:
    if trials:
        store_seconds(storage, *trials)
    time_left = TimeLeft(storage, "tiny", stop_with(600))
    assert time_left.seconds_needed() == pytest.approx(needed, abs=1)


def test_what_this_process_has_seen_counts_everything(storage: Storage, monkeypatch: Any) -> None:
    clock = 100.0
    monkeypatch.setattr(time_left_module.time, "monotonic", lambda: clock)
    store_seconds(storage, (40.0,))
    stop = Stop()
    time_left = TimeLeft(storage, "tiny", stop)
    time_left.begin()
    clock += 60
    time_left.evaluated()
    assert time_left.seconds_needed() == 75
    clock += 10
    time_left.evaluated()
    assert time_left.seconds_needed() == 75, "the longest"
    store_seconds(storage, (40.0,), (80.0,))
    assert time_left.seconds_needed() == 100, "of another worker"


def test_only_the_newest_evaluations_are_read(storage: Storage, monkeypatch: Any) -> None:
    """The oldest of them counts where it is known when it began."""
    monkeypatch.setattr(time_left_module, "NUM_ROWS", 3)
    store_seconds(storage, (500.0,), (100.0, 120.0), (30.0, 60.0))
    assert TimeLeft(storage, "tiny", Stop()).seconds_needed() == 60


def test_no_trial_begins_that_cannot_reach_its_evaluation(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = study()
    storage.create_or_resume_study(config)
    store_seconds(storage, (40.0,))
    stop = stop_with(70)
    time_left = TimeLeft(storage, "tiny", stop)
    ended = run_worker(
        config, storage, lambda *_: result("complete"), stop=stop, stint=Stint(has_time=time_left.suffices)
    )
    assert (ended.ended, ended.exit_code, ended.outcomes) == ("timeout", 0, {})
    assert storage.slot_counts("tiny") == {"open": 8, "running": 0, "done": 0}
    assert not stop.asks_for_requeue, "the next job would have no more time"
    said = r"it may take 80 s to its next evaluation, and this worker has (70|6\d) s"
    assert re.search(said, caplog.text)


def test_a_study_whose_evaluations_lie_more_than_half_a_job_apart_goes_on(storage: Storage) -> None:
    config = study(1)
    storage.create_or_resume_study(config)
    store_seconds(storage, (35 * 60.0,))
    time_left = TimeLeft(storage, "tiny", Stop(time.time() + HOUR))
    summary = run_worker(
        config, storage, lambda *_: result("complete"), stint=Stint(has_time=time_left.suffices)
    )
    assert (summary.ended, summary.outcomes) == ("finished", {"complete": 1})


def test_a_worker_whose_job_ends_asks_for_another(storage: Storage) -> None:
    config, stop = study(4), stop_with(100)
    storage.create_or_resume_study(config)
    store_seconds(storage, (40.0,))
    time_left = TimeLeft(storage, "tiny", stop)

    def execute(*_: object) -> Any:
        time_left.begin()
        stop.reserve(stop.seconds_given - 70)  # as if 30 s had passed
        return result("complete")

    summary = run_worker(config, storage, execute, stop=stop, stint=Stint(has_time=time_left.suffices))
    assert (summary.ended, summary.exit_code, summary.outcomes) == ("stopped", 130, {"complete": 1})
    assert stop.asks_for_requeue


def test_a_study_that_is_done_needs_no_time(storage: Storage) -> None:
    config = study(1)
    run_worker(config, storage, lambda *_: result("complete"))
    stop = Stop(time.time() - 10)
    summary = run_worker(
        config, storage, lambda *_: None, stint=Stint(has_time=TimeLeft(storage, "tiny", stop).suffices)
    )
    assert (summary.ended, stop.asks_for_requeue) == ("finished", False)


def test_leaving_takes_a_step_and_a_checkpoint(storage: Storage, monkeypatch: Any) -> None:
    clock = 100.0
    monkeypatch.setattr(time_left_module.time, "monotonic", lambda: clock)
    stop = Stop(time.time() + HOUR)
    time_left = TimeLeft(storage, "tiny", stop)

    def reserved() -> float:
        return stop.seconds_given - stop.seconds_left

    time_left.begin()
    clock += 500  # setting up is no step
    for seconds, checkpoint, expected in ((0, 0, 0), (20, 0, 20), (5, 0, 20), (5, 7, 27), (30, 6, 36)):
        clock += seconds
        time_left.look(checkpoint)
        assert reserved() == pytest.approx(expected, abs=5)
    time_left.begin()
    time_left.look(6)
    assert reserved() == pytest.approx(6, abs=5), "the next trial has other steps"
