"""What became of the compared trials under each precision: how many trained, and why others did not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpo.compare.answers import Scores
from hpo.outcome import Outcome
from hpo.study.study_record import TrialRecord


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

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def by_precision(scores: Scores) -> tuple[UnderPrecision, ...]:
    """A row for each precision, as the plan has them."""
    return tuple(
        _under(precision, [trial for trial in _trials(scores, precision) if trial is not None])
        for precision in scores.plan.precisions
    )


def _trials(scores: Scores, precision: str) -> list[TrialRecord | None]:
    return [
        scores.trial(arm, index)
        for arm in scores.plan.arms()
        if arm.precision == precision and not arm.repeat
        for index in range(scores.plan.seeds_of(arm))
    ]


def _under(precision: str, trials: Sequence[TrialRecord]) -> UnderPrecision:
    outcomes = dict(Counter(trial.outcome for trial in trials).most_common())
    failed = next((outcome for outcome in outcomes if outcome != Outcome.COMPLETE), None)
    reason = next((trial.reason for trial in trials if trial.outcome == failed), "")
    return UnderPrecision(precision, len(trials), outcomes, reason)
