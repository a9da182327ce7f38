"""Find the choices to blame for infeasible trials, and keep a sampler from them and from repetitions.

A choice that never worked is blamed when `MIN_INFEASIBLE_TRIALS` trials with it were infeasible. The choice
with the most of them comes first and explains its trials, so that a batch size is not blamed for a precision.

One failure suffices if the trial itself shows the cause: the device lacks the precision, or the broken step
is finite when it is repeated in fp32. It does not suffice if other trials of the precision trained beyond
this step. Then something else is involved, such as a high learning rate.

A precision may become NaN late in a trial, so only a COMPLETE trial clears it. Any other failure is refuted
by each trial with the choice and training to a rung.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, cast

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import BaseTrial, FrozenTrial, TrialState

from hpo.config.limits import FEASIBLE
from hpo.config.search_space import SearchSpace, grid, suggest
from hpo.outcome import Outcome, concerns_precision
from hpo.precision.table import BASE_PRECISION, PRECISION
from hpo.study.sampling.device_sampler import NewlyEnded, WrapperSampler, known_params
from hpo.study.sampling.promotion import rungs_of
from hpo.study.store.optuna_internals import stored_trials

MIN_INFEASIBLE_TRIALS = 3  # number of infeasible trials, without a feasible one, for blaming a choice

Choice = tuple[str, Any]

RETRIED_SHARE = 0.05
"""Avoided choices are still tried in this share of the trials: the failures may have another cause."""
UNPROVEN_SHARE = 0.1
"""A precision without a COMPLETE trial gets this share of the trials, once another precision has one."""
CHANGES_TRIED = 20
"""Number of random changes of one setting of a repeated configuration, then of two, and so on."""
ENUMERATED = 2000  # largest space (in configurations) for a search until the last untried one
Configuration = frozenset[tuple[str, str]]  # the settings of a trial with their values as text


class _Failure(NamedTuple):
    suspects: tuple[Choice, ...]
    is_proven: bool  # true if there is one suspect, and the trial shows its guilt
    is_late: bool  # true if it may have trained for long: only a COMPLETE trial clears its precision
    rung: float  # last rung of the trial; 0: none


class Failures:
    """The blamed choices of a study. An ended trial is added once and for all."""

    def __init__(self) -> None:
        self._failures: Counter[_Failure] = Counter()
        self.completed: set[Choice] = set()  # choices of COMPLETE trials
        self._reached: dict[Choice, float] = {}
        self.num_trials = 0
        self.num_tried: Counter[Choice] = Counter()  # number of ended trials with each choice

    def add_ended(self, trial: FrozenTrial) -> None:
        """Add an ended trial. A FAILed trial does not count."""
        if trial.state not in (TrialState.COMPLETE, TrialState.PRUNED):
            return
        chosen = choices_of(trial)
        self.num_trials += 1
        self.num_tried.update(chosen)
        if is_infeasible(trial):
            self._failures[_failure(trial, chosen)] += 1
        if trial.state == TrialState.COMPLETE:
            self.completed.update(chosen)
        _note_rung(self._reached, trial, chosen)

    def blamed(self, unfinished: Iterable[FrozenTrial] = ()) -> set[Choice]:
        """Return the choices to blame. `unfinished`: running and paused trials."""
        reached = dict(self._reached)
        for trial in unfinished:
            _note_rung(reached, trial, choices_of(trial))
        counts = [(self._weights(one, reached), number) for one, number in self._failures.items()]
        all_blamed: set[Choice] = set()
        while blame := _blame(counts):
            all_blamed.add(blame)
            counts = [(weights, number) for weights, number in counts if blame not in weights]
        return all_blamed

    def _weights(self, failure: _Failure, reached: dict[Choice, float]) -> dict[Choice, int]:
        weights = {}
        for choice in failure.suspects:
            is_late = failure.is_late and choice[0] in (PRECISION, BASE_PRECISION)
            if choice in self.completed or (choice in reached and not is_late):
                continue
            is_enough = failure.is_proven and reached.get(choice, 0.0) <= failure.rung
            weights[choice] = MIN_INFEASIBLE_TRIALS if is_enough else 1
        return weights


def is_infeasible(trial: FrozenTrial) -> bool:
    """Return true if the configuration cannot work. Breaking a limit of the study is not infeasible."""
    return trial.constraints.get(FEASIBLE, 0.0) > 0


def choices_of(trial: FrozenTrial) -> list[Choice]:
    return [
        (name, value)
        for name, value in trial.params.items()
        if isinstance(trial.distributions[name], CategoricalDistribution)
    ]


def _note_rung(reached: dict[Choice, float], trial: FrozenTrial, chosen: Iterable[Choice]) -> None:
    rung = max(rungs_of(trial.user_attrs), default=0.0)
    if not rung and (is_infeasible(trial) or not trial.state.is_finished()):
        return
    for choice in chosen:
        reached[choice] = max(reached.get(choice, 0.0), rung)


def _failure(trial: FrozenTrial, chosen: Iterable[Choice]) -> _Failure:
    attributes = trial.user_attrs
    outcome, telemetry = attributes.get("outcome", ""), attributes.get("telemetry", {})
    suspects, is_proven = [*chosen], False
    precision = (PRECISION, trial.params.get(PRECISION))
    is_fp32 = telemetry.get("precision", {}).get("effective") == "fp32"
    heals = False if is_fp32 else telemetry.get("finite_in_fp32")
    if not concerns_precision(outcome, telemetry) or (outcome == Outcome.NONFINITE and heals is False):
        suspects = [choice for choice in suspects if choice != precision]
    elif outcome == Outcome.UNSUPPORTED:
        base = telemetry.get("base_precision", {})
        if base.get("effective", "") is None:
            precision = (BASE_PRECISION, trial.params.get(BASE_PRECISION))
        is_proven = precision in suspects
    elif outcome == Outcome.NONFINITE:
        is_proven = heals is True and precision in suspects
    rung = max(rungs_of(attributes), default=0.0)
    return _Failure(
        (precision,) if is_proven else tuple(suspects), is_proven, outcome == Outcome.NONFINITE, rung
    )


def _blame(counts: Iterable[tuple[dict[Choice, int], int]]) -> Choice | None:
    total: Counter[Choice] = Counter()
    for weights, number in counts:
        for choice, weight in weights.items():
            total[choice] += number * weight
    blamed = max(total, key=lambda choice: (total[choice], choice[0] == PRECISION), default=None)
    return blamed if blamed is not None and total[blamed] >= MIN_INFEASIBLE_TRIALS else None


class InfeasibleFilterSampler(WrapperSampler):
    """Leaves out choices that are to blame for infeasible trials.

    A precision may also break later than its trials have trained so far. So it gets few trials until one of
    them is complete, if another precision has complete trials. A better precision is promoted, and soon has a
    complete trial.
    """

    def __init__(self, sampler: BaseSampler, seed: int) -> None:
        super().__init__(sampler)
        self._random = random.Random(seed)
        self._ended = NewlyEnded()
        self._failures = Failures()
        self._avoided: set[Choice] = set()

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        ended, unfinished = self._ended.split(study.get_trials(deepcopy=False))
        begun = [other for other in unfinished if other.state != TrialState.WAITING]
        for other in ended:
            self._failures.add_ended(other)
        self._avoided = self._failures.blamed(begun)
        tried = Counter(choice for other in begun for choice in choices_of(other)) + self._failures.num_tried
        num_trials = self._failures.num_trials + len(begun)
        # Paused attempts count as well: they may still break.
        if sum(tried[choice] for choice in self._avoided) < RETRIED_SHARE * num_trials:
            self._avoided = set()
        completed = self._failures.completed
        if any(name == PRECISION for name, _ in completed):
            most = max(MIN_INFEASIBLE_TRIALS, UNPROVEN_SHARE * num_trials)
            unproven = (choice for choice in tried if choice[0] == PRECISION and choice not in completed)
            self._avoided |= {choice for choice in unproven if tried[choice] >= most}
        super().before_trial(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        params = super().sample_relative(study, trial, search_space)
        # Optuna asks `sample_independent` for missing ones.
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
        """Return true if the new trial should not have this choice."""
        return (name, value) in self._avoided


class AvoidRepeats(WrapperSampler):
    """Proposes no tried configuration while it finds an untried one.

    For spaces with few values: with the same seed a configuration would end much like before. In a repeated
    proposal one setting is changed at random, then two, and so on. FAILed trials do not count. Two workers
    that ask at the same moment may get the same configuration.
    """

    def __init__(self, sampler: InfeasibleFilterSampler, space: SearchSpace, seed: int) -> None:
        super().__init__(sampler)
        self._avoids = sampler.avoids
        self._space = space
        self._values = grid(space)
        self._ended, self._hidden = NewlyEnded(), NewlyEnded()
        self._tried: set[Configuration] = set()
        self._random = random.Random(seed)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        # The proposal is made here already: its settings depend on its values.
        ended, unfinished = self._ended.split(study.get_trials(deepcopy=False))
        # An invalid configuration is hidden, but it would be invalid again.
        hidden, _ = self._hidden.split(stored_trials(study))
        ended += [other for other in hidden if other.user_attrs.get("outcome") == Outcome.INVALID]
        self._tried |= _configurations(ended)
        tried = self._tried | _configurations(other for other in unfinished if other.number != trial.number)
        space = super().infer_relative_search_space(study, trial)
        proposal = self._propose(study, trial, super().sample_relative(study, trial, space))
        if _configuration(proposal.params) in tried:
            proposal = self._change(study, trial, proposal, tried)
        self._params = proposal.params
        return proposal.distributions

    def sample_relative(self, *_: object) -> dict[str, Any]:
        return self._params

    def _propose(self, study: Study, trial: FrozenTrial, params: Mapping[str, Any]) -> _Proposal:
        known = known_params(trial)

        def draw(name: str, distribution: BaseDistribution) -> Any:
            if name in known:  # the claim fixed it, or another worker began this trial
                return known[name]
            if name in params:
                return params[name]
            return self._sampler.sample_independent(study, trial, name, distribution)

        proposal = _Proposal(draw)
        suggest(self._space, cast(BaseTrial, proposal))
        return proposal

    def _change(
        self, study: Study, trial: FrozenTrial, proposal: _Proposal, tried: Set[Configuration]
    ) -> _Proposal:
        for params in self._changes(proposal.params, known_params(trial)):
            changed = self._propose(study, trial, params)
            if _configuration(changed.params) not in tried:
                return changed
        return proposal

    def _changes(self, params: Mapping[str, Any], kept: Container[str]) -> Iterator[dict[str, Any]]:
        """Yield random changes of one setting, of two, and so on; then every combination of a small space."""
        values = {
            name: [value for value in of_setting if not self._avoids(name, value)]
            for name, of_setting in self._values.items()
            if name not in kept
        }
        others = {
            name: [value for value in values.get(name, ()) if value != present]
            for name, present in params.items()
        }
        names = [name for name in params if others[name]]
        for num_changes in range(1, len(names) + 1):
            for _ in range(CHANGES_TRIED):
                drawn = self._random.sample(names, num_changes)
                yield {**params, **{name: self._random.choice(others[name]) for name in drawn}}
        if math.prod(map(len, values.values())) <= ENUMERATED:
            products = list(itertools.product(*values.values()))
            self._random.shuffle(products)
            for product in products:
                yield {**params, **dict(zip(values, product, strict=True))}


class _Proposal:
    def __init__(self, draw: Callable[[str, BaseDistribution], Any]) -> None:
        self._draw = draw
        self.params: dict[str, Any] = {}
        self.distributions: dict[str, BaseDistribution] = {}

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        return self._suggest(name, CategoricalDistribution(choices))

    def suggest_float(self, name: str, low: float, high: float, step: float | None, **options: Any) -> Any:
        value = self._suggest(name, FloatDistribution(low, high, step=step, **options))
        if step is not None:  # GP has 7e-18 for 0, which would pass for another configuration
            self.params[name] = min(high, low + step * round((value - low) / step))
        return self.params[name]

    def suggest_int(self, name: str, low: int, high: int, **options: Any) -> Any:
        return self._suggest(name, IntDistribution(low, high, **options))

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        self.distributions[name] = distribution
        self.params[name] = self._draw(name, distribution)
        return self.params[name]


def _configurations(trials: Iterable[FrozenTrial]) -> set[Configuration]:
    return {_configuration(trial.params) for trial in trials if trial.state != TrialState.FAIL}


def _configuration(params: Mapping[str, Any]) -> Configuration:
    return frozenset((name, _text(value)) for name, value in params.items())


def _text(value: Any) -> str:
    """0.3 and 0 + 3 * 0.1 are one value of a range with steps."""
    return f"{value:.12g}" if isinstance(value, float) else repr(value)
