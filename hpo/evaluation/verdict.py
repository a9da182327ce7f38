"""Verdict on a model against a reference, for training runs, deployed forms and predictions.

The verdict is `as_good`, `worse` or `not_shown`, with a sentence for people. Both sides are treated alike: a
run without a score counts as the baseline, the best constant prediction.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpo.data.groups import groups_of
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
    COVERED,
    Array,
    Decision,
    VerdictName,
    common_bound,
    decide,
    excludable_loss,
    groups_needed,
    possible_share,
    runs_needed,
)
from hpo.tasks.example import Example
from hpo.tasks.kind import Task, is_error, kind_of

_NAMES_SHOWN = 5
_SHARE_SHOWN = 0.05
"""Share of runs in the example of a condition."""
_ERRORS_TO_COLLAPSE = 3
"""A collapsed run is at least so many standard errors from the middle between its reference and the
baseline."""


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
    num_groups: int
    """Groups of these rows; as many as rows if each counts as independent."""
    row_bound: float
    """Change of the metric by each group, times `num_groups`, as if it were equal (`common_bound`)."""
    baseline: Scored | None
    """Best constant prediction. None: a task has none."""
    chance: float
    """Expected score of the same predictions in random order."""
    rare: Mapping[str, int]
    """Classes in too few groups of labelled rows for the margin, with the number of groups."""
    assumptions: tuple[str, ...] = ()
    """Limits of a verdict, as sentences."""

    @property
    def excludable(self) -> float:
        """Smallest loss that the rows can exclude, if all of them agree."""
        return excludable_loss(self.row_bound, self.num_groups)

    def rows(self, name: str) -> str:
        """Name the labelled rows, with their groups."""
        num = f"{self.num_groups:,} group{'s' * (self.num_groups > 1)}"
        groups = "" if self.num_groups == self.num_rows else f" in {num}"
        return f"{self.num_rows:,} labelled {name}{groups}"

    def limit(self, question: Question) -> str:
        """State the losses that the rows cannot exclude, and the number of rows for the margin.

        An infinite margin: nothing is judged, so the best precision of a score is stated.
        """
        if math.isinf(self.row_bound):
            return f"The effect of one row on {question.metric_name} is unknown, so no loss can be excluded."
        least = math.ceil(100 * self.excludable) / 100
        text = f"With {self.rows(question.rows)}, "
        is_any = question.unit == "points" and least >= 100
        if math.isinf(question.margin):
            return f"{text}a score is known to {100 if is_any else least:g} {question.unit} at best."
        losses = "no loss can" if is_any else f"losses under {least:g} {question.unit} cannot"
        text += f"{losses} be excluded."
        if question.margin <= self.excludable:
            num = groups_needed(self.row_bound, question.margin)
            of = "rows" if self.num_groups == self.num_rows else "groups"
            text += f" A margin of {question.margin:g} needs {num:,} such {of}."
        if self.rare:
            names = first_names([f"`{name}` ({num})" for name, num in self.rare.items()], _NAMES_SHOWN)
            text += f" The loss in classes with too few rows is unknown: {names}."
        return text


def label_facts(tasks: Sequence[Task], examples: Sequence[Example], question: Question) -> Facts | None:
    """Return the facts before any prediction. None: the metric has no value on these rows.

    The effect of a row on an `rmse` is smallest for a poor model, so errors have the bound of the baseline.
    """
    facts = facts_of(perfect_statistics(tasks, examples, groups_of(examples)), question)
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
        run.num_rows,
        len(run.groups_G),
        run.row_bound,
        scored(constant, metric) if constant else None,
        shuffled_value(statistics, metric),
        rare_classes(statistics, metric, question.margin),
        (*_independence(run), *_assumptions(statistics, metric)),
    )


def _independence(run: Scored) -> Iterator[str]:
    """Name what counts as independent, and the assumption on groups of other sizes."""
    if len(run.groups_G) == run.num_rows:
        yield "Each row counts as independent."
        return
    yield "Each group counts as independent."
    if run.bounds_G.max() > 2 * np.median(run.bounds_G):
        yield "It is assumed that the sizes of new groups are distributed as those of these groups."


def _assumptions(statistics: Statistics, metric: str) -> Iterator[str]:
    for name, task_metric in metrics_by_task(statistics, metric).items():
        task_statistics = statistics[name]
        kind = kind_of(task_statistics.task)
        counts = task_statistics.counts_NC, task_statistics.values_N
        if kind.is_number:
            yield f"An error of {name} counts as the range of the labels where it is larger."
        elif (kind.is_list or kind.in_spans) and np.any(kind.row_bound(task_metric, *counts) != 1):
            yield f"It is assumed that new rows of {name} have about as many items as these rows."


@dataclass(frozen=True)
class Collapses:
    """The collapsed runs of both sides, by the position of their pair: they have no score, or one nearer to
    the baseline than to the median of the reference in their configuration."""

    other: tuple[bool, ...]
    reference: tuple[bool, ...]


@dataclass(frozen=True)
class Condition:
    """A verdict on runs holds if losses beyond `covered` of a run change the mean by less than `slack`.

    For `worse` these are gains. Both are in the unit of the metric.
    """

    covered: float
    slack: float
    possible_share: float
    """Share of runs with larger losses (gains) that the runs do not exclude."""

    def sentence(self, verdict: VerdictName, num_runs: int, unit: str) -> str:
        """State it, with an example of runs that break it."""
        losses = "losses" if verdict == "as_good" else "gains"
        covered, slack = _number(self.covered, unit), _number(self.slack, unit)
        # no run can lose more than all points
        least = self.slack / (100 - self.covered) if unit == "points" else 0.0
        share = max(_SHARE_SHOWN, math.ceil(100 * least) / 100)
        example = _number(self.covered + self.slack / share, unit)
        return (
            f"This holds if {losses} beyond {covered} {unit} of a run average less than {slack} over runs. "
            f"For any q, {losses} of {covered} + {slack} / q in a share q of runs break it ({example} in "
            f"{share:.0%}). {num_runs} runs exclude no q below {self.possible_share:.0%}."
        )


@dataclass(frozen=True)
class Verdict:
    """The verdict, its evidence and its sentence."""

    verdict: VerdictName
    difference: float
    """Mean over runs, other side minus reference; higher is better. NaN: there is none."""
    interval: tuple[float, float]
    """In `unit`; each end errs in at most 2.5 % of comparisons, for any rule to stop, under the
    `condition`."""
    num_runs: int
    labelled_rows: int
    num_groups: int
    """Groups of the labelled rows; as many as rows if each counts as independent."""
    row_bound: float
    """Change of the metric by each group, times their number, as if it were equal (`common_bound`)."""
    unit: str
    sentence: str
    reason: str = ""
    """Why nothing is shown, if more runs would not help."""
    baseline: float = math.nan
    reference_median: float = math.nan
    collapses: Collapses | None = None
    """None: there is one run on each side, or no baseline."""
    condition: Condition | None = None
    """None: there is one run on each side, or nothing is shown."""


def judge(
    question: Question,
    reference: Sequence[Scored | None],
    other: Sequence[Scored | None],
    facts: Facts | None,
    configurations: Sequence[int] | None = None,
) -> Verdict:
    """Judge runs that pair by position; None is a run without a score.

    Args:
        facts: facts of a run with a score; None: there is no such run.
        configurations: the configuration of each pair; None: all pairs have the same.

    Raises:
        ValueError: the numbers of runs differ.
    """
    if len(reference) != len(other):
        raise ValueError(f"runs must pair, but got {len(reference)} and {len(other)}.")
    known = [run for run in reference if run is not None]
    median = _median(known)
    baseline = facts.baseline if facts else None
    pairs = [(theirs or baseline, ours or baseline) for theirs, ours in zip(reference, other, strict=True)]
    full = [(theirs, ours) for theirs, ours in pairs if theirs and ours]
    decision, bound = Decision(math.nan, -math.inf, math.inf, "not_shown"), math.inf
    condition = None
    if facts is None or not known:
        reason = f"No run of {question.reference} has a score" if facts else "No run has a score"
    elif len(full) < len(pairs):
        reason = "A run has no score, and the metric has no baseline"
    else:
        differences_R = np.array([ours.value - theirs.value for theirs, ours in full])
        decision, bound = _decide(full, differences_R, question.margin)
        facts = replace(facts, row_bound=bound)
        reason = _obstacle(question, known, facts, decision)
        condition = None if reason else _condition(decision, differences_R, question.margin, question.unit)
    verdict = Verdict(
        "not_shown" if reason else decision.verdict,
        decision.difference,
        (decision.low, decision.high),
        len(other),
        facts.num_rows if facts else 0,
        facts.num_groups if facts else 0,
        bound,
        question.unit,
        "",
        reason,
        baseline.value if baseline else math.nan,
        median,
        _collapses(reference, other, baseline, configurations),
        condition,
    )
    return replace(verdict, sentence=_sentence(question, verdict, facts))


def _median(runs: Sequence[Scored | None]) -> float:
    """Median score of the runs with a score; NaN: there is none."""
    known = [run.value for run in runs if run is not None]
    return float(np.median(known)) if known else math.nan


def _collapses(
    reference: Sequence[Scored | None],
    other: Sequence[Scored | None],
    baseline: Scored | None,
    configurations: Sequence[int] | None,
) -> Collapses | None:
    """Mark the collapsed runs of both sides.

    Each run is held against the reference of its own configuration. A weak configuration, nearer to the
    baseline than to the best one, tells no collapse from bad luck, so there only a run without a score
    counts.
    """
    if baseline is None or len(other) < 2:
        return None
    of_pair = configurations or [0] * len(other)
    medians = {
        of: _median([run for run, one in zip(reference, of_pair, strict=True) if one == of])
        for of in {*of_pair}
    }
    best = np.nanmax([*medians.values(), baseline.value])

    def is_collapsed(run: Scored | None, configuration: int) -> bool:
        if run is None:
            return True
        size = medians[configuration] - baseline.value
        is_clear = 2 * size >= best - baseline.value and size / 2 > _ERRORS_TO_COLLAPSE * run.standard_error
        return bool(is_clear and run.value < baseline.value + size / 2)

    sides = (tuple(map(is_collapsed, side, of_pair)) for side in (other, reference))
    return Collapses(*sides)


def _decide(
    pairs: Sequence[tuple[Scored, Scored]], differences_R: Array, margin: float
) -> tuple[Decision, float]:
    groups_G = np.mean([ours.groups_G - theirs.groups_G for theirs, ours in pairs], axis=0)
    bounds_G = np.mean([np.maximum(ours.bounds_G, theirs.bounds_G) for theirs, ours in pairs], axis=0)
    return decide(differences_R, groups_G, margin, bounds_G=bounds_G), common_bound(bounds_G)


def _condition(decision: Decision, differences_R: Array, margin: float, unit: str) -> Condition | None:
    covered = COVERED * margin
    if decision.verdict == "not_shown" or len(differences_R) < 2:
        return None
    if unit == "points" and covered + decision.slack >= 100:  # no loss breaks it
        return None
    losses_R = -differences_R if decision.verdict == "as_good" else differences_R
    share = possible_share(len(losses_R), int((losses_R > covered).sum()))
    return Condition(covered, decision.slack, share)


def _obstacle(question: Question, reference: Sequence[Scored], facts: Facts, decision: Decision) -> str:
    """The reason why no number of runs can show anything; empty: the interval decides."""
    if math.isinf(facts.row_bound):
        return f"The effect of one row on {question.metric_name} is unknown"
    if facts.num_groups < 2:
        return "All labelled rows are one group"
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


def _sentence(question: Question, verdict: Verdict, facts: Facts | None) -> str:
    reference, unit, collapses = question.reference, question.unit, verdict.collapses
    relation = {
        "as_good": "is as good as",
        "worse": "is worse than",
        "not_shown": "is not shown to be as good as",
    }
    text = f"{question.other} {relation[verdict.verdict]} {reference}"
    if facts and not math.isnan(verdict.difference):
        low, high = verdict.interval
        interval = f"(too few {'runs' if facts.num_groups > 1 else 'groups'} for an interval)"
        if math.isfinite(low + high):
            interval = f"[{_number(low, unit, '+')}, {_number(high, unit, '+')}]"
        elif math.isinf(verdict.row_bound):
            interval = "(no interval)"
        text += (
            f": {question.metric_name} {_number(verdict.difference, unit, '+')} {interval} {unit}, margin "
            f"{question.margin:g}; {verdict.num_runs} run{'s' * (verdict.num_runs > 1)}, "
            f"{facts.rows(question.rows)}"
        )
    parts = [f"{text}.", f"{verdict.reason}." if verdict.reason else ""]
    if verdict.condition:
        parts.append(verdict.condition.sentence(verdict.verdict, verdict.num_runs, unit))
    elif 1 < verdict.num_runs < runs_needed() and not verdict.reason:
        parts.append(f"`As good` needs at least {runs_needed()} runs.")
    if collapses and any(collapses.other + collapses.reference) and not verdict.reason:
        parts.append(
            f"{sum(collapses.other)} of {verdict.num_runs} runs collapsed, and {sum(collapses.reference)} of "
            f"{reference}."
        )
    if facts and verdict.verdict != "not_shown":
        parts += facts.assumptions
    return " ".join(filter(None, parts))


def _number(value: float, unit: str, sign: str = "") -> str:
    """Two decimals of points, three digits of label units."""
    return f"{value:{sign}.2f}" if unit == "points" else f"{value:{sign}.3g}"
