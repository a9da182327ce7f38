"""Verdict on a model against a reference, for training runs, deployed forms and predictions.

The verdict is `as_good`, `worse` or `not_shown`, with a sentence for people. Both sides are treated alike: a
run without a score counts as the baseline, the best constant prediction.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpo.errors import first_names
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
_LOST_POINTS = 20.0
"""Loss of a run in the condition of a verdict without a baseline; at least twice the margin."""


@dataclass(frozen=True)
class Question:
    """A comparison in one metric, and the names in its sentences."""

    metric: str
    """`score`, or `<task>/<metric>`."""
    margin: float
    """Losses below this do not count; in `unit`."""
    reference: str = "the reference"
    other: str = "The other model"
    rows: str = "rows"
    """Name of the labelled rows: `rows of test`."""
    name: str = ""
    """Name of the metric in sentences; empty: `metric`."""

    @property
    def metric_name(self) -> str:
        return self.name or self.metric

    @property
    def unit(self) -> str:
        return unit_of(self.metric)


@dataclass(frozen=True, eq=False)
class Facts:
    """Facts about a metric from the labels of a split, for any predictions of the other side."""

    num_rows: int
    """Rows with a label for any task of the metric."""
    row_bound: float
    """Largest change of the metric by one row, times `num_rows`."""
    baseline: Scored | None
    """Best constant prediction. None: a task has none."""
    chance: float
    """Expected score of the same predictions in random order."""
    rare: Mapping[str, int]
    """Classes with too few labelled rows for the margin, with the number of rows."""
    assumptions: tuple[str, ...] = ()
    """Limits of a verdict, as sentences."""

    @property
    def excludable(self) -> float:
        """Smallest loss that the rows can exclude, if all of them agree."""
        return excludable_loss(self.row_bound, self.num_rows)

    def limit(self, question: Question) -> str:
        """State the losses that the rows cannot exclude, and the number of rows for the margin.

        An infinite margin: nothing is judged, so the best precision of a score is stated.
        """
        if math.isinf(self.row_bound):
            return f"The effect of one row on {question.metric_name} is unknown, so no loss can be excluded."
        least = math.ceil(100 * self.excludable) / 100
        text = f"With {self.num_rows:,} labelled {question.rows}, "
        is_any = question.unit == "points" and least >= 100
        if math.isinf(question.margin):
            return f"{text}a score is known to {100 if is_any else least:g} {question.unit} at best."
        losses = "no loss can" if is_any else f"losses under {least:g} {question.unit} cannot"
        text += f"{losses} be excluded."
        if question.margin <= self.excludable:
            num = rows_needed(self.row_bound, question.margin)
            text += f" A margin of {question.margin:g} needs {num:,} such rows."
        if self.rare:
            names = first_names([f"`{name}` ({num})" for name, num in self.rare.items()], _NAMES_SHOWN)
            text += f" The loss in classes with too few rows is unknown: {names}."
        return text


def label_facts(tasks: Sequence[Task], examples: Sequence[Example], question: Question) -> Facts | None:
    """Return the facts before any prediction. None: the metric has no value on these rows.

    The effect of a row on an `rmse` is smallest for a poor model, so errors have the bound of the baseline.
    """
    facts = facts_of(perfect_statistics(tasks, examples), question)
    if facts is None or facts.baseline is None or not is_error(question.metric):
        return facts
    return replace(facts, row_bound=min(facts.row_bound, facts.baseline.row_bound))


def facts_of(statistics: Statistics, question: Question) -> Facts | None:
    """Return the facts from the predictions of one run of the reference. None: they have no score."""
    run, metric = scored(statistics, question.metric), question.metric
    if run is None:
        return None
    constant = constant_predictions(statistics, metric)
    return Facts(
        len(run.rows_N),
        run.row_bound,
        scored(constant, metric) if constant else None,
        shuffled_value(statistics, metric),
        rare_classes(statistics, metric, question.margin),
        tuple(_assumptions(statistics, metric)),
    )


def _assumptions(statistics: Statistics, metric: str) -> Iterator[str]:
    for name, task_metric in metrics_by_task(statistics, metric).items():
        task_statistics = statistics[name]
        kind = kind_of(task_statistics.task)
        counts = task_statistics.counts_NC, task_statistics.values_N
        if kind.is_number:
            yield f"An error of {name} counts as the range of the labels where it is larger."
        elif (kind.is_list or kind.in_spans) and kind.row_bound(task_metric, *counts) != 1:
            yield f"It is assumed that no row of {name} has more items than one of these rows."


@dataclass(frozen=True)
class Collapses:
    """Collapsed runs of both sides, without a score or with one nearer to the baseline than to the median."""

    num_runs: int
    num_collapsed: int
    num_reference_collapsed: int
    middle: float
    """Scores below it are nearer to the baseline."""
    size: float
    """Distance from the median of the reference to the baseline, in the unit of the metric."""

    @property
    def possible_share(self) -> float:
        """Share of collapses that the runs do not exclude."""
        return collapse_share(self.num_runs, self.num_collapsed)


@dataclass(frozen=True)
class Verdict:
    """The verdict, its evidence and its sentence."""

    verdict: VerdictName
    difference: float
    """Mean over runs, other side minus reference; higher is better. NaN: there is none."""
    interval: tuple[float, float]
    """In `unit`; each end errs in at most 2.5 % of comparisons, for any rule to stop."""
    num_runs: int
    labelled_rows: int
    row_bound: float
    """Largest change of the metric by one row, times the number of rows."""
    unit: str
    sentence: str
    reason: str = ""
    """Why nothing is shown, if more runs would not help."""
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

    Args:
        facts: facts of a run with a score; None: there is no such run.

    Raises:
        ValueError: the numbers of runs differ.
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
        reason = _obstacle(question, known, facts, decision)
    verdict = Verdict(
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
    return replace(verdict, sentence=_sentence(question, verdict, facts.assumptions if facts else ()))


def _collapses(
    question: Question,
    reference: Sequence[Scored | None],
    other: Sequence[Scored | None],
    median: float,
    baseline: Scored | None,
) -> Collapses | None:
    """Count collapses, if a run halfway to the baseline has lost more than the margin."""
    if baseline is None or len(other) < 2 or not median - baseline.value > 2 * question.margin:
        return None
    middle = (median + baseline.value) / 2
    lost, reference_lost = (
        sum(run is None or run.value < middle for run in side) for side in (other, reference)
    )
    return Collapses(len(other), lost, reference_lost, middle, median - baseline.value)


def _decide(pairs: Sequence[tuple[Scored, Scored]], margin: float) -> tuple[Decision, float]:
    differences_R = np.array([ours.value - theirs.value for theirs, ours in pairs])
    rows_N = np.mean([ours.rows_N - theirs.rows_N for theirs, ours in pairs], axis=0)
    bound = float(np.mean([max(ours.row_bound, theirs.row_bound) for theirs, ours in pairs]))
    step = bound / len(rows_N) if math.isfinite(bound) else 0.0
    return decide(differences_R, rows_N, margin, row_bound=bound, step=step), bound


def _obstacle(question: Question, reference: Sequence[Scored], facts: Facts, decision: Decision) -> str:
    """The reason why no number of runs can show anything; empty: the interval decides."""
    if math.isinf(facts.row_bound):
        return f"The effect of one row on {question.metric_name} is unknown"
    median = float(np.median([run.value for run in reference]))
    constant = facts.baseline.value if facts.baseline else -math.inf
    level = max(constant, facts.chance)
    if median - 1.96 * np.median([run.standard_error for run in reference]) <= level:
        easy = "the best constant prediction" if level == constant else "its predictions in random order"
        return (
            f"It is not shown that {question.reference} has learned anything: it has "
            f"{_number(median, question.unit)} {question.unit}, and {easy} {_number(level, question.unit)}"
        )
    absent = [f"`{name}`" for name, num in facts.rare.items() if not num]
    if decision.verdict != "worse" and absent:
        return f"No row has the class {first_names(absent, _NAMES_SHOWN)}, so a loss there is unknown"
    if decision.verdict != "worse" and facts.excludable >= question.margin:
        return facts.limit(question).removesuffix(".")
    return ""


def _sentence(question: Question, verdict: Verdict, assumptions: Sequence[str]) -> str:
    reference, unit, collapses = question.reference, question.unit, verdict.collapses
    relation = {
        "as_good": "is as good as",
        "worse": "is worse than",
        "not_shown": "is not shown to be as good as",
    }
    text = f"{question.other} {relation[verdict.verdict]} {reference}"
    if not math.isnan(verdict.difference):
        low, high = verdict.interval
        interval = "(too few runs for an interval)"
        if math.isfinite(low + high):
            interval = f"[{_number(low, unit, '+')}, {_number(high, unit, '+')}]"
        elif math.isinf(verdict.row_bound):
            interval = "(no interval)"
        text += (
            f": {question.metric_name} {_number(verdict.difference, unit, '+')} {interval} {unit}, margin "
            f"{question.margin:g}; {verdict.num_runs} run{'s' * (verdict.num_runs > 1)}, "
            f"{verdict.labelled_rows:,} labelled {question.rows}"
        )
    parts = [f"{text}.", f"{verdict.reason}." if verdict.reason else ""]
    if verdict.verdict == "as_good" and verdict.num_runs > 1:
        parts.append(_condition(question, verdict))
    if collapses and collapses.num_collapsed + collapses.num_reference_collapsed and not verdict.reason:
        parts.append(
            f"{collapses.num_collapsed} of {collapses.num_runs} runs collapsed, and "
            f"{collapses.num_reference_collapsed} of {reference}."
        )
    if verdict.verdict != "not_shown":
        parts += assumptions
    return " ".join(filter(None, parts))


def _condition(question: Question, verdict: Verdict) -> str:
    """The share of large losses that makes `as_good` wrong, and the largest share possible after the runs."""
    collapses, unit = verdict.collapses, question.unit
    size = collapses.size if collapses else max(_LOST_POINTS, 2 * question.margin)
    share, lost = f"{100 * question.margin / size:.2g}%", f"{_number(size, unit)} {unit}"
    if collapses:
        event = f"collapse to the baseline, a loss of {lost}"
    elif unit == "points":
        event = f"lose {lost}"
    else:
        share, event = f"{question.margin:g} / d", f"lose d {unit}, for any d"
    possible = 100 * collapse_share(verdict.num_runs, collapses.num_collapsed if collapses else 0)
    return (
        f"This holds only if fewer than {share} of runs {event}; with these {verdict.num_runs} runs, up to "
        f"{possible:.0f}% of runs may collapse."
    )


def _number(value: float, unit: str, sign: str = "") -> str:
    """Two decimals of points, three digits of label units."""
    return f"{value:{sign}.2f}" if unit == "points" else f"{value:{sign}.3g}"
