"""What an artifact has lost of fp32, with its interval, and the verdict on that."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from hpo.config.study_config import ObjectiveConfig
from hpo.deploy.scoring import Answers
from hpo.non_inferiority import VerdictName, decide
from hpo.training.metrics import score
from hpo.trial.objectives import objective_value, unit_of

NOT_FINITE = "its logits are not finite."


@dataclass(frozen=True)
class Interval:
    value: float
    low: float
    high: float


def _resampled(found):
    import numpy as np

    generator = np.random.default_rng(0)
    num = len(found.split.examples)
    out = []
    for r in range(50):
        rows = np.arange(num) if r == 0 else generator.integers(0, num, num)
        out.append(
            {
                t.name: score(
                    t, [found.predictions[t.name][i] for i in rows], [found.split.examples[i] for i in rows]
                )
                for t in found.tasks
            }
        )
    return out


def _interval(values):
    import numpy as np

    return Interval(float(values[0]), float(np.percentile(values, 2.5)), float(np.percentile(values, 97.5)))


@dataclass(frozen=True)
class Scale:
    """How drops in the objective are counted."""

    metric: str
    """`score`, or `<task>/<metric>`."""
    smaller_is_better: bool

    @classmethod
    def of(cls, objective: ObjectiveConfig) -> Scale:
        return cls(objective.metric, objective.direction == "minimize")

    def scores(self, found: Answers) -> tuple[Interval, dict[str, dict[str, Interval]]]:
        """The objective, and {task: {metric: ...}}."""
        all_ = _resampled(found)
        metrics = {t: {m: _interval([a[t][m] for a in all_]) for m in all_[0][t]} for t in all_[0]}
        return _interval([self._value(a, found) for a in all_]), metrics

    def drops(self, found: Answers, reference: Answers) -> tuple[Interval, dict[str, Interval]]:
        """In the objective, in `unit`, and in the primary metric of each task."""
        mine, theirs = _resampled(found), _resampled(reference)
        sign = -1 if self.smaller_is_better else 1
        factor = sign * (100 if self.unit == "points" else 1)
        objective = _interval(
            [
                factor * (self._value(b, reference) - self._value(a, found))
                for a, b in zip(mine, theirs, strict=True)
            ]
        )
        of_tasks = {}
        for task in found.tasks:
            m = task.primary_metric
            if m in mine[0][task.name]:
                of_tasks[task.name] = _interval(
                    [100 * (b[task.name][m] - a[task.name][m]) for a, b in zip(mine, theirs, strict=True)]
                )
        return objective, of_tasks

    def _value(self, metrics, found) -> float:
        return objective_value(self.metric, metrics, found.tasks, {})

    @property
    def unit(self) -> str:
        return unit_of(self.metric)


def verdict_on(drop: Interval | None, max_drop: float, num_rows: int, unit: str) -> tuple[VerdictName, str]:
    """The verdict on a drop (None: not finite), and the reason where it is not `as_good`."""
    if drop is None:
        return "worse", NOT_FINITE
    interval = f"the drop of {drop.value:+.2f} [{drop.low:+.2f}, {drop.high:+.2f}] {unit}"
    name = decide(-drop.high, -drop.low, max_drop)
    if name == "as_good":
        return name, ""
    if name == "worse":
        return name, f"{interval} is beyond --max-drop {max_drop:g}."
    room = abs(max_drop - drop.value)
    width = (drop.high - drop.low) / 2
    needed = ceil(num_rows * (width / room) ** 2) if room > 0 else 0
    more = f"about {needed:,} rows would decide, if it stays so; " if needed > num_rows else ""
    return (
        name,
        f"{interval} may be beyond --max-drop {max_drop:g}: {more}--max-drop {drop.high:.2g} would allow it.",
    )
