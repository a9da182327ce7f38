"""The verdict on one side against a reference: the same for training runs, deployed forms and predictions.

`as_good`, `worse` or `not_shown`, each with the sentence that people read. Both sides are treated alike: a
run without a score counts as the baseline, the best constant prediction, whichever side it is on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpo.evaluation.contributions import (
    Scored,
    Statistics,
    constant_predictions,
    metrics_by_task,
    rare_classes,
    scored,
    shuffled_value,
    unit_of,
)
from hpo.evaluation.decision import (
    Decision,
    VerdictName,
    collapse_share,
    decide,
    excludable_loss,
    rows_needed,
)
from hpo.tasks.registry import is_error

_NAMES_SHOWN = 5


@dataclass(frozen=True)
class Question:
    """What is asked, and the names that sentences use."""

    metric: str
    """`score`, or `<task>/<metric>`."""
    margin: float
    """A smaller loss does not count; in `unit`."""
    reference: str = "the reference"
    other: str = "the other model"
    rows: str = "rows"
    """What the labelled rows are: `rows of test`."""
    name: str = ""
    """Name of the metric in sentences; empty: `metric`."""

    @property
    def shown(self) -> str:
        return self.name or self.metric

    @property
    def unit(self) -> str:
        return unit_of(self.metric)


@dataclass(frozen=True, eq=False)
class Facts:
    """What the labels of a split tell about a metric, whatever the other side predicts."""

    labelled: Mapping[str, int]
    """Labelled rows by task."""
    num_rows: int
    """Rows that are labelled for any task of the metric."""
    row_bound: float
    """Largest change of the metric that one row can cause, times `num_rows`."""
    baseline: Scored | None
    """The best constant prediction. None: the task has none."""
    chance: float
    """Expected score of the same predictions in random order."""
    rare: Mapping[str, int]
    """Classes with too few labelled rows for the margin, with the number of rows."""

    @property
    def excludable(self) -> float:
        """The smallest loss that the rows can exclude, if all of them agree."""
        return excludable_loss(self.row_bound, self.num_rows)

    def limit(self, question: Question) -> str:
        """State the losses that the rows cannot exclude, and the number of rows that can."""
        rows = ", ".join(f"{num:,} of {task}" for task, num in self.labelled.items())
        of_tasks = f" ({rows})" if len(self.labelled) > 1 else ""
        least = math.ceil(100 * self.excludable) / 100
        told = (
            f"With {self.num_rows:,} labelled {question.rows}{of_tasks}, losses under {least:g} "
            f"{question.unit} cannot be excluded. A margin of {question.margin:g} takes "
            f"{rows_needed(self.row_bound, question.margin):,} such rows"
        )
        if self.rare:
            shown = [f"`{name}` ({num})" for name, num in [*self.rare.items()][:_NAMES_SHOWN]]
            more = f" and {len(self.rare) - _NAMES_SHOWN} more" if len(self.rare) > _NAMES_SHOWN else ""
            told += f". These classes have too few rows, so their loss is unknown: {', '.join(shown)}{more}"
        return f"{told}."


def facts_of(statistics: Statistics, question: Question) -> Facts | None:
    """The facts from the predictions of one run of the reference. None: they have no score."""
    run, metric = scored(statistics, question.metric), question.metric
    if run is None:
        return None
    constant = constant_predictions(statistics, metric)
    return Facts(
        {task: statistics[task].num_rows for task in metrics_by_task(statistics, metric)},
        len(run.rows_N),
        run.row_bound,
        scored(constant, metric) if constant else None,
        shuffled_value(statistics, metric),
        rare_classes(statistics, metric, question.margin),
    )


@dataclass(frozen=True)
class Collapses:
    """The runs of the other side that collapsed.

    A run collapsed if it has no score, or a score nearer to the baseline than to the median of the reference.
    """

    num_runs: int
    num_collapsed: int
    size: float
    """Distance from the median of the reference to the baseline, in the unit of the metric."""
    margin: float

    @property
    def possible_share(self) -> float:
        """The share of collapses that the runs do not exclude."""
        return collapse_share(self.num_runs, self.num_collapsed)

    @property
    def allowed_share(self) -> float:
        """With a larger share of collapses, the mean loss exceeds the margin."""
        return min(self.margin / self.size, 1.0)


@dataclass(frozen=True)
class Verdict:
    """The verdict, its evidence and its sentence."""

    verdict: VerdictName
    difference: float
    """Mean over runs, other side minus reference; higher is better. NaN: there is none."""
    interval: tuple[float, float]
    """In `unit`; each end errs in at most 2.5 % of comparisons, at whichever number of runs they stop."""
    num_runs: int
    labelled_rows: int
    row_bound: float
    """Largest change of the metric that one row can cause, times the number of rows."""
    unit: str
    sentence: str
    reason: str = ""
    """Why nothing is shown, where more runs would not help."""
    baseline: float = math.nan
    reference_median: float = math.nan
    collapses: Collapses | None = None
    """None: there is one run on each side, or no baseline."""


def judge(
    question: Question,
    reference: Sequence[Scored | None],
    other: Sequence[Scored | None],
    facts: Facts | None,
) -> Verdict:
    """Judge runs that pair by position; None is a run without a score.

    `facts` come from a run with a score; None: there is no such run. Raises ValueError if the numbers of runs
    differ.
    """
    if len(reference) != len(other):
        raise ValueError(f"runs must pair, but got {len(reference)} and {len(other)}.")
    known = [run.value for run in reference if run is not None]
    baseline = facts.baseline if facts else None
    median = float(np.median(known)) if known else math.nan
    collapses = None
    if baseline and len(other) > 1 and median > baseline.value:
        middle = (median + baseline.value) / 2
        num = sum(run is None or run.value < middle for run in other)
        collapses = Collapses(len(other), num, median - baseline.value, question.margin)
    pairs = [(theirs or baseline, ours or baseline) for theirs, ours in zip(reference, other, strict=True)]
    full = [(theirs, ours) for theirs, ours in pairs if theirs and ours]
    found = Verdict(
        "not_shown",
        math.nan,
        (-math.inf, math.inf),
        len(other),
        facts.num_rows if facts else 0,
        math.inf,
        question.unit,
        "",
        baseline=baseline.value if baseline else math.nan,
        reference_median=median,
        collapses=collapses,
    )
    if facts is None or not other:
        return _worded(question, replace(found, reason="No run has a score"))
    if len(full) < len(pairs):
        return _worded(question, replace(found, reason="A run has no score, and the metric has no baseline"))
    decision, bound = _decide(full, question.margin)
    found = replace(
        found, difference=decision.difference, interval=(decision.low, decision.high), row_bound=bound
    )
    reason = _reason(question, reference, facts, found, decision)
    return _worded(
        question, replace(found, verdict="not_shown" if reason else decision.verdict, reason=reason)
    )


def _decide(pairs: Sequence[tuple[Scored, Scored]], margin: float) -> tuple[Decision, float]:
    differences_R = np.array([ours.value - theirs.value for theirs, ours in pairs])
    rows_N = np.mean([ours.rows_N - theirs.rows_N for theirs, ours in pairs], axis=0)
    bound = float(np.mean([max(ours.row_bound, theirs.row_bound) for theirs, ours in pairs]))
    step = bound / len(rows_N) if math.isfinite(bound) else 0.0
    return decide(differences_R, rows_N, margin, row_bound=bound, step=step), bound


def _reason(
    question: Question, reference: Sequence[Scored | None], facts: Facts, found: Verdict, decision: Decision
) -> str:
    """Why nothing is shown with any number of runs; empty: the interval decides."""
    if math.isinf(found.row_bound):
        return f"By how much one row can change {question.shown} is unknown"
    runs = [run for run in reference if run is not None]
    if not runs:
        return f"No run of {question.reference} has a score"
    constant = found.baseline if facts.baseline else -math.inf
    level = max(constant, facts.chance)
    if found.reference_median - 1.96 * np.median([run.standard_error for run in runs]) <= level:
        what = "the best constant prediction" if level == constant else "its predictions in random order"
        return (
            f"It is not shown that {question.reference} has learned anything: it has "
            f"{found.reference_median:.2f} {question.unit}, and {what} {level:.2f}"
        )
    if decision.verdict != "worse" and excludable_loss(found.row_bound, facts.num_rows) >= question.margin:
        return replace(facts, row_bound=found.row_bound).limit(question).removesuffix(".")
    return ""


def _worded(question: Question, found: Verdict) -> Verdict:
    reference, other = question.reference, question.other
    capitalized = other[0].upper() + other[1:] if other.startswith("the ") else other
    heads = {
        "as_good": f"{capitalized} is as good as {reference}",
        "worse": f"{capitalized} is worse than {reference}",
        "not_shown": f"It is not shown whether {other} is as good as {reference}",
    }
    told = heads[found.verdict]
    if not math.isnan(found.difference):
        told += f": {question.shown} {found.difference:+.2f}"
        if math.isfinite(found.interval[0] + found.interval[1]):
            told += f" [{found.interval[0]:+.2f}, {found.interval[1]:+.2f}]"
        runs = f"{found.num_runs} run{'s' * (found.num_runs > 1)}"
        rows = f"{found.labelled_rows:,} labelled {question.rows}"
        few = "" if math.isfinite(found.interval[0]) or found.reason else " (too few runs for an interval)"
        told += f" {found.unit}{few}, margin {question.margin:g}; {runs}, {rows}"
    told += "."
    if found.reason:
        told += f" {found.reason}."
    elif found.verdict == "as_good" and is_error(question.metric):
        told += " An error counts as the range of the labels where it is larger."
    if found.collapses and not found.reason:
        told += f" {_collapse_sentence(found.collapses, found)}"
    return replace(found, sentence=told.rstrip())


def _collapse_sentence(collapses: Collapses, found: Verdict) -> str:
    """The collapses that the runs do not exclude, and the condition of `as_good`."""
    runs, share = collapses.num_runs, 100 * collapses.possible_share
    seen = f"{collapses.num_collapsed} of {runs} runs collapsed" if collapses.num_collapsed else ""
    if found.verdict != "as_good":
        return f"{seen}." if seen else ""
    condition = (
        f"This holds only if fewer than {100 * collapses.allowed_share:.2g} % of the runs collapse, since a "
        f"collapse to the baseline costs {collapses.size:.3g} {found.unit}"
    )
    return f"{condition}; these {runs} runs do not exclude {share:.0f} %." + (f" {seen}." if seen else "")
