"""What the pairs of a comparison say on each kind of device.

What a precision does to a metric is arithmetic, and carries over between devices that compute it alike, so
the verdict is of the pairs of all kinds together; what each kind says is beside it. They are not put together
where two kinds differ by more than chance does (Welch's interval for the difference of their paired
differences; it warns, so the looks are not paid for), or where trials have equal time and a faster device
trains more. Speed and memory are the device's own: each kind has ratios of its own pairs, and there are none
over several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from hpo.compare.estimate import Array, Ratio, paired_estimate, ratio_estimate, tuned_estimate
from hpo.study.study_record import TrialRecord

Pair = tuple[TrialRecord | None, TrialRecord | None]
"""A trial of the precision and its twin of the reference; None: it has not ended."""
Pairs = Sequence[Sequence[Pair]]
"""[configuration][seed]."""

LEVEL = 0.05
"""Of each side of an interval; of the warning that two kinds differ, for both sides."""


@dataclass(frozen=True)
class OnDevice:
    """A precision against the reference, in the pairs of one kind of device."""

    device: str
    num_pairs: int
    """Of which both trials have a score."""
    difference: float | None
    """Points, precision minus reference; None: no configuration has two pairs here, or none was asked for."""
    low: float | None
    high: float | None
    """90 %, as if this were the only look; None where nothing is known."""
    speed: Ratio | None
    """Training examples per second over the reference's; None: there is no pair that tells."""
    memory: Ratio | None
    """Peak memory over the reference's."""

    def as_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "num_pairs": self.num_pairs,
            "difference": self.difference,
            "low": self.low,
            "high": self.high,
            "speed_ratio": self.speed and self.speed.ratio,
            "speed_ratio_low": self.speed and self.speed.low,
            "speed_ratio_high": self.speed and self.speed.high,
            "memory_ratio": self.memory and self.memory.ratio,
            "memory_ratio_low": self.memory and self.memory.low,
            "memory_ratio_high": self.memory and self.memory.high,
        }


def by_device(
    pairs: Pairs, kinds: Mapping[int, str], value: Callable[[TrialRecord], float | None]
) -> tuple[OnDevice, ...]:
    """Each kind of device that both trials of a pair ran on.

    Args:
        kinds: the kind of each trial, by its number.
        value: points of a trial.
    """
    found = []
    for device in sorted({kind for row in pairs for pair in row if (kind := _kind(pair, kinds))}):
        here = _on(pairs, kinds, device)
        differences = _differences(here, value)
        enough = differences[_enough(differences)]
        difference = low = high = None
        if len(enough):
            estimate = paired_estimate(enough)
            difference = float(estimate.difference)
            bounds = [float(bound) for bound in estimate.interval(LEVEL)]
            low, high = bounds if all(map(math.isfinite, bounds)) else (None, None)
        ratios = [_ratio(here, name) for name in ("train_examples_per_second", "peak_memory_bytes")]
        num_pairs = int(np.isfinite(differences).sum())
        found.append(OnDevice(device, num_pairs, difference, low, high, ratios[0], ratios[1]))
    return tuple(found)


def differing_devices(
    pairs: Pairs, kinds: Mapping[int, str], value: Callable[[TrialRecord], float | None]
) -> tuple[str, str] | None:
    """Two kinds of device between which the paired difference differs by more than chance does, if any."""
    devices = sorted({kind for row in pairs for pair in row if (kind := _kind(pair, kinds))})
    differences = {device: _differences(_on(pairs, kinds, device), value) for device in devices}
    num_asked = math.comb(len(devices), 2)
    for one, other in combinations(devices, 2):
        both = _enough(differences[one]) & _enough(differences[other])
        if both.any():
            estimate = tuned_estimate(differences[one][both], differences[other][both])
            low, high = estimate.interval(LEVEL / 2 / num_asked)
            if low > 0 or high < 0:
                return one, other
    return None


def _kind(pair: Pair, kinds: Mapping[int, str]) -> str | None:
    """Of the device that both ran on; None: they have none in common, or one of them has not ended."""
    found = {None if trial is None else kinds.get(trial.number) for trial in pair}
    return found.pop() if len(found) == 1 else None


def _on(pairs: Pairs, kinds: Mapping[int, str], device: str) -> Pairs:
    return [[pair if _kind(pair, kinds) == device else (None, None) for pair in row] for row in pairs]


def _differences(pairs: Pairs, value: Callable[[TrialRecord], float | None]) -> Array:
    """[configuration, seed], NaN where a trial has no score."""
    scores = [[[None if one is None else value(one) for one in pair] for pair in row] for row in pairs]
    values = np.array(scores, dtype=np.float64)
    return np.asarray(values[..., 0] - values[..., 1])


def _enough(differences: Array) -> np.ndarray:
    """Which configurations have the two pairs that tell a variance."""
    return np.asarray(np.isfinite(differences).sum(axis=1) >= 2)


def _ratio(pairs: Pairs, attribute: str) -> Ratio | None:
    """Of the pairs that had their device alone."""
    measured = [[_measured(pair, attribute) for pair in row] for row in pairs]
    if not any(values is not None for row in measured for values in row):
        return None
    ours, theirs = ([[values and values[side] for values in row] for row in measured] for side in (0, 1))
    return ratio_estimate(ours, theirs)


def _measured(pair: Pair, attribute: str) -> tuple[float, float] | None:
    trials = [trial for trial in pair if trial is not None and trial.outcome == "complete"]
    devices = [trial.telemetry.get("device", {}) for trial in trials]
    if len(trials) < 2 or any(device.get("shared") for device in devices):
        return None
    if devices[0].get("num_threads") != devices[1].get("num_threads"):
        return None
    ours, theirs = (trial.attributes.get(attribute) for trial in trials)
    return None if ours is None or theirs is None else (ours, theirs)
