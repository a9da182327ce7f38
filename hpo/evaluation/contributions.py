"""Scores of predictions and the contribution of each row to them.

A metric that is no mean over rows has pseudo-values in place of rows: N times the metric less N - 1 times the
metric of all rows but one (the jackknife: Efron & Tibshirani 1993, chapter 11). Only labelled rows count.
Pseudo-values of different rows are not independent, so the error rates of verdicts are measured
(tests/benchmarks/verdict_errors.py). Rows of one group (`RowStatistics.group_E`) have one contribution.

Scores are in points (hundredths). Errors are in units of their own and change their sign, so that higher is
better: `mae` and `rmse` in those of the labels. They count as the range of the labels where they are larger.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from hpo.evaluation.decision import Array, common_bound, excludable_loss
from hpo.tasks.example import Example
from hpo.tasks.kind import Task, is_error, kind_of
from hpo.training.metrics import RowStatistics, counted, primary_mean, right_statistics

Statistics = Mapping[str, RowStatistics]
"""Statistics of one run on one split, by task."""
_UNITS = {"log_loss": "nats", "calibration_error": "shares"}


@dataclass(frozen=True, eq=False)
class Scored:
    """Score of one run on the labelled rows of a split."""

    value: float
    num_rows: int
    """Labelled rows."""
    groups_G: Array
    """Contributions of the groups of labelled rows; their mean is `value`. A row without a group is one."""
    bounds_G: Array
    """Largest change of `value` by each group, times G; infinite if unknown."""

    @property
    def row_bound(self) -> float:
        """One bound for all groups: it hides as large a loss as `bounds_G`."""
        return common_bound(self.bounds_G)

    @property
    def standard_error(self) -> float:
        num = len(self.groups_G)
        return float(self.groups_G.std(ddof=1)) / num**0.5 if num > 1 else np.inf


def unit_of(metric: str) -> str:
    """Return the unit of differences in a metric: `points` (hundredths), or that of an error."""
    return _UNITS.get(metric.rpartition("/")[2], "label units") if is_error(metric) else "points"


def metrics_by_task(statistics: Statistics, metric: str) -> dict[str, str]:
    """Return the metric of each task in `metric`: `score`, or `<task>/<metric>`."""
    task, _, name = metric.rpartition("/")
    return {task: name} if task else {name: of.task.primary_metric for name, of in statistics.items()}


def perfect_statistics(
    tasks: Sequence[Task], examples: Sequence[Example], groups: Sequence[int] | None = None
) -> Statistics:
    """Return the statistics of right predictions, for facts about a split before any run.

    `groups` has the number of each row's group; None: each row counts as independent.
    """
    return {task.name: right_statistics(task, examples, groups) for task in tasks}


def scored(statistics: Statistics, metric: str) -> Scored | None:
    """Score a run. None: a task of the metric has no labelled row, or the metric is undefined."""
    factor = -1.0 if is_error(metric) else 100.0
    names = metrics_by_task(statistics, metric)
    used = {task: bounded(statistics[task]) for task in names}
    values = {task: of.scores().get(names[task]) for task, of in used.items()}
    if any(value is None for value in values.values()):
        return None
    is_labelled_E = np.zeros(next(iter(used.values())).num_examples, bool)
    for of in used.values():
        is_labelled_E[of.index_N] = True
    num_rows = int(is_labelled_E.sum())
    group_E = np.zeros(len(is_labelled_E), np.intp)
    group_E[is_labelled_E] = next(iter(used.values())).groups(np.flatnonzero(is_labelled_E))
    num_groups = int(group_E.max()) + 1
    deviations_G, bounds_G = np.zeros((2, num_groups))
    for task, of in used.items():
        share, group_N = factor * num_groups / len(used), group_E[of.index_N]
        deviations_N = _deviations(of, names[task], values[task], metric) / of.num_rows
        deviations_G += share * np.bincount(group_N, deviations_N, num_groups)
        changes_G = group_changes(of, names[task], group_N)
        bounds_G[: len(changes_G)] += abs(share) * changes_G
    value = factor * float(np.mean([_counted(value, names[task], metric) for task, value in values.items()]))
    return Scored(value, num_rows, value + deviations_G - deviations_G.mean(), bounds_G)


def group_changes(of: RowStatistics, metric: str, group_N: NDArray[np.intp]) -> Array:
    """Return the largest change of a task's metric by each group, [G]; infinite if unknown.

    `group_N` has the number of each labelled row's group.
    """
    kind, num_rows = kind_of(of.task), of.num_rows
    bound = kind.row_bound(metric, of.counts_NC, of.values_N)
    groups, place_N = np.unique(group_N, return_inverse=True)
    if np.ndim(bound) and len(groups) < num_rows:  # a group loses its items together, as a row does
        is_in_GN = csr_array((np.ones(num_rows), (place_N, np.arange(num_rows))), (len(groups), num_rows))
        counts, sums = (
            {name: is_in_GN @ of_N for name, of_N in one.items()} for one in (of.counts_NC, of.values_N)
        )
        bound, num_rows, group_N = kind.row_bound(metric, counts, sums), len(groups), groups
    return np.asarray(np.bincount(group_N, np.broadcast_to(bound, num_rows) / num_rows), np.float64)


def bounded(of: RowStatistics) -> RowStatistics:
    return replace(of, values_N=kind_of(of.task).bounded(of.values_N))


def _counted(value: Any, name: str, metric: str) -> Any:
    """Return the part of a task's metric `name` in `score` (`primary_mean`), or its value."""
    return value if "/" in metric else counted(name, value)


def _deviations(of: RowStatistics, name: str, value: Any, metric: str) -> Array:
    """Pseudo-value of each row less the metric, [N]; 0 where the metric of the others is undefined."""
    without_N = _counted(of.scores_without_each(name), name, metric)
    deviations_N = (of.num_rows - 1) * (_counted(value, name, metric) - without_N)
    return np.asarray(np.where(np.isfinite(deviations_N), deviations_N, 0.0))


def constant_predictions(statistics: Statistics, metric: str) -> Statistics | None:
    """Return the best constant prediction for each task of a metric.

    `statistics` come from any predictions for the same rows. None: a task has no constant prediction, for
    example with a kind of the user's own code.
    """
    constant: dict[str, RowStatistics] = {}
    for task, name in metrics_by_task(statistics, metric).items():
        of = statistics[task]
        rows = kind_of(of.task).constant_rows(name, of.counts_NC, of.values_N) if of.num_rows else None
        if rows is None:
            return None
        constant[task] = replace(of, counts_NC=rows[0], values_N=rows[1], rows=((), ()))
    return constant


def baselines(statistics: Statistics) -> dict[str, float]:
    """Return the value of each metric for its best constant prediction, by `<task>/<metric>`, and of `score`.

    Metrics without a constant prediction are missing, and so is `score` if a primary metric has none.
    """
    by_task: dict[str, dict[str, float]] = {name: {} for name, of in statistics.items() if of.num_rows}
    for name, values in by_task.items():
        for metric in statistics[name].task.metrics:
            constant = constant_predictions(statistics, f"{name}/{metric}")
            known = constant[name].scores() if constant else {}
            values |= {metric: round(known[metric], 12)} if metric in known else {}
    found = {f"{name}/{metric}": value for name, of in by_task.items() for metric, value in of.items()}
    tasks = [statistics[name].task for name in by_task]
    is_whole = tasks and all(task.primary_metric in by_task[task.name] for task in tasks)
    return found | ({"score": float(primary_mean(tasks, by_task))} if is_whole else {})


def shuffled_value(statistics: Statistics, metric: str) -> float:
    """Return the expected score of the same predictions in random order; -inf if unknown.

    A model that learned only the frequencies of the classes has this score. In `f1_macro` it may exceed the
    score of a constant prediction.
    """
    values = []
    for task, name in metrics_by_task(statistics, metric).items():
        of = statistics[task]
        if not kind_of(of.task).has_classes or name not in ("f1_macro", "f1_micro", "accuracy"):
            return -np.inf
        _, true_C, predicted_C = of.class_counts()
        hits = {"hits": true_C * predicted_C / of.num_rows, "true": true_C, "predicted": predicted_C}
        right = {"right": np.array([hits["hits"].sum()])}
        counts = {key: value_C[None] for key, value_C in hits.items()}
        whole = tuple(hits.values())
        values.append(kind_of(of.task).scores(np.array([float(of.num_rows)]), counts, right, whole)[name][0])
    return 100 * float(np.mean(values))


def rare_classes(statistics: Statistics, metric: str, margin: float) -> dict[str, int]:
    """Return the classes with too few groups of rows for the margin, in a metric that is a mean over classes.

    A class in n groups can lose about 4 / n of its F1 unnoticed, and a class without rows all of it.
    """
    names = metrics_by_task(statistics, metric)
    rare: dict[str, int] = {}
    for task, name in names.items():
        of = statistics[task]
        if name != "f1_macro" or not of.counts_NC:
            continue
        true_NC = of.counts_NC["true"].tocoo()
        places = np.unique(np.stack([of.groups(of.index_N)[true_NC.row], true_NC.col]), axis=1)
        groups_C = np.bincount(places[1], minlength=len(of.task.labels))
        share = 100 / len(names) / max(int((groups_C > 0).sum()), 1)
        pairs = zip(of.task.labels, groups_C.tolist(), strict=True)
        rare |= {label: num for label, num in pairs if excludable_loss(share, num) >= margin}
    return rare
