import logging
import threading
from dataclasses import replace

import pytest
from support.tracked_study import TrackedStudy

from hpo.track import follow
from hpo.track.follow import Follower
from hpo.track.runs import Run, runs_of


class FakeTracker:
    where = "nowhere"

    def __init__(self) -> None:
        self.shown: list[Run] = []

    def show(self, run: Run, write_files: object = None, /) -> bool:  # noqa: ARG002
        self.shown.append(run)
        return True

    def close(self) -> None:
        """Nothing is open."""


def test_updates_send_changed_runs_alone(tracked: TrackedStudy) -> None:
    tracked.run("complete", "complete")
    tracker = FakeTracker()
    follower = Follower(lambda: tracked.record, tracked.storage.study_token(tracked.name), tracker)
    follower.update(is_last=False)
    tracked.run("pruned")
    shown = follower.update(is_last=False)
    study = f"study {tracked.name}"
    assert [run.name for run in tracker.shown] == ["trial 0", "trial 1", study, "trial 2", study]
    assert (shown.runs, shown.changed, shown.is_over) == (3, 3, False)
    assert not any("report_of" in run.facts for run in tracker.shown)


class StopAfter(threading.Event):
    """Set after this number of waits, which take no time."""

    def __init__(self, waits: int) -> None:
        super().__init__()
        self.waits_left = waits

    def wait(self, timeout: float | None = None) -> bool:  # noqa: ARG002
        self.waits_left -= 1
        if not self.waits_left:
            self.set()
        return self.is_set()


@pytest.mark.parametrize("has_worker", [False, True])
def test_follow_ends_without_a_live_worker(
    tracked: TrackedStudy, caplog: pytest.LogCaptureFixture, has_worker: bool
) -> None:
    """Trials are left, for example of a grid for a missing device."""
    tracked.run("complete")
    if has_worker:
        tracked.leave_running(alive=True)
    tracker, stop = FakeTracker(), StopAfter(3)
    follower = Follower(lambda: tracked.record, tracked.storage.study_token(tracked.name), tracker)
    with caplog.at_level(logging.WARNING):
        shown = follower.follow(stop, follow.IDLE_SECONDS if has_worker else 1e-9)
    assert not shown.is_over
    assert "trial 0" in [run.name for run in tracker.shown]
    assert stop.is_set() is has_worker
    assert ("had no worker for" in caplog.text) is not has_worker


def test_content_of_trial(tracked: TrackedStudy) -> None:
    tracked.run("complete", "nonfinite")
    whole, broken = runs_of(tracked.record, "token")
    assert whole.points[-1].metrics == {
        "score": 0.03,
        "criteria/f1_macro": 0.3,
        "train_examples_per_second": 13.0,
        "train_tokens_per_second": 100.0,
        "epoch": 1.5,
    }
    results = {"trial/score": 0.5, "trial/peak_memory_bytes": 2**30, "trial/train_examples_per_second": 12.5}
    assert whole.results.items() >= results.items()
    assert "trial/score" not in broken.results
    facts = {"requested": "bf16", "effective": "fp32", "agrees": "false", "reason": "no AMX"}
    facts["observed"] = "products of 3 weight matrices in bfloat16, TF32 off, not compiled"
    assert {name: whole.facts[f"precision_{name}"] for name in facts} == facts
    assert (broken.facts["outcome"], broken.facts["device"]) == ("nonfinite", "Example CPU")


def test_no_trial_beyond_the_limits_is_the_best(tracked: TrackedStudy) -> None:
    tracked.run("complete")
    for excess, is_named in ((0.0, True), (0.5, False)):
        trials = [replace(trial, constraints={"f1": excess}) for trial in tracked.record.trials]
        study = runs_of(replace(tracked.record, trials=trials), "token")[0].study
        assert study is not None
        assert ("best_trial" in study.facts) == ("best/score" in study.points[0].metrics) == is_named
