"""The start of a study tries each value of the settings that change the cost of a trial.

A precision without a trial cannot win. At random, all trials of a small study often have the same one. So the
claim of a new trial fixes these settings: first the values that no trial shows, then those with the fewest
trials, in new combinations. After the start, it does so only while there are values that no trial shows.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from hpo.config.search_space import CategoricalDistribution, SearchSpace, encode, grid
from hpo.config.study_config import StudyConfig
from hpo.outcome import Outcome, shows_precision
from hpo.precision.table import BASE_PRECISION, PRECISION, choice_name
from hpo.study.sampling.device_sampler import WorkerDevice, known_params
from hpo.study.sampling.feasible_sampler import MIN_INFEASIBLE_TRIALS, Choice, is_infeasible
from hpo.study.sampling.promotion import rungs_of

COSTLY = (PRECISION, BASE_PRECISION, "optimizer_state", "compile", "attention")
"""Settings that change the cost of a trial."""
STARTS = {"tpe": 5, "gp": 10, "nsga2": 50, "random": 10, "qmc": 10}
"""Number of trials in the start, without options: those before a sampler learns. The last two never learn."""


@dataclass
class StartUp:
    """The values of `COSTLY` settings in the first trials of a study, on one device."""

    space: SearchSpace  # `COSTLY` settings with several choices, and the settings of their conditions
    num_trials: int  # number of trials in the start
    device: WorkerDevice
    has_ended: bool = False  # true after the start, if no value is left to try

    def values(self, trials: Iterable[FrozenTrial], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that a new trial must have, as Optuna stores them, beside the `given` ones."""
        if self.has_ended:
            return {}
        shown, broken, num_tried, num_begun = set[Choice](), set[Choice](), Counter[Any](), 0
        for trial in trials:
            params = self._active(known_params(trial))
            num_tried.update([*params.items(), frozenset(params.items())])
            num_begun += trial.state not in (TrialState.WAITING, TrialState.FAIL)
            if not self.device.says_nothing(trial):
                (broken if is_infeasible(trial) else shown).update(_shown(trial, params))

        def is_possible(choice: Choice) -> bool:
            return choice in shown or (choice not in broken and num_tried[choice] < MIN_INFEASIBLE_TRIALS)

        def untried(params: Mapping[str, Any]) -> list[str]:
            return [choice[0] for choice in params.items() if choice[0] in COSTLY and choice not in shown]

        def rank(params: Mapping[str, Any]) -> tuple[float, ...]:
            names, counts = untried(params), [num_tried[choice] for choice in params.items()]
            return PRECISION not in names, -len(names), sum(counts), num_tried[frozenset(params.items())]

        possible = (one for one in self._combinations(given) if all(map(is_possible, one.items())))
        best = min(possible, key=rank, default={})
        if num_begun >= self.num_trials and not untried(best):
            self.has_ended = self.space.keys().isdisjoint(given)
            return {}
        return {name: value for name, value in best.items() if name not in given}

    def _combinations(self, given: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
        """Return all combinations with the `given` values that this device runs."""
        values = [[given[name]] if name in given else one for name, one in grid(self.space).items()]
        products = (dict(zip(self.space, product, strict=True)) for product in itertools.product(*values))
        unique = {frozenset(params.items()): params for params in map(self._active, products)}
        lacking = {*(self.device.left_out or ()), *(["attention=flash"] * (self.device.device_id == "cpu"))}
        return [one for one in unique.values() if not lacking & {choice_name(*of) for of in one.items()}]

    def _active(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of settings of the space under their conditions, without impossible ones."""
        return {
            name: params[name]
            for name in self.space.keys() & params.keys()
            if not self.space[name].refusal(params[name])  # another program may enqueue any value
            if all(params.get(parent) in map(encode, of) for parent, of in self.space[name].when.items())
        }


def _shown(trial: FrozenTrial, params: Mapping[str, Any]) -> set[Choice]:
    """Return the choices whose effect the trial shows, or will show."""
    if trial.state.is_finished():  # attributes of a waiting trial may be another program's
        outcome, telemetry = trial.user_attrs.get("outcome", ""), trial.user_attrs.get("telemetry", {})
        is_evaluated = bool(trial.values or trial.intermediate_values or rungs_of(trial.user_attrs))
        if outcome == Outcome.UNSUPPORTED or not shows_precision(outcome, telemetry, is_evaluated):
            return set()
    return {choice for choice in params.items() if choice[0] == PRECISION or not is_infeasible(trial)}


def start_up(config: StudyConfig, device: WorkerDevice) -> StartUp:
    """Return the start of a study. It has ended if the study has a plan, or searches no such setting."""
    sampler, space = config.sampler, config.search_space
    choices = {name: one for name, one in space.items() if isinstance(one, CategoricalDistribution)}
    costly = {name: choices[name] for name in COSTLY if name in choices and choices[name].size > 1}
    is_planned = config.comparison is not None or sampler.name not in STARTS
    parents = {parent: space[parent] for one in costly.values() for parent in one.when}
    given = sampler.options.get("n_startup_trials", sampler.options.get("population_size"))
    num_trials = STARTS.get(sampler.name, 0) if given is None else given
    return StartUp({**costly, **parents}, num_trials, device, has_ended=is_planned or not costly)
