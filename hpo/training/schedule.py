"""The schedule of the learning rate: a factor of each group's rate, by the used share of the budget.

So a budget in seconds works like one in steps, and a resumed trial needs no scheduler state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.optim import Optimizer

from hpo import extensions

SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda remaining: remaining,
    "cosine": lambda remaining: 0.5 * (1.0 - math.cos(math.pi * remaining)),
    "constant": lambda _: 1.0,
}
"""Factors after warm-up, by the remaining share of the budget after it."""


def own_schedule(name: str, option: Mapping[str, Any]) -> Callable[[float], float] | None:
    """Return the schedule of the study's own code; None if it is one of `SCHEDULES`."""
    own = extensions.SCHEDULES.get(name)
    return partial(own.make, options=extensions.options_of(name, option)) if own else None


def schedule_factor(
    schedule: str | Callable[[float], float], progress: float, warmup_ratio: float = 0.0
) -> float:
    """Return the factor of the learning rate at `progress`, the used share of the budget.

    It rises linearly from 0 over the first `warmup_ratio` of the budget. A share outside [0, 1] counts as its
    nearer end, because the last step of a budget in seconds may overrun it.
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup_ratio:
        return progress / warmup_ratio
    remaining = (1.0 - progress) / (1.0 - warmup_ratio) if warmup_ratio < 1.0 else 1.0
    return SCHEDULES[schedule](remaining) if isinstance(schedule, str) else schedule(remaining)


def set_learning_rate(optimizer: Optimizer, factor: float) -> None:
    """Set every group's `lr` to `factor` times its `initial_lr`."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
