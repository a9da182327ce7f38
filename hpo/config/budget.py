"""How much a study may spend: device time, or what it costs."""

from __future__ import annotations

from collections.abc import Iterator

from hpo.config.study_file import CheckedSection, Problem
from hpo.config.trial_settings import Positive

MAX_TRIALS = 1000
"""So many trials begin at most in a study that has a budget and names no `n_trials`."""


class BudgetConfig(CheckedSection):
    """What a study may spend, over all workers: `hours`, or `cost` at `cost_per_hour`."""

    hours: Positive | None = None
    """Device-hours: two GPUs that work for an hour are two, and two trials that share a device are one."""
    cost: Positive | None = None
    """In the currency of `cost_per_hour`."""
    cost_per_hour: Positive | None = None
    """Of one device."""

    def problems(self) -> Iterator[Problem]:
        if self.hours is None and (self.cost is None or self.cost_per_hour is None):
            yield Problem((), "must have `hours`, or `cost` and `cost_per_hour`.")
        elif self.hours is not None and self.cost is not None:
            yield Problem(("cost",), "must be left out where `hours` are given.")

    @property
    def seconds(self) -> float:
        """Of device time."""
        if self.hours is not None:
            return 3600 * self.hours
        assert self.cost is not None
        assert self.cost_per_hour is not None
        return 3600 * self.cost / self.cost_per_hour
