"""What became of the compared trials under each precision: how many trained, why others did not, and what
rounding lost in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from hpo.compare.answers import Scores
from hpo.outcome import Outcome
from hpo.study.study_record import TrialRecord

SHARES = ("underflow", "overflow", "updates_lost")
"""Of `hpo.training.numerics`, over all parts of the model."""


@dataclass(frozen=True)
class Numerics:
    """Medians over the trials that were measured; None: of no trial is it known."""

    num_trials: int
    underflow: float | None
    """At the last evaluation of a trial: share of its gradient's elements, from 0 to 1."""
    overflow: float | None
    """Likewise."""
    updates_lost: float | None
    """Likewise, of its weights."""
    skipped_steps: float | None
    """Of the whole trial, by loss scaling."""


@dataclass(frozen=True)
class UnderPrecision:
    """The trials of one precision, but for the reference's second set of seeds."""

    precision: str
    num_trials: int
    """That have ended."""
    outcomes: dict[str, int]
    """Number of trials by outcome, the most frequent first."""
    reason: str
    """Of the first trial with the most frequent outcome among those that are not complete; empty: all are."""
    numerics: Numerics
    """Of the paired configurations, which are the same under every precision; of all where none is paired."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def by_precision(scores: Scores) -> tuple[UnderPrecision, ...]:
    """A row for each precision, as the plan has them."""
    any_paired = any(found.paired for found in scores.plan.configurations)
    return tuple(
        _under(
            precision,
            _trials(scores, precision, paired=False),
            _trials(scores, precision, paired=any_paired),
        )
        for precision in scores.plan.precisions
    )


def _trials(scores: Scores, precision: str, *, paired: bool) -> list[TrialRecord]:
    """Those that have ended; with `paired`, of the paired configurations alone."""
    found = [
        scores.trial(arm, index)
        for arm in scores.plan.arms()
        if arm.precision == precision and not arm.repeat
        if scores.plan.configurations[arm.configuration].paired or not paired
        for index in range(scores.plan.seeds_of(arm))
    ]
    return [trial for trial in found if trial is not None]


def _under(precision: str, trials: Sequence[TrialRecord], measured: Sequence[TrialRecord]) -> UnderPrecision:
    outcomes = dict(Counter(trial.outcome for trial in trials).most_common())
    failed = next((outcome for outcome in outcomes if outcome != Outcome.COMPLETE), None)
    reason = next((trial.reason for trial in trials if trial.outcome == failed), "")
    return UnderPrecision(precision, len(trials), outcomes, reason, _numerics(measured))


def _numerics(trials: Sequence[TrialRecord]) -> Numerics:
    by_trial = [[row.numerics for row in trial.evaluations if row.numerics] for trial in trials]
    by_trial = [rows for rows in by_trial if rows]
    shares = {name: _median([rows[-1]["all"][name] for rows in by_trial]) for name in SHARES}
    skipped = [
        [row["skipped_steps"] for row in rows if row["skipped_steps"] is not None] for rows in by_trial
    ]
    return Numerics(
        len(by_trial), **shares, skipped_steps=_median([sum(counts) for counts in skipped if counts])
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(median(known)) if known else None
