"""The verdict on one side against a reference: the same for training runs, deployed forms and predictions.

`as_good`, `worse` or `not_shown`, each with the sentence that people read. Both sides are treated alike: a
run without a score counts as the baseline, the best constant prediction, whichever side it is on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpo.evaluation.contributions import (
    Scored,
    Statistics,
    constant_predictions,
    metrics_by_task,
    perfect_statistics,
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
from hpo.tasks.example import Example
from hpo.tasks.kind import Task, is_error, kind_of

_NAMES_SHOWN = 5
_EXAMPLE = 20.0
"""Points that a run loses in the example of a condition."""


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

    is_brief: bool = False
    """Whether the losses that the rows cannot exclude were stated in full before."""

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
    assumptions: tuple[str, ...] = ()
    """Sentences that limit what a verdict says."""

    @property
    def excludable(self) -> float:
        """The smallest loss that the rows can exclude, if all of them agree."""
        return excludable_loss(self.row_bound, self.num_rows)

    def limit(self, question: Question) -> str:
        """State the losses that the rows cannot exclude, and the rows that the margin takes if it is one."""
        if math.isinf(self.row_bound):
            return f"By how much one row can change {question.shown} is unknown, so no loss can be excluded."
        rows = ", ".join(f"{num:,} of {task}" for task, num in self.labelled.items())
        of_tasks = f" ({rows})" if len({*self.labelled.values()}) > 1 else ""
        least = math.ceil(100 * self.excludable) / 100
        with_rows = f"With {self.num_rows:,} labelled {question.rows}{of_tasks}"
        if math.isinf(question.margin):
            known = min(least, 100.0) if question.unit == "points" else least
            return f"{with_rows}, a score is known to {known:g} {question.unit} at best."
        is_any = question.unit == "points" and least >= 100
        losses = "no loss" if is_any else f"losses under {least:g} {question.unit}"
        told = f"{with_rows}, {losses} {'can' if is_any else 'cannot'} be excluded"
        if question.is_brief:
            return f"{told}."
        if self.excludable >= question.margin:
            num = rows_needed(self.row_bound, question.margin)
            told += f". A margin of {question.margin:g} needs {num:,} such rows"
        if self.rare:
            shown = [f"`{name}` ({num})" for name, num in [*self.rare.items()][:_NAMES_SHOWN]]
            more = f" and {len(self.rare) - _NAMES_SHOWN} more" if len(self.rare) > _NAMES_SHOWN else ""
            told += f". These classes have too few rows, so their loss is unknown: {', '.join(shown)}{more}"
        return f"{told}."


def label_facts(tasks: Sequence[Task], examples: Sequence[Example], question: Question) -> Facts | None:
    """The facts from labels alone, as for right predictions. None: the metric has no value on these rows.

    A row has the least effect on the `rmse` of a poor model, so errors have the bound of the baseline.
    """
    facts = facts_of(perfect_statistics(tasks, examples), question)
    if facts is None or facts.baseline is None or not is_error(question.metric):
        return facts
    return replace(facts, row_bound=min(facts.row_bound, facts.baseline.row_bound))


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
        tuple(_assumptions(statistics, metric)),
    )


def _assumptions(statistics: Statistics, metric: str) -> Iterator[str]:
    names = metrics_by_task(statistics, metric)
    for task, name in names.items():
        of, of_task = statistics[task], f" of {task}" if len(names) > 1 else ""
        kind = kind_of(of.task)
        if kind.is_number:
            yield f"An error{of_task} counts as the range of the labels where it is larger."
        elif (kind.is_list or kind.in_spans) and kind.row_bound(name, of.counts_NC, of.values_N) != 1:
            yield f"It is assumed that no row has more items{of_task} than one of these rows has."


@dataclass(frozen=True)
class Collapses:
    """The runs of both sides that collapsed.

    A run collapsed if it has no score, or a score nearer to the baseline than to the median of the reference.
    """

    num_runs: int
    num_collapsed: int
    num_reference_collapsed: int
    middle: float
    """A score below it is nearer to the baseline."""
    size: float
    """Distance from the median of the reference to the baseline, in the unit of the metric."""

    @property
    def possible_share(self) -> float:
        """The share of collapses that the runs do not exclude."""
        return collapse_share(self.num_runs, self.num_collapsed)


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
    """None: there is one run on each side, or the baseline is too near to the reference."""


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
    known = [run for run in reference if run is not None]
    median = float(np.median([run.value for run in known])) if known else math.nan
    baseline = facts.baseline if facts else None
    pairs = [(theirs or baseline, ours or baseline) for theirs, ours in zip(reference, other, strict=True)]
    full = [(theirs, ours) for theirs, ours in pairs if theirs and ours]
    decision, bound = Decision(math.nan, -math.inf, math.inf, "not_shown"), math.inf
    if facts is None or not known:
        reason = f"No run of {question.reference} has a score" if facts else "No run has a score"
    elif len(full) < len(pairs):
        reason = "A run has no score, and the metric has no baseline"
    else:
        decision, bound = _decide(full, question.margin)
        facts = replace(facts, row_bound=bound)
        reason = _why_not_shown(question, known, facts, decision)
    found = Verdict(
        "not_shown" if reason else decision.verdict,
        decision.difference,
        (decision.low, decision.high),
        len(other),
        facts.num_rows if facts else 0,
        bound,
        question.unit,
        "",
        reason,
        baseline.value if baseline else math.nan,
        median,
        _collapses(question, reference, other, median, baseline),
    )
    return replace(found, sentence=_sentence(question, found, facts.assumptions if facts else ()))


def _collapses(
    question: Question,
    reference: Sequence[Scored | None],
    other: Sequence[Scored | None],
    median: float,
    baseline: Scored | None,
) -> Collapses | None:
    """A run halfway to the baseline must have lost more than the margin, or there are no collapses."""
    if baseline is None or len(other) < 2 or not median - baseline.value > 2 * question.margin:
        return None
    middle = (median + baseline.value) / 2
    lost, of_reference = (
        sum(run is None or run.value < middle for run in side) for side in (other, reference)
    )
    return Collapses(len(other), lost, of_reference, middle, median - baseline.value)


def _decide(pairs: Sequence[tuple[Scored, Scored]], margin: float) -> tuple[Decision, float]:
    differences_R = np.array([ours.value - theirs.value for theirs, ours in pairs])
    rows_N = np.mean([ours.rows_N - theirs.rows_N for theirs, ours in pairs], axis=0)
    bound = float(np.mean([max(ours.row_bound, theirs.row_bound) for theirs, ours in pairs]))
    step = bound / len(rows_N) if math.isfinite(bound) else 0.0
    return decide(differences_R, rows_N, margin, row_bound=bound, step=step), bound


def _why_not_shown(question: Question, reference: Sequence[Scored], facts: Facts, decision: Decision) -> str:
    """Why nothing is shown with any number of runs; empty: the interval decides."""
    if math.isinf(facts.row_bound):
        return f"By how much one row can change {question.shown} is unknown"
    median = float(np.median([run.value for run in reference]))
    constant = facts.baseline.value if facts.baseline else -math.inf
    level = max(constant, facts.chance)
    if median - 1.96 * np.median([run.standard_error for run in reference]) <= level:
        what = "the best constant prediction" if level == constant else "its predictions in random order"
        return (
            f"It is not shown that {question.reference} has learned anything: it has "
            f"{_number(median, question.unit)} {question.unit}, and {what} {_number(level, question.unit)}"
        )
    absent = [f"`{name}`" for name, num in facts.rare.items() if not num]
    if decision.verdict != "worse" and absent:
        shown = ", ".join(absent[:_NAMES_SHOWN]) + ", ..." * (len(absent) > _NAMES_SHOWN)
        return f"No row has the class {shown}, so a loss there is unknown"
    if decision.verdict != "worse" and facts.excludable >= question.margin:
        return facts.limit(question).removesuffix(".")
    return ""


def _number(value: float, unit: str, sign: str = "") -> str:
    """Two decimals of points, three digits of label units."""
    return f"{value:{sign}.2f}" if unit == "points" else f"{value:{sign}.3g}"


def _sentence(question: Question, found: Verdict, assumptions: Sequence[str]) -> str:
    reference, other, unit = question.reference, question.other, question.unit
    capitalized = other[0].upper() + other[1:] if other.startswith("the ") else other
    told = {
        "as_good": f"{capitalized} is as good as {reference}",
        "worse": f"{capitalized} is worse than {reference}",
        "not_shown": f"It is not shown whether {other} is as good as {reference}",
    }[found.verdict]
    if not math.isnan(found.difference):
        told += f": {question.shown} {_number(found.difference, unit, '+')}"
        if math.isfinite(found.interval[0] + found.interval[1]):
            low, high = (_number(end, unit, "+") for end in found.interval)
            told += f" [{low}, {high}]"
        runs = f"{found.num_runs} run{'s' * (found.num_runs > 1)}"
        rows = f"{found.labelled_rows:,} labelled {question.rows}"
        is_few = math.isinf(found.interval[0]) and math.isfinite(found.row_bound)
        few = " (too few runs for an interval)" if is_few else ""
        told += f" {unit}{few}, margin {question.margin:g}; {runs}, {rows}"
    parts = [told + ".", f"{found.reason}." if found.reason else ""]
    if found.verdict == "as_good" and found.num_runs > 1:
        parts.append(_condition(question, found))
    collapses = found.collapses
    if collapses and collapses.num_collapsed + collapses.num_reference_collapsed and not found.reason:
        of_reference = f", and {collapses.num_reference_collapsed} of {reference}"
        parts.append(f"{collapses.num_collapsed} of {collapses.num_runs} runs collapsed{of_reference}.")
    if found.verdict != "not_shown":
        parts += assumptions
    return " ".join(filter(None, parts))


def _condition(question: Question, found: Verdict) -> str:
    """The losses of few runs under which `as_good` is wrong, and their share that the runs do not exclude."""
    collapses = found.collapses
    sizes = {f"{_EXAMPLE:g} {question.unit}": _EXAMPLE} if question.unit == "points" else {}
    if collapses:
        size = _number(collapses.size, question.unit)
        sizes[f"a collapse to the baseline ({size} {question.unit})"] = collapses.size
    shares = [f"{100 * min(question.margin / size, 1):.2g} % for {name}" for name, size in sizes.items()]
    examples = f": {' and '.join(shares)}" if shares else ""
    possible = collapse_share(found.num_runs, collapses.num_collapsed if collapses else 0)
    return (
        f"This holds only if fewer than {question.margin:g} / d of the runs lose d {question.unit} more than "
        f"{question.reference}{examples}. These {found.num_runs} runs do not exclude {100 * possible:.0f} %."
    )
