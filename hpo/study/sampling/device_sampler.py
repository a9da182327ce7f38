"""A worker's sampler: its view of the study, and its choices on its device.

The workers of one study may have different devices, but a study's choices of `fp_precision` never change. So
a worker draws from the precisions of its device, while Optuna stores the distribution with all choices. A
sampler does not see `invalid` trials, nor trials without information about its device:

- out-of-memory trials under a lower limit than this worker's;
- `unsupported` trials in a precision of this device;
- `incompatible` trials from another kind of device, or with other versions;
- for samplers with a model of the choices (TPE and GP), trials in a precision outside this device.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from hpo.config.search_space import Range, SearchSpace, grid
from hpo.outcome import Outcome
from hpo.precision.table import named_choices
from hpo.study.sampling.promotion import rungs_of
from hpo.study.store.optuna_internals import StudyView, all_trials

MORE_MEMORY = 1.05  # factor of memory for trying a configuration again: cards of one model differ a little


@dataclass(frozen=True)
class WorkerDevice:
    """Device of a worker's trials; None: not known."""

    device_id: str | None = None  # `DeviceInfo.device_id`: workers with the same one share the device
    memory_bytes: int | None = None
    left_out: Mapping[str, str] | None = None
    """Precisions of the study outside the device, by `table.choice_name`, each with the reason."""
    kind: str = ""
    checked_on: str | None = None  # origin of valid compatibility results here, see `compat.checked_on`

    def says_nothing(self, trial: FrozenTrial) -> bool:
        """Return true if the trial is `invalid`, or ended for a reason of another device."""
        outcome = trial.user_attrs.get("outcome")
        telemetry = trial.user_attrs.get("telemetry", {})
        if outcome == Outcome.INVALID:
            return True
        if outcome == Outcome.UNSUPPORTED and self.left_out is not None:
            return not any(name in self.left_out for name in named_choices(trial.params))
        if outcome == Outcome.INCOMPATIBLE and self.checked_on is not None:
            checked = telemetry.get("compatibility", {})
            return bool(checked.get("checked_on", self.checked_on) != self.checked_on)
        if outcome != Outcome.OOM or self.memory_bytes is None:
            return False
        limit = telemetry.get("device", {}).get("memory_limit_bytes")
        return limit is not None and MORE_MEMORY * limit <= self.memory_bytes


ANY_DEVICE = WorkerDevice()


def known_params(trial: FrozenTrial) -> Mapping[str, Any]:
    """Return the parameters of a trial, including fixed ones before their suggestion."""
    fixed = trial.system_attrs.get("fixed_params")
    return {**(fixed if isinstance(fixed, Mapping) else {}), **trial.params}  # of any program


class WrapperSampler(BaseSampler):
    """Another sampler with changed proposals, or with another `view` of the study.

    `after_trial` is not passed on: Optuna's samplers use it for `constraints_func`.
    """

    def __init__(self, sampler: BaseSampler) -> None:
        self._sampler = sampler

    def view(self, study: Study) -> Study:
        """Return the sampler's view of the study while it proposes a trial."""
        return study

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        self._view = self.view(study)
        self._sampler.before_trial(self._view, trial)

    def infer_relative_search_space(self, _: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._sampler.infer_relative_search_space(self._view, trial)

    def sample_relative(
        self, _: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._sampler.sample_relative(self._view, trial, search_space)

    def sample_independent(
        self, _: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._sampler.sample_independent(self._view, trial, param_name, param_distribution)


class NewlyEnded:
    """Finds newly ended trials. They never change, so they are read once."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def split(self, trials: Iterable[FrozenTrial]) -> tuple[list[FrozenTrial], list[FrozenTrial]]:
        """Return the newly ended and the unfinished trials. A trial only shown as ended has no end time."""
        known = self._known
        others = [trial for trial in trials if trial.number not in known]
        ended = [trial for trial in others if trial.datetime_complete is not None]
        known.update(trial.number for trial in ended)
        return ended, [trial for trial in others if trial.datetime_complete is None]


class DeviceSampler(WrapperSampler):
    """Draws only from the space `drawn`, and hides trials without information about this device."""

    def __init__(
        self,
        sampler: BaseSampler,
        device: WorkerDevice,
        space: SearchSpace,
        drawn: SearchSpace,
        *,
        models_choices: bool,
    ) -> None:
        super().__init__(sampler)
        self._device = device
        self._models_choices = models_choices
        narrowed = [name for name in drawn if drawn[name] != space[name]]
        every, narrow = (grid({name: one[name] for name in narrowed}) for one in (space, drawn))
        self._all = {name: CategoricalDistribution(choices) for name, choices in every.items()}
        self._narrow = {name: CategoricalDistribution(choices) for name, choices in narrow.items()}
        self._given = space
        self._ended = NewlyEnded()
        self._changed: dict[int, FrozenTrial | None] = {}

    def view(self, study: Study) -> Study:
        def read() -> list[FrozenTrial]:
            trials = all_trials(study)
            ended, unfinished = self._ended.split(trials)
            self._changed |= self._changes(ended)
            changed = self._changed | self._changes(unfinished)
            shown = (changed.get(trial.number, trial) for trial in trials) if changed else trials
            return [trial for trial in shown if trial is not None]

        return StudyView(study, read)

    def _changes(self, trials: Iterable[FrozenTrial]) -> dict[int, FrozenTrial | None]:
        shown = ((trial, self._shown(trial)) for trial in trials)
        return {trial.number: other for trial, other in shown if other is not trial}

    def _shown(self, trial: FrozenTrial) -> FrozenTrial | None:
        if trial.state == TrialState.WAITING:
            return trial
        if self._device.says_nothing(trial):
            return None
        if trial.state == TrialState.RUNNING and (at_rungs := rungs_of(trial.user_attrs)):
            trial = _as_pruned(trial, [*at_rungs.values()][-1])
        # The range may have grown. A sampler draws settings jointly only if all trials have the same one.
        ranges = {
            name: cast(Any, type(old))(one.low, one.high, log=one.log, step=one.step)
            for name, old in trial.distributions.items()
            if isinstance(one := self._given.get(name), Range) and not one.refusal(trial.params[name])
        }
        if trial.distributions | ranges != trial.distributions:
            trial = copy.copy(trial)
            trial.distributions = trial.distributions | ranges
        if not (self._narrow and self._models_choices):
            return trial
        shown = copy.copy(trial)
        if mine := {name: one for name, one in self._narrow.items() if name in trial.params}:
            if any(trial.params[name] not in one.choices for name, one in mine.items()):
                return None
            shown.distributions = trial.distributions | mine
        elif trial.state == TrialState.RUNNING:
            shown.system_attrs = {}  # TPE and GP keep their proposal to the other worker there
        return shown

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        self._space = super().infer_relative_search_space(study, trial)
        return self._space | {name: one for name, one in self._all.items() if name in self._space}

    def sample_relative(self, study: Study, trial: FrozenTrial, *_: object) -> dict[str, Any]:
        params = super().sample_relative(study, trial, self._space)
        for name, one in self._narrow.items():
            if params.get(name) not in one.choices:
                params.pop(name, None)  # Optuna asks `sample_independent` for missing ones
        return params

    def sample_independent(
        self, study: Study, trial: FrozenTrial, name: str, distribution: BaseDistribution
    ) -> Any:
        narrowed = self._narrow.get(name, distribution)
        return super().sample_independent(study, trial, name, narrowed)


def _as_pruned(trial: FrozenTrial, at_rung: Mapping[str, Any]) -> FrozenTrial:
    shown, values = copy.copy(trial), list(at_rung["values"])
    shown.state, shown.values, shown.system_attrs = TrialState.PRUNED, values, {}
    reports = trial.intermediate_values
    last = max((step for step, value in reports.items() if value == values[0]), default=-1)
    shown.intermediate_values = {step: value for step, value in reports.items() if step <= last}
    for name, violation in at_rung.get("constraints", {}).items():
        shown.set_constraint(name, violation)
    return shown
