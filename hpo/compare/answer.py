"""What is known of one precision: the decision on its pairs of runs, what that rests on, collapsed runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from hpo.compare.decision import Array, collapse_share, decide
from hpo.compare.runs import STORED_BYTES, Differences, Ratio, Runs
from hpo.config.comparison import REFERENCE
from hpo.non_inferiority import VerdictName
from hpo.non_inferiority import decide as verdict_of
from hpo.study.reading.study_record import TrialRecord

COLLAPSE = 10
"""A run that loses more than so many margins has collapsed."""
RATIOS = {
    "speed_ratio": "train_examples_per_second",
    "memory_ratio": "peak_memory_bytes",
    "stored_ratio": STORED_BYTES,
}
"""What is compared beside the score, by what is measured of a trial (`hpo.compare.runs`)."""


@dataclass(frozen=True, eq=False)
class Answer:
    """What is known of one precision."""

    precision: str
    pairs: Differences
    ratios: Mapping[str, Ratio | None]
    """The value of each of `RATIOS`; None where no pair was measured."""
    verdict: VerdictName = "undecided"
    difference: float = math.nan
    low: float = -math.inf
    high: float = math.inf
    num_collapsed: int = 0
    reason: str = ""
    """Why it is not decided, where more seeds would not help."""

    @property
    def num_runs(self) -> int:
        return len(self.pairs.pairs)

    @property
    def num_rows(self) -> int:
        return len(self.pairs.of_rows)

    @property
    def collapse_share(self) -> float:
        return collapse_share(self.num_runs, self.num_collapsed)


def answer_of(runs: Runs, precision: str, ahead: str) -> Answer:
    """`ahead` names the precision that keeps this one from being asked about; empty: none does."""
    pairs = runs.differences(precision, runs.metric)
    answer = Answer(
        precision, pairs, {name: runs.ratio(precision, attribute) for name, attribute in RATIOS.items()}
    )
    if ahead:
        return replace(answer, reason=f"not asked: {runs.plan.named(ahead)} comes first, and is not as good")
    if not answer.num_runs:
        return replace(answer, reason=_why_no_pair(runs, precision))
    known = pairs.of_runs[np.isfinite(pairs.of_runs)]
    num_far = int((known < -COLLAPSE * runs.plan.margin).sum())
    answer = replace(answer, num_collapsed=pairs.num_lost + num_far)
    lost = f"{pairs.num_lost} of {answer.num_runs} runs ended without a score" if pairs.num_lost else ""
    if not len(known):
        return replace(
            answer, verdict="worse" if answer.num_runs >= runs.plan.seeds else "undecided", reason=lost
        )
    return _decided(runs, answer, known, lost)


def _decided(runs: Runs, answer: Answer, known: Array, lost: str) -> Answer:
    """By the differences that are known; `lost` says how many are not."""
    rows, in_points = answer.pairs.of_rows, runs.unit == "points"
    # of metrics in the labels' units, a row has no worst value
    row_bound = max(100.0, float(np.abs(rows).max())) if in_points else math.inf
    step = 100 / len(rows) if in_points else 0.0
    decision = decide(known, rows, runs.plan.margin, row_bound=row_bound, step=step)
    difference, low, high = (float(of) for of in (decision.difference, decision.low, decision.high))
    answer = replace(answer, difference=difference, low=low, high=high)
    verdict = verdict_of(low, high, runs.plan.margin)
    if verdict == "as_good" and lost:
        return replace(answer, reason=lost)
    return replace(answer, verdict=verdict)


def _why_no_pair(runs: Runs, precision: str) -> str:
    if num := len([*runs.pairs(precision)]):
        return f"{REFERENCE} itself ended without a score in {num} of {num} runs"
    either = f"{runs.plan.named(precision)} or {REFERENCE}"
    return f"no pair of runs tells anything: those of {either} failed, or ran in another one"


def collapsed_runs(runs: Runs) -> Iterator[tuple[TrialRecord, int, float | None]]:
    """The runs that ended without a score where their twin has one, or far below it; runs of fp32 too.

    Each comes with the trial of its configuration in the search, and its difference to the twin (None: it has
    no score).
    """
    for precision in runs.plan.precisions[1:]:
        for pair in runs.pairs(precision):
            configuration = runs.plan.configurations[pair.configuration].trial
            for one, twin in ((pair.ours, pair.theirs), (pair.theirs, pair.ours)):
                score, other = runs.scored(one, runs.metric), runs.scored(twin, runs.metric)
                difference = score[0] - other[0] if score and other else None
                if other and (difference is None or difference < -COLLAPSE * runs.plan.margin):
                    yield one, configuration, difference
