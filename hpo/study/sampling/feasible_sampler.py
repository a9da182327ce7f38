"""A sampler that keeps another from proposing what cannot work."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from hpo.outcome import Outcome
from hpo.precision.table import PRECISION
from hpo.study.sampling.device_sampler import WrapperSampler

MIN_INFEASIBLE_TRIALS = 3
"""So many trials of a choice must have been infeasible, and none feasible, before it is avoided."""

RETRIED_SHARE = 0.05
"""Avoided choices are still tried in this share of the trials: what failed may have had another cause."""

Choice = tuple[str, Any]
"""Setting and value."""


def is_infeasible(trial: FrozenTrial) -> bool:
    """Whether a constraint of the trial is violated."""
    return any(value > 0 for value in trial.constraints.values())


class InfeasibleFilterSampler(WrapperSampler):
    """Leaves out choices of which every trial so far was infeasible; one feasible trial brings them back.

    A choice is blamed once it has had `MIN_INFEASIBLE_TRIALS` such trials. The choice with the most of them
    comes first and explains its trials, so that a batch size is not blamed for a precision. Trials that
    ended as `unsupported` prove by themselves that this precision does not work here.
    """

    def __init__(self, sampler: BaseSampler, seed: int) -> None:
        super().__init__(sampler)
        self._random = random.Random(seed)
        self._avoided: set[Choice] = set()
        # A trial that has finished stays as it is, so each is looked at once.
        self._seen: set[int] = set()
        self._feasible: set[Choice] = set()
        self._infeasible: list[FrozenTrial] = []

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
        for other in finished:
            if other.number not in self._seen:
                self._seen.add(other.number)
                if is_infeasible(other):
                    self._infeasible.append(other)
                else:
                    self._feasible.update(_choices(other))
        infeasible = [weights for t in self._infeasible if (weights := _weights(t, self._feasible))]
        self._avoided, unexplained = set(), infeasible
        while blame := _blame(unexplained):
            self._avoided.add(blame)
            unexplained = [weights for weights in unexplained if blame not in weights]
        if len(infeasible) - len(unexplained) < RETRIED_SHARE * len(finished):
            self._avoided = set()
        super().before_trial(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        params = super().sample_relative(study, trial, search_space)
        # Optuna asks `sample_independent` for what is not there.
        return {name: value for name, value in params.items() if not self.avoids(name, value)}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        value = super().sample_independent(study, trial, param_name, param_distribution)
        if isinstance(param_distribution, CategoricalDistribution) and self.avoids(param_name, value):
            choices = [c for c in param_distribution.choices if not self.avoids(param_name, c)]
            if choices:
                return self._random.choice(choices)
        return value

    def avoids(self, name: str, value: Any) -> bool:
        """Whether the trial that is being made should not have this choice."""
        return (name, value) in self._avoided


def _choices(trial: FrozenTrial) -> list[Choice]:
    return [
        (name, value)
        for name, value in trial.params.items()
        if isinstance(trial.distributions[name], CategoricalDistribution)
    ]


def _weights(infeasible: FrozenTrial, feasible: Set[Choice]) -> dict[Choice, int]:
    """The choices that may be to blame for the trial, and how much it counts against each."""
    weights = dict.fromkeys(_choices(infeasible), 1)
    precision = (PRECISION, infeasible.params.get(PRECISION))
    if infeasible.user_attrs.get("outcome") == Outcome.UNSUPPORTED and precision in weights:
        weights = dict.fromkeys(weights, 0) | {precision: MIN_INFEASIBLE_TRIALS}
    return {choice: weight for choice, weight in weights.items() if choice not in feasible}


def _blame(unexplained: Sequence[Mapping[Choice, int]]) -> Choice | None:
    """Return the choice that explains the most of the trials, if it explains enough."""
    counts: Counter[Choice] = Counter()
    for weights in unexplained:
        counts.update(weights)
    blamed = max(counts, key=lambda choice: (counts[choice], choice[0] == PRECISION), default=None)
    return blamed if blamed is not None and counts[blamed] >= MIN_INFEASIBLE_TRIALS else None
