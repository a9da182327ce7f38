"""Which optimisers may keep their state in fewer bits than fp32."""

from __future__ import annotations

from collections.abc import Iterator

from hpo.config.search_space import SearchSpace
from hpo.config.study_file import Problem
from hpo.config.trial_settings import TrialSettings

STATE, OPTIMIZER = "optimizer_state", "optimizer"
SHORT_STATE = ("adamw", "adam", "lion")
"""Those whose moments `hpo.training.optimizer_states` knows."""


def _refusal(optimizer: object) -> str:
    return f"must be fp32 with `optimizer: {optimizer}`; {', '.join(SHORT_STATE)} can have another."


def trial_state_problems(settings: TrialSettings) -> Iterator[Problem]:
    """Of one trial."""
    if settings.optimizer_state != "fp32" and settings.optimizer not in SHORT_STATE:
        yield Problem((STATE,), _refusal(settings.optimizer))


def study_state_problems(training: TrialSettings, space: SearchSpace) -> Iterator[Problem]:
    """Of a study: what some of its trials could not be."""
    searched = space.get(STATE)
    states = searched.grid() if searched else [training.optimizer_state]
    if set(states) == {"fp32"}:
        return
    optimizers = space[OPTIMIZER].grid() if OPTIMIZER in space else [training.optimizer]
    if searched:
        optimizers = searched.when.get(OPTIMIZER, optimizers)
    for optimizer in optimizers:
        if optimizer not in SHORT_STATE:
            where = ("search_space" if searched else "training", STATE)
            names = ", ".join(SHORT_STATE)
            hint = f" Search it with `when: {{optimizer: [{names}]}}`." if OPTIMIZER in space else ""
            yield Problem(where, f"{_refusal(optimizer)}{hint}")
