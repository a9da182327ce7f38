"""How much device time a study may spend."""

from __future__ import annotations

from hpo.config.trial_settings import Positive
from hpo.section import Section

MAX_TRIALS = 1000
"""The largest number of trials of a study that has a budget and names no `n_trials`."""


class BudgetConfig(Section):
    """The device time that a study may spend, over all workers."""

    hours: Positive
    """Device-hours: two GPUs that work for an hour are two, and two trials that share a device are one."""

    @property
    def seconds(self) -> float:
        return 3600 * self.hours
