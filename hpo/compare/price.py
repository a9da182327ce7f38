"""What a comparison costs, and how probable it is that it decides: before it begins, and after each look.

Comparisons are simulated in which the precision loses nothing, and given to `hpo.compare.decision`: as many
runs as a plan has, with the spread that is expected of them, and as many rows as the split has. Before the
first look the runs' spread is the search's own, which is a guess: that of the differences between its trials
that have the same settings under two precisions, or else that of its best quarter, which is too large. Of the
rows it is assumed that a run flips `FLIPPED` of them. After a look both are those seen.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hpo.compare.decision import Array, decide
from hpo.config.comparison import REFERENCE, SEED, ComparisonConfig
from hpo.config.limits import MEASURED_METRICS
from hpo.study.reading.study_record import StudyRecord, complete_trials

POWER = 0.8
FLIPPED = 0.02
"""Share of the rows that a run under another precision answers otherwise, half of them better."""
_NUM_STUDIES = 100
_MOST_ROWS = 5000
"""More are not simulated: at that, rows limit nothing."""
_FEWEST = 4
"""Trials that tell a spread."""


@dataclass(frozen=True)
class Price:
    """Of a plan, and whether it decides."""

    seeds: int
    """Of each configuration: the fewest that decide with a probability of `POWER`, or the most allowed."""
    probability: float
    """That this many decide, if the precision loses nothing."""
    trials: int
    """Of fp32 and one other precision."""
    seconds: float | None
    """Of one worker; None: no trial tells."""
    least_margin: float
    """The smallest of which so many seeds say `as good` with a probability of `POWER`; maybe infinite."""
    spread: float
    """Of the differences between runs, in points: what the price rests on."""

    @property
    def decides(self) -> bool:
        return self.probability >= POWER

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"decides": self.decides}


@dataclass(frozen=True)
class Expected:
    """What a comparison will see, as far as one knows."""

    spread: float
    """Of the differences between runs, in points."""
    rows: Callable[[int], Array]
    """After so many runs, what each row of the split adds to their mean, in points."""
    difference: float = 0.0


def next_look(num: int) -> int:
    """The number of seeds after which a comparison looks next. Any would do, but a look costs a little."""
    return max(num + 1, num * 3 // 2)


def price_of(
    plan: ComparisonConfig, expected: Expected, seconds: float | None = None, above: int = 0
) -> Price:
    """Of the cheapest plan with more than `above` seeds that decides, or else of the largest that is allowed.

    Args:
        seconds: of a trial.
    """
    looks = [num for num in _looks(plan.seeds, plan.max_seeds) if num > above] or [plan.max_seeds]
    by_seeds: dict[int, tuple[float, float]] = {}

    def decides(num_seeds: int) -> bool:
        lows, highs = _bounds(num_seeds * len(plan.configurations), expected)
        probability = float(((lows > -plan.margin) | (highs < -plan.margin)).mean())
        by_seeds[num_seeds] = (probability, -float(np.sort(lows)[round(_NUM_STUDIES * (1 - POWER))]))
        return probability >= POWER

    place = bisect_left(looks[:-1], True, key=decides)  # more seeds decide more often
    num_seeds = looks[place]
    if num_seeds not in by_seeds:
        decides(num_seeds)
    probability, least = by_seeds[num_seeds]
    trials = 2 * num_seeds * len(plan.configurations)
    time = None if seconds is None else trials * seconds
    return Price(num_seeds, probability, trials, time, least, expected.spread)


def _looks(first: int, last: int) -> Iterator[int]:
    while first < last:
        yield first
        first = next_look(first)
    yield last


def _bounds(num_runs: int, expected: Expected) -> tuple[Array, Array]:
    """The ends of simulated comparisons."""
    rng = np.random.default_rng(0)
    seen = expected.rows(num_runs)
    num_rows = min(len(seen), _MOST_ROWS)
    rows = rng.choice(seen - seen.mean() + expected.difference, (_NUM_STUDIES, num_rows))
    runs = expected.spread * rng.standard_normal((_NUM_STUDIES, num_runs))
    differences = rows.mean(axis=1, keepdims=True) + runs
    row_bound = max(100.0, float(np.abs(seen).max()) * 2)
    decision = decide(differences, rows, 0.0, row_bound=row_bound, step=100 / len(seen))
    return decision.low, decision.high


def expected_before(record: StudyRecord, num_rows: int, setting: str) -> Expected | None:
    """From the search alone, of what differs in `setting`; None where it has too few trials for a spread."""
    spread = _search_spread(record, setting)
    return (
        None
        if spread is None or not num_rows
        else Expected(spread, lambda num_runs: _flipping(num_rows, num_runs))
    )


def expected_after(differences: Array, rows: Array) -> Expected:
    """What the pairs so far have shown goes on."""
    return Expected(float(differences.std(ddof=1)), lambda _: rows, float(differences.mean()))


def _flipping(num_rows: int, num_runs: int) -> Array:
    """Rows of which `FLIPPED` flip in each run, others in each."""
    rows = np.zeros(num_rows)
    half = round(num_rows * min(FLIPPED * num_runs, 1) / 2)
    rows[:half], rows[half : 2 * half] = 100 / num_runs, -100 / num_runs
    return rows


def _search_spread(record: StudyRecord, setting: str) -> float | None:
    place = next((k for k, name in enumerate(record.metric_names) if name not in MEASURED_METRICS), None)
    if place is None:
        return None
    trials = complete_trials(record)
    values = {trial.number: 100 * (trial.values or ())[place] for trial in trials}
    groups: dict[str, dict[str, float]] = {}
    for trial in trials:
        others = {name: value for name, value in trial.params.items() if name not in (setting, SEED)}
        of_group = groups.setdefault(json.dumps(others, sort_keys=True), {})
        of_group[str(trial.params.get(setting))] = values[trial.number]
    pairs = [
        value - of_group[REFERENCE]
        for of_group in groups.values()
        for name, value in of_group.items()
        if REFERENCE in of_group and name != REFERENCE
    ]
    if len(pairs) >= _FEWEST:
        return _spread(pairs)
    best = sorted(values.values(), reverse=record.directions[place] == "maximize")
    return _spread(best[: max(_FEWEST, len(best) // 4)]) if len(best) >= _FEWEST else None


def _spread(values: Sequence[float]) -> float:
    """Not 0, which four values that are alike do not prove."""
    return max(float(np.std(values, ddof=1)), 0.05)
