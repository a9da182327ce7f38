"""What the pairs of a comparison say on each kind of device.

What a precision does to a metric is arithmetic, and carries over between devices that compute it alike, so
the verdict is of the pairs of all kinds together; what each kind says is beside it. They are not put together
where two kinds differ by more than chance does (Welch's interval for the difference of their paired
differences; it warns, so the looks are not paid for), or where trials have equal time and a faster device
trains more. Speed and memory are the device's own: each kind has its own ratios, and there are none over
several. In the paired question they are of pairs; in the tuned one of the trials that are compared there,
whose batch sizes may differ. A recommendation rests on the speed, so its intervals are at the level of the
look.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeGuard

import numpy as np

from hpo.compare.estimate import (
    Array,
    Estimate,
    Ratio,
    paired_estimate,
    ratio_estimate,
    ratio_json,
    tuned_estimate,
    tuned_ratio_estimate,
)
from hpo.study.study_record import TrialRecord

Pair = tuple[TrialRecord | None, TrialRecord | None]
"""A trial of the precision and its twin of the reference; None: it has not ended."""
Pairs = Sequence[Sequence[Pair]]
"""[configuration][seed]."""

LEVEL = 0.05
"""Of each side of an interval of a difference; of the warning that two kinds differ, for both sides."""
RATIOS = ("train_examples_per_second", "peak_memory_bytes")
"""The attributes of a trial that are compared."""


@dataclass(frozen=True)
class OnDevice:
    """A precision against the reference, in the trials of one kind of device."""

    device: str
    num_pairs: int
    """Of which both trials have a score; in the tuned question the scores of the side with fewer."""
    difference: float | None
    """Points, precision minus reference; None: no configuration has two pairs here, or, in the tuned
    question, one has fewer than two scores."""
    low: float | None
    high: float | None
    """90 %, as if this were the only look; None where nothing is known."""
    speed: Ratio | None
    """Training examples per second over the reference's; None: there are no trials that tell."""
    memory: Ratio | None
    """Peak memory over the reference's."""

    def as_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "num_pairs": self.num_pairs,
            "difference": self.difference,
            "low": self.low,
            "high": self.high,
            **ratio_json("speed_ratio", self.speed),
            **ratio_json("memory_ratio", self.memory),
        }


Side = Sequence[Sequence[TrialRecord | None]]
"""[configuration][seed] of one precision; None: it has not ended."""


def tuned_by_device(
    ours: Side,
    theirs: Side,
    kinds: Mapping[int, str],
    value: Callable[[TrialRecord], float | None],
    level: float,
) -> tuple[OnDevice, ...]:
    """Each kind of device that trials of both sides ran on; nothing is paired.

    Args:
        kinds: the kind of each trial, by its number.
        value: points of a trial.
        level: one-sided, of the intervals of speed and memory.
    """
    of_sides = [
        {kinds.get(trial.number) for row in side for trial in row if trial is not None} - {None}
        for side in (ours, theirs)
    ]
    found = []
    for device in sorted(filter(None, of_sides[0] & of_sides[1])):
        here = [
            [[one if one and kinds.get(one.number) == device else None for one in row] for row in side]
            for side in (ours, theirs)
        ]
        values = [
            np.array([[None if one is None else value(one) for one in row] for row in side], dtype=np.float64)
            for side in here
        ]
        difference, low, high = _known(tuned_estimate(*values))
        ratios = [_tuned_ratio(here, name, level) for name in RATIOS]
        num = min(int(np.isfinite(side).sum()) for side in values)
        found.append(OnDevice(device, num, difference, low, high, *ratios))
    return tuple(found)


def by_device(
    pairs: Pairs, kinds: Mapping[int, str], value: Callable[[TrialRecord], float | None], level: float
) -> tuple[OnDevice, ...]:
    """Each kind of device that both trials of a pair ran on.

    Args:
        kinds: the kind of each trial, by its number.
        value: points of a trial.
        level: one-sided, of the intervals of speed and memory.
    """
    found = []
    for device in sorted({kind for row in pairs for pair in row if (kind := _kind(pair, kinds))}):
        here = _on(pairs, kinds, device)
        differences = _differences(here, value)
        enough = differences[_enough(differences)]
        known = _known(paired_estimate(enough)) if len(enough) else (None, None, None)
        ratios = [_ratio(here, name, level) for name in RATIOS]
        found.append(OnDevice(device, int(np.isfinite(differences).sum()), *known, *ratios))
    return tuple(found)


def _known(estimate: Estimate) -> tuple[float | None, float | None, float | None]:
    """The difference and its bounds, None for what is not known."""
    difference, low, high = (
        float(found) if np.isfinite(found) else None
        for found in (estimate.difference, *estimate.interval(LEVEL))
    )
    return difference, low, high


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


def _ratio(pairs: Pairs, attribute: str, level: float) -> Ratio | None:
    """Of the pairs that had their device alone."""
    measured = [[_measured(pair, attribute) for pair in row] for row in pairs]
    if not any(values is not None for row in measured for values in row):
        return None
    ours, theirs = ([[values and values[side] for values in row] for row in measured] for side in (0, 1))
    return ratio_estimate(ours, theirs, level)


def _tuned_ratio(sides: Sequence[Side], attribute: str, level: float) -> Ratio | None:
    """Of the trials that had their device alone, with the number of threads that most of them had."""
    threads = Counter(
        _threads(trial) for side in sides for row in side for trial in row if _alone(trial, attribute)
    )
    usual = threads.most_common(1)
    ours, theirs = (
        [
            [
                trial.attributes[attribute]
                if _alone(trial, attribute) and _threads(trial) == usual[0][0]
                else None
                for trial in row
            ]
            for row in side
        ]
        for side in sides
    )
    if not all(any(one is not None for row in side for one in row) for side in (ours, theirs)):
        return None
    return tuned_ratio_estimate(ours, theirs, level)


def _measured(pair: Pair, attribute: str) -> tuple[float, float] | None:
    ours, theirs = pair
    if not (_alone(ours, attribute) and _alone(theirs, attribute)) or _threads(ours) != _threads(theirs):
        return None
    return ours.attributes[attribute], theirs.attributes[attribute]


def _alone(trial: TrialRecord | None, attribute: str) -> TypeGuard[TrialRecord]:
    """Whether what was measured of a trial says how its precision does."""
    return (
        trial is not None
        and trial.outcome == "complete"
        and trial.attributes.get(attribute) is not None
        and not trial.telemetry.get("device", {}).get("shared")
    )


def _threads(trial: TrialRecord) -> int | None:
    found: int | None = trial.telemetry.get("device", {}).get("num_threads")
    return found
