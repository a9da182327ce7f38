"""What an artifact has lost of fp32, with its interval, and the verdict on that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from hpo.config.study_config import SMALLER_IS_BETTER, ObjectiveConfig
from hpo.non_inferiority import VerdictName, decide
from hpo.trial.objectives import unit_of


@dataclass(frozen=True)
class Interval:
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Scale:
    """How drops in the objective are counted."""

    metric: str
    """`score`, or `<task>/<metric>`."""
    smaller_is_better: bool

    @classmethod
    def of(cls, objective: ObjectiveConfig) -> Scale:
        return cls(objective.metric, objective.direction == "minimize")

    @property
    def unit(self) -> str:
        return unit_of(self.metric)


def verdict_on(drop: Interval | None, max_drop: float, num_rows: int, unit: str) -> tuple[VerdictName, str]:
    """The verdict on a drop (None: not finite), and the reason where it is not `as_good`."""
    if drop is None:
        return "worse", "its logits are not finite."
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
