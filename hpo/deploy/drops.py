"""What an artifact has lost of fp32, with its interval, and the verdict on that.

The interval is that of the paired difference on the same rows (`hpo.evaluation.intervals`). It cannot show
what happens on no row of the split: where predictions are equal on all rows its width is zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from hpo.config.study_config import ObjectiveConfig
from hpo.deploy.scoring import Answers
from hpo.errors import DataError
from hpo.evaluation.intervals import Interval, MetricIntervals, difference_intervals, metric_intervals
from hpo.non_inferiority import VerdictName, decide
from hpo.trial.objectives import unit_of

NOT_FINITE = "its logits are not finite."


@dataclass(frozen=True)
class Scale:
    """How drops in the objective are counted."""

    metric: str
    """`score`, or `<task>/<metric>`."""
    smaller_is_better: bool

    @classmethod
    def of(cls, objective: ObjectiveConfig) -> Scale:
        """That of an objective that says something of the model."""
        return cls(objective.metric, objective.direction == "minimize")

    @property
    def unit(self) -> str:
        """Of drops in the objective: `points` or `label units`."""
        return unit_of(self.metric)

    def scores(self, found: Answers) -> tuple[Interval, Mapping[str, Mapping[str, Interval]]]:
        """The objective, and {task: {metric: ...}}. Raises DataError where the split has no labels for it."""
        intervals = metric_intervals(found.statistics)
        return self._objective(intervals), intervals.tasks

    def drops(self, found: Answers, reference: Answers) -> tuple[Interval, dict[str, Interval]]:
        """What was lost of the objective, in `unit`, and of the primary metric of each task, in points."""
        difference = difference_intervals(found.statistics, reference.statistics)
        factor = (100 if self.unit == "points" else 1) * (1 if self.smaller_is_better else -1)
        primary = {
            task.name: _times(-100, difference.tasks[task.name][task.primary_metric])
            for task in found.tasks
            if task.primary_metric in difference.tasks[task.name]
        }
        return _times(factor, self._objective(difference)), primary

    def _objective(self, intervals: MetricIntervals) -> Interval:
        task, _, metric = self.metric.rpartition("/")
        found = intervals.tasks[task].get(metric) if task else intervals.score
        if found is None:
            raise DataError(f"the split must have labels for the objective {self.metric}, but it has none.")
        return found


def _times(factor: float, of: Interval) -> Interval:
    value = factor * of.value + 0.0  # no -0
    if of.low is None or of.high is None:
        return Interval(value, None, None)
    low, high = sorted((factor * of.low, factor * of.high))
    return Interval(value, low + 0.0, high + 0.0)


def verdict_on(drop: Interval | None, max_drop: float, num_rows: int, unit: str) -> tuple[VerdictName, str]:
    """The verdict on a drop (None: not finite), and the reason where it is not `as_good`.

    The interval decides, but never against the drop that was measured, which need not lie in it.
    """
    if drop is None:
        return "worse", NOT_FINITE
    if drop.low is None or drop.high is None:
        return "undecided", f"the drop of {drop.value:+.2f} {unit} has no interval: too few rows have labels."
    interval = f"the drop of {drop.value:+.2f} [{drop.low:+.2f}, {drop.high:+.2f}] {unit}"
    name = decide(-drop.high, -drop.low, max_drop)
    is_beyond = drop.value > max_drop
    if name == "as_good" and not is_beyond:
        return name, ""
    if name == "worse" and is_beyond:
        return name, f"{interval} is beyond --max-drop {max_drop:g}."
    room = abs(max_drop - drop.value)
    width = (drop.high - drop.low) / 2
    needed = ceil(num_rows * (width / room) ** 2) if room > 0 else 0
    more = f"about {needed:,} rows would decide, if it stays so; " if needed > num_rows else ""
    allowing = ceil(10 * max(drop.high, drop.value) + 0.5) / 10
    beyond = f"may be beyond --max-drop {max_drop:g}: {more}--max-drop {allowing:g} would allow it."
    return "undecided", f"{interval} {beyond}"
