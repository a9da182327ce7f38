"""Trials whose device was busy with other programs. Their readings are planted."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.tiny import TRAINING, tiny_executor

from hpo.device_time import DeviceTime
from hpo.trial.telemetry import Callbacks

BUSY = {"programs": 0.62, "stolen": 0.0, "share": 0.38, "busy": True}
SENTENCE = (
    "The device was busy: hpo got 38% of it, other programs took 62%. "
    "Speeds and seconds of the trial count that time."
)
STEPS = {"training": TRAINING | {"max_steps": 40}, "evaluation": {"per_trial": 4}}


@pytest.mark.parametrize("is_busy", [False, True])
def test_trial_records_a_busy_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_busy: bool) -> None:
    monkeypatch.setattr(DeviceTime, "facts", lambda _: BUSY | {"busy": is_busy})
    result = tiny_executor(tmp_path, training=TRAINING | {"max_steps": None, "max_seconds": 0.2}).run(
        {}, None, ""
    )
    assert (str(result.outcome), result.reason) == ("complete", SENTENCE if is_busy else "")
    assert result.telemetry["device_time"] == BUSY | {"busy": is_busy}
    assert result.telemetry["device"]["shared"] == is_busy
    assert result.headline["train_examples_per_second"] > 0, "as it was measured"
    assert result.telemetry["train_seconds"] >= 0.2, "seconds of the clock"


@pytest.mark.parametrize(("is_busy", "steps"), [(False, 20), (True, 40)])
def test_limit_of_speed_says_nothing_of_a_trial_on_a_busy_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_busy: bool, steps: int
) -> None:
    monkeypatch.setattr(DeviceTime, "facts", lambda _: BUSY | {"busy": is_busy})
    limits = {"train_examples_per_second": {"min": 1e9}}
    result = tiny_executor(tmp_path, constraints=limits, **STEPS).run({}, None, "")
    assert (str(result.outcome), result.telemetry["num_steps"]) == (("pruned", "complete")[is_busy], steps)
    assert (result.constraints["train_examples_per_second"] > 0.9) == (not is_busy)
    broken = "train_examples_per_second must be >= 1e+09, but is "
    assert result.reason.startswith(SENTENCE if is_busy else broken)


def test_resumed_trial_keeps_its_earlier_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: list[float] = []

    def measure(own: DeviceTime) -> None:
        own.totals = Counter(own.totals) + Counter({"seconds": 2.0, "wanted": 2.0, "programs": 1.0})
        seconds.append(own.totals["seconds"])

    monkeypatch.setattr(DeviceTime, "measure", measure)
    executor = tiny_executor(tmp_path, **STEPS)
    runs: list[Any] = [
        executor.run({}, tmp_path / "trial", "key", Callbacks(should_stop=lambda: len(seconds) == 2)),
        executor.run({}, tmp_path / "trial", "key"),
    ]
    assert [str(one.outcome) for one in runs] == ["preempted", "complete"]
    assert seconds == [2.0, 4.0, 6.0, 8.0]
    assert runs[1].telemetry["device_time"]["share"] == 0.5


def test_other_workers_are_known_to_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("hpo.device_time.read", asked.append)
    tiny_executor(tmp_path).run({}, None, "", Callbacks(other_workers=lambda: [7_000_001]))
    assert all(7_000_001 in processes for processes in asked)
    assert asked
