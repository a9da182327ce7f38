"""The start of a study tries each value of the settings that change the cost of a trial.

A precision without a trial cannot win. At random, all trials of a small study often have the same one. So the
claim of a new trial fixes these settings: first the values that no trial shows yet, then the values with the
fewest trials. Equal ones are combined in new ways, so that no two settings always change together. After the
start, only values that no trial shows are fixed.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from hpo.config.search_space import CategoricalDistribution, SearchSpace, encode
from hpo.config.study_config import StudyConfig
from hpo.outcome import Outcome, shows_precision
from hpo.precision.table import BASE_PRECISION, PRECISION, choice_name
from hpo.study.sampling.device_sampler import WorkerDevice, known_params
from hpo.study.sampling.feasible_sampler import (
    MIN_INFEASIBLE_TRIALS,
    Choice,
    Failures,
    failure_of,
    is_infeasible,
)
from hpo.study.sampling.promotion import rungs_of

COSTLY = (PRECISION, BASE_PRECISION, "optimizer_state", "compile", "attention")
"""Settings that change the cost of a trial. Precisions come first."""
RANDOM_TRIALS = {"tpe": 5, "gp": 10, "nsga2": 50, "random": 10, "qmc": 10}
"""Number of trials in the start, without options: those before the sampler learns. `random` and `qmc` never
learn."""


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
        num_begun, shown, num_tried = 0, set[Choice](), Counter[Any]()
        failures, unfinished, broken = Failures(), list[FrozenTrial](), set[Choice]()
        for trial in trials:
            params = self._active(known_params(trial))
            says_nothing = self.device.says_nothing(trial)
            if not says_nothing or trial.user_attrs.get("outcome") == Outcome.INVALID:
                num_begun += trial.state not in (TrialState.WAITING, TrialState.FAIL)
                num_tried.update([*params.items(), frozenset(params.items())])
            if says_nothing:
                continue
            shown |= _shown(trial, params)
            if trial.state.is_finished():
                failures.add_ended(trial)
                broken |= _shown(trial, params) if is_infeasible(trial) else set()
            elif trial.state == TrialState.RUNNING:
                unfinished.append(trial)
        avoided = failures.avoided(unfinished) | broken

        def is_untried(choice: Choice) -> bool:
            has_failed = num_tried[choice] >= MIN_INFEASIBLE_TRIALS
            return choice[0] in COSTLY and choice not in shown and not has_failed

        def rank(params: Mapping[str, Any]) -> tuple[int, ...]:
            untried = [name for name, value in params.items() if is_untried((name, value))]
            most = (-(PRECISION in untried), -len(untried))
            return *most, sum(num_tried[choice] for choice in params.items()), num_tried[_key(params)]

        possible = [params for params in self._combinations(given) if avoided.isdisjoint(params.items())]
        best = min(possible, key=rank, default={})
        if num_begun >= self.num_trials:
            self.has_ended = not any(map(is_untried, itertools.chain(*map(dict.items, possible))))
            untried = {name for name, value in best.items() if is_untried((name, value))}
            parents = {parent for name in untried for parent in self.space[name].when}
            best = {name: value for name, value in best.items() if name in untried | parents}
        return {name: value for name, value in best.items() if name not in given}

    def _combinations(self, given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield all combinations with the `given` values that this device runs."""
        values = {
            name: [given[name]] if name in given else [encode(value) for value in one.grid()]
            for name, one in self.space.items()
        }
        lacking = {*(self.device.left_out or ()), *(["attention=flash"] if self.device.is_cpu else [])}
        seen = set()
        for product in itertools.product(*values.values()):
            params = self._active(dict(zip(values, product, strict=True)))
            is_new = _key(params) not in seen
            seen.add(_key(params))
            if is_new and lacking.isdisjoint(choice_name(*choice) for choice in params.items()):
                yield params

    def _active(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of settings of the space under their conditions."""
        return {
            name: params[name]
            for name, one in self.space.items()
            if name in params
            and all(params.get(parent) in map(encode, values) for parent, values in one.when.items())
        }


def _key(params: Mapping[str, Any]) -> frozenset[Choice]:
    return frozenset(params.items())


def _shown(trial: FrozenTrial, params: Mapping[str, Any]) -> set[Choice]:
    """Return the choices whose effect the trial shows, or will show."""
    if not trial.state.is_finished():
        return {*params.items()}
    outcome, telemetry = trial.user_attrs.get("outcome", ""), trial.user_attrs.get("telemetry", {})
    is_evaluated = bool(trial.values or trial.intermediate_values or rungs_of(trial.user_attrs))
    if not shows_precision(outcome, telemetry, is_evaluated=is_evaluated):
        return set()
    if not is_infeasible(trial):
        return {*params.items()}
    failure = failure_of(trial, params.items())
    return {*failure.suspects} if failure.is_proven else {(PRECISION, params.get(PRECISION))}


def start_up(config: StudyConfig, device: WorkerDevice) -> StartUp | None:
    """Return the start of a study; None if its sampler has another plan, or no such setting is searched."""
    sampler, space = config.sampler, config.search_space
    choices = {name: one for name, one in space.items() if isinstance(one, CategoricalDistribution)}
    costly = {name: choices[name] for name in COSTLY if name in choices and choices[name].size > 1}
    if config.comparison is not None or sampler.name not in RANDOM_TRIALS or not costly:
        return None
    parents = {parent: space[parent] for one in costly.values() for parent in one.when}
    given = sampler.options.get("n_startup_trials", sampler.options.get("population_size"))
    num_trials = RANDOM_TRIALS[sampler.name] if given is None else given
    return StartUp({**costly, **parents}, num_trials, device)
