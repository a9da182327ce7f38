"""What a form has lost of fp32 on a split, with its interval, and the verdict on that.

The interval is that of the paired difference on the same rows (`hpo.evaluation.intervals`). It cannot show
what happens on no row of the split: where predictions are equal on all rows its width is zero. So "as good"
needs the exact bound of `hpo.deploy.net_loss` too. A regression has no such bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from hpo.config.objective import ObjectiveConfig
from hpo.deploy.net_loss import TextChanges, least_rows, text_changes
from hpo.deploy.result import Judged, TaskDrop
from hpo.errors import DataError
from hpo.evaluation.intervals import Interval, MetricIntervals, difference_intervals, metric_intervals
from hpo.non_inferiority import VerdictName, decide
from hpo.training.metrics import RowStatistics
from hpo.trial.objectives import unit_of

NOT_FINITE = Judged("worse", "its logits are not finite.")

Statistics = Mapping[str, RowStatistics]
"""By task."""


@dataclass(frozen=True)
class Scale:
    """How drops in the objective are counted, and how much of it may be lost."""

    metric: str
    """`score`, or `<task>/<metric>`."""
    smaller_is_better: bool
    max_drop: float
    """In `unit`."""

    @classmethod
    def of(cls, objective: ObjectiveConfig, max_drop: float) -> Scale:
        return cls(objective.metric, objective.direction == "minimize", max_drop)

    @property
    def unit(self) -> str:
        return unit_of(self.metric)

    def judge(self, statistics: Statistics, reference: Statistics) -> Judged:
        """What a form is worth against fp32 on the same split; fp32 itself is as good.

        Raises DataError where the split has no labels for the objective.
        """
        values, difference = metric_intervals(statistics), difference_intervals(statistics, reference)
        factor = (100 if self.unit == "points" else 1) * (1 if self.smaller_is_better else -1)
        drop = _times(factor, self._objective(difference))
        changes: TextChanges | None = None
        verdict: VerdictName = "as_good"
        reason = ""
        if statistics is not reference:
            if self.unit == "points":
                changes = text_changes(self._of_objective(statistics), self._of_objective(reference))
            verdict, reason = verdict_on(drop, changes, self.max_drop, self.unit)
        tasks = {
            name: TaskDrop(metric, values.tasks[name][metric], _times(-100, difference.tasks[name][metric]))
            for name, of in statistics.items()
            if (metric := of.task.primary_metric) in difference.tasks[name]
        }
        return Judged(verdict, reason, self._objective(values), drop, changes, tasks)

    def _of_objective(self, statistics: Statistics) -> Statistics:
        task = self.metric.rpartition("/")[0]
        return {name: of for name, of in statistics.items() if task in ("", name)}

    def _objective(self, intervals: MetricIntervals) -> Interval:
        task, _, metric = self.metric.rpartition("/")
        interval = intervals.tasks[task].get(metric) if task else intervals.score
        if interval is None:
            raise DataError(f"the split must have labels for the objective {self.metric}, but it has none.")
        return interval


def _times(factor: float, of: Interval) -> Interval:
    value = factor * of.value + 0.0  # no -0
    if of.low is None or of.high is None:
        return Interval(value, None, None)
    low, high = sorted((factor * of.low, factor * of.high))
    return Interval(value, low + 0.0, high + 0.0)


def verdict_on(
    drop: Interval, changes: TextChanges | None, max_drop: float, unit: str
) -> tuple[VerdictName, str]:
    """The verdict on a drop, and the reason where it is not `as_good`.

    The interval decides, but never against the drop that was measured, which need not lie in it; and
    `as_good` is said only where the exact bound of the texts that get worse allows it too.
    """
    if drop.low is None or drop.high is None:
        return "undecided", f"the drop of {drop.value:+.2f} {unit} has no interval: too few rows have labels."
    interval = f"the drop of {drop.value:+.2f} [{drop.low:+.2f}, {drop.high:+.2f}] {unit}"
    name = decide(-drop.high, -drop.low, max_drop)
    is_beyond = drop.value > max_drop
    if name == "worse" and is_beyond:
        return name, f"{interval} is beyond --max-drop {max_drop:g}."
    if name != "as_good" or is_beyond:
        allowing = ceil(10 * max(drop.high, drop.value) + 0.5) / 10
        return "undecided", f"{interval} may be beyond --max-drop {max_drop:g}; {allowing:g} would allow it."
    if changes is None or (net := 100 * changes.highest_net_share()) <= max_drop:
        return name, ""
    rows, needed = changes.num_rows, least_rows(max_drop / 100)
    few = f": it takes {needed:,} rows at least" if rows < needed else ""
    return "undecided", (
        f"{changes.worse} of {rows:,} texts get worse and {changes.better} better, so of all texts up to "
        f"{net:.2g} % net can (exact, 97.5 %), and --max-drop is {max_drop:g}{few}."
    )
