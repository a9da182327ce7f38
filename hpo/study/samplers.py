"""Which configuration is tried next, and when a trial stops early: Optuna's samplers and pruners.

A precision that cannot work must not eat the budget, and each sampler needs help of its own with that,
because such a trial ends as PRUNED with an infeasible constraint (see `slots`):

- TPE ranks infeasible trials last, but its first trials are random, as are all trials of NSGA-II's first
  generation and its mutations. `InfeasibleFilterSampler` replaces a choice of which every trial was
  infeasible.
- GP looks at COMPLETE trials only, so it never learns what is infeasible and proposes the same again, and
  nothing from what the pruner stopped. `PrunedAwareSampler` shows it a copy of the study where infeasible
  trials are COMPLETE with the worst value so far, and the others that were pruned with the value to be
  expected of them.

A trial that ran out of memory under a limit says nothing to a worker with a higher one: all of these leave it
out then. What is left is TPE's own rank for it, the last, which makes it rare and forbids nothing.

Random, grid and QMC do not learn and are left as they are, as is CMA-ES, which draws categories at random:
with them, such a trial ends before training.

TPE and GP come back to what they found good: on a grid, to the very same configuration. `AvoidRepeats`
changes that. GP is told the order of choices that are numbers: `[8, 16, 32]` has a middle.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpo.config.search_space import Distribution, grid, is_finite, suggest
from hpo.outcome import Outcome

if TYPE_CHECKING:
    from hpo.config.sampler_config import PrunerConfig, SamplerConfig

P = ParamSpec("P")
T = TypeVar("T")

MIN_INFEASIBLE_TRIALS = 3
"""So many trials of a choice must have been infeasible, and none feasible, before it is avoided."""

_SEEDS_BETWEEN_RESUMES = 9973
"""More than there are workers, so that no two of them ever have the same seed."""

RETRIED_SHARE = 0.05
"""Avoided choices are still tried in this share of the trials: what failed may have had another cause."""

CHANGES_TRIED = 20
"""How many changes of one setting of a repeated configuration are tried, then of two, and so on."""

MORE_MEMORY = 1.05
"""What did not fit is tried again with so many times the memory: cards of one model differ a little."""

ENUMERATED = 2000
"""Of a space with at most so many configurations the last one is found, too."""

Choice = tuple[str, Any]
"""Setting and value."""

Configuration = frozenset[tuple[str, str]]
"""The settings of a trial with their values as text."""

_PRECISION = "fp_precision"


def _without_experimental_warnings(function: Callable[P, T]) -> Callable[P, T]:
    """Some of Optuna's samplers and pruners call themselves experimental; the user chose them by name."""

    @wraps(function)
    def quiet(*args: P.args, **kwargs: P.kwargs) -> T:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return function(*args, **kwargs)

    return quiet


@_without_experimental_warnings
def build_sampler(
    config: SamplerConfig,
    space: Mapping[str, Distribution],
    *,
    worker_number: int = 0,
    num_trials: int = 0,
    memory_bytes: int | None = None,
) -> BaseSampler:
    """Return Optuna's sampler of that name, seeded by the study's seed, the worker and the trials so far.

    Two workers with the same seed would try the same configurations, and so would a study that is resumed
    with `num_trials` trials in it; only `grid` and `qmc` continue one sequence among all workers and
    need the same seed for it. `memory_bytes` are what the worker's trials may take; None: not known.
    """
    seed = (config.seed + worker_number + _SEEDS_BETWEEN_RESUMES * num_trials) % 2**32
    options = config.options
    independent = optuna.samplers.RandomSampler(seed=seed)
    match config.name:
        case "tpe":
            avoiding = InfeasibleFilterSampler(
                optuna.samplers.TPESampler(seed=seed, **options), seed, memory_bytes
            )
            return AvoidRepeats(avoiding, space, seed, memory_bytes) if is_finite(space) else avoiding
        case "gp":
            gp = optuna.samplers.GPSampler(seed=seed, warn_independent_sampling=False, **options)
            avoiding = InfeasibleFilterSampler(PrunedAwareSampler(gp, memory_bytes), seed, memory_bytes)
            return AvoidRepeats(avoiding, space, seed, memory_bytes) if is_finite(space) else avoiding
        case "nsga2":
            return InfeasibleFilterSampler(
                optuna.samplers.NSGAIISampler(seed=seed, **options), seed, memory_bytes
            )
        case "cmaes":
            return QuietCmaEs(
                seed=seed, independent_sampler=independent, warn_independent_sampling=False, **options
            )
        case "grid":
            return EndlessGrid(grid(space), seed=config.seed)
        case "qmc":
            return optuna.samplers.QMCSampler(
                seed=config.seed, independent_sampler=independent, warn_independent_sampling=False, **options
            )
        case "random":
            return independent


@_without_experimental_warnings
def build_pruner(config: PrunerConfig) -> BasePruner:
    """Return Optuna's pruner of that name. Steps are evaluations."""
    pruners = {
        "hyperband": optuna.pruners.HyperbandPruner,
        "asha": optuna.pruners.SuccessiveHalvingPruner,
        "median": optuna.pruners.MedianPruner,
        "percentile": optuna.pruners.PercentilePruner,
        "none": optuna.pruners.NopPruner,
    }
    if config.name == "patient":
        return optuna.pruners.PatientPruner(None, **config.options)
    pruner: BasePruner = pruners[config.name](**config.options)
    return pruner


def is_infeasible(trial: FrozenTrial) -> bool:
    """Whether a constraint of the trial is violated."""
    return any(value > 0 for value in trial.constraints.values())


def oom_at_lower_limit(trial: FrozenTrial, memory_bytes: int | None) -> bool:
    """Whether the trial ran out of memory where it could take less than `memory_bytes`."""
    if trial.user_attrs.get("outcome") != Outcome.OOM or memory_bytes is None:
        return False
    limit = trial.user_attrs.get("telemetry", {}).get("device", {}).get("memory_limit_bytes")
    return limit is not None and MORE_MEMORY * limit <= memory_bytes


class _Wrapper(BaseSampler):
    """Another sampler, with something changed, for trials that may take `memory_bytes`."""

    def __init__(self, sampler: BaseSampler, memory_bytes: int | None = None) -> None:
        self._sampler = sampler
        self._memory_bytes = memory_bytes

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._sampler.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._sampler.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._sampler.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        self._sampler.before_trial(study, trial)

    def after_trial(
        self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        self._sampler.after_trial(study, trial, state, values)

    def reseed_rng(self) -> None:
        self._sampler.reseed_rng()


class InfeasibleFilterSampler(_Wrapper):
    """Leaves out choices of which every trial so far was infeasible; one feasible trial brings them back.

    A choice is blamed once it has had `MIN_INFEASIBLE_TRIALS` such trials. The choice with the most of them
    comes first and explains its trials, so that a batch size is not blamed for a precision. Trials that
    ended as `unsupported` prove by themselves that this precision does not work here.
    """

    def __init__(self, sampler: BaseSampler, seed: int, memory_bytes: int | None = None) -> None:
        super().__init__(sampler, memory_bytes)
        self._random = random.Random(seed)
        self._avoided: set[Choice] = set()

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        trials = [t for t in _all_trials(study) if not oom_at_lower_limit(t, self._memory_bytes)]
        finished = [t for t in trials if t.state in (TrialState.COMPLETE, TrialState.PRUNED)]
        infeasible = [t for t in finished if is_infeasible(t)]
        feasible = {choice for t in finished if not is_infeasible(t) for choice in _choices(t)}
        self._avoided = set()
        unexplained = infeasible
        while blame := _blame(unexplained, feasible):
            self._avoided.add(blame)
            unexplained = [t for t in unexplained if blame not in _choices(t)]
        if len(infeasible) - len(unexplained) < RETRIED_SHARE * len(finished):
            self._avoided = set()
        super().before_trial(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        params = super().sample_relative(study, trial, search_space)
        # Optuna asks `sample_independent` for what is not there.
        return {name: value for name, value in params.items() if (name, value) not in self._avoided}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        value = super().sample_independent(study, trial, param_name, param_distribution)
        if isinstance(param_distribution, CategoricalDistribution) and (param_name, value) in self._avoided:
            choices = [c for c in param_distribution.choices if (param_name, c) not in self._avoided]
            if choices:
                return self._random.choice(choices)
        return value

    def avoids(self, name: str, value: Any) -> bool:
        """Whether the trial that is being made should not have this choice."""
        return (name, value) in self._avoided


class AvoidRepeats(_Wrapper):
    """Proposes no configuration that a trial has tried already, as long as one is found that none has.

    For spaces of finitely many configurations. Run again with the same seed, a configuration would end much
    as it did before, and samplers that exploit what is good come back to it often. Of a proposal that was
    tried before, one setting is changed at random, then two, and so on. Trials that FAILed do not count:
    they say nothing of their configuration. Two workers that ask at the same moment may get the same one.
    """

    def __init__(
        self,
        sampler: InfeasibleFilterSampler,
        space: Mapping[str, Distribution],
        seed: int,
        memory_bytes: int | None = None,
    ) -> None:
        super().__init__(sampler, memory_bytes)
        self._avoids = sampler.avoids
        self._space = space
        self._random = random.Random(seed)
        self._params: dict[str, Any] = {}

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        # The proposal is made here already: which settings it has depends on its values.
        tried = {
            _configuration(other.params)
            for other in _all_trials(study)
            if other.number != trial.number
            and other.state != TrialState.FAIL
            and not oom_at_lower_limit(other, self._memory_bytes)
        }
        space = super().infer_relative_search_space(study, trial)
        proposal = self._propose(study, trial, super().sample_relative(study, trial, space))
        if _configuration(proposal.params) in tried:
            proposal = self._change(study, trial, proposal, tried)
        self._params = proposal.params
        return proposal.distributions

    def sample_relative(
        self,
        study: Study,  # noqa: ARG002
        trial: FrozenTrial,  # noqa: ARG002
        search_space: dict[str, BaseDistribution],  # noqa: ARG002
    ) -> dict[str, Any]:
        return self._params

    def _propose(self, study: Study, trial: FrozenTrial, params: Mapping[str, Any]) -> _Proposal:
        """The configuration with `params`, as far as they apply, and what is missing from the sampler."""

        def draw(name: str, distribution: BaseDistribution) -> Any:
            if name in trial.params:  # another worker began this trial
                return trial.params[name]
            if name in params:
                return params[name]
            return self._sampler.sample_independent(study, trial, name, distribution)

        proposal = _Proposal(draw)
        suggest(self._space, proposal)
        return proposal

    def _change(
        self, study: Study, trial: FrozenTrial, proposal: _Proposal, tried: Set[Configuration]
    ) -> _Proposal:
        values = {
            name: [value for value in of_setting if not self._avoids(name, value)]
            for name, of_setting in grid(self._space).items()
            if name not in trial.params
        }
        for params in self._changes(proposal.params, values):
            changed = self._propose(study, trial, params)
            if _configuration(changed.params) not in tried:
                return changed
        return proposal

    def _changes(
        self, params: Mapping[str, Any], values: Mapping[str, Sequence[Any]]
    ) -> Iterator[dict[str, Any]]:
        """Random changes of one setting, of two, and so on; then, of a small space, all there is."""
        others = {
            name: [value for value in values.get(name, ()) if _text(value) != _text(present)]
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
    """Takes the part of a trial while a configuration is put together."""

    def __init__(self, draw: Callable[[str, BaseDistribution], Any]) -> None:
        self.params: dict[str, Any] = {}
        self.distributions: dict[str, BaseDistribution] = {}
        self._draw = draw

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        return self._suggest(name, CategoricalDistribution(choices))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> Any:
        return self._suggest(name, IntDistribution(low, high, log, step))

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> Any:
        return self._suggest(name, FloatDistribution(low, high, log, step))

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        self.distributions[name] = distribution
        self.params[name] = self._draw(name, distribution)
        return self.params[name]


def _configuration(params: Mapping[str, Any]) -> Configuration:
    return frozenset((name, _text(value)) for name, value in params.items())


def _text(value: Any) -> str:
    """0.3 and 0 + 3 * 0.1 are one value of a range with steps."""
    return f"{value:.12g}" if isinstance(value, float) else repr(value)


def _all_trials(study: Study) -> list[FrozenTrial]:
    """Not `study.get_trials`: Hyperband hands samplers a study that shows the trials of one bracket only."""
    return study._storage.get_all_trials(study._study_id, deepcopy=False)


def _choices(trial: FrozenTrial) -> list[Choice]:
    return [
        (name, value)
        for name, value in trial.params.items()
        if isinstance(trial.distributions[name], CategoricalDistribution)
    ]


def _blame(infeasible: Sequence[FrozenTrial], feasible: Set[Choice]) -> Choice | None:
    """Return the choice that explains the most of the trials, if it explains enough."""
    counts: Counter[Choice] = Counter()
    for trial in infeasible:
        if trial.user_attrs.get("outcome") == Outcome.UNSUPPORTED and _PRECISION in trial.params:
            counts[_PRECISION, trial.params[_PRECISION]] += MIN_INFEASIBLE_TRIALS
        else:
            counts.update(_choices(trial))
    for choice in feasible:
        counts.pop(choice, None)
    blamed = max(counts, key=lambda choice: (counts[choice], choice[0] == _PRECISION), default=None)
    return blamed if blamed is not None and counts[blamed] >= MIN_INFEASIBLE_TRIALS else None


class PrunedAwareSampler(_Wrapper):
    """Shows its sampler PRUNED trials as COMPLETE, and choices that are numbers as their ranks.

    One that the pruner stopped has its best evaluation, and what trials that went on gained after that
    evaluation in the median: an estimate that only the sampler sees. An infeasible one has the worst of these
    values and those of the COMPLETE trials. Choices in the order of their numbers tell a model with distances
    that 16 lies between 8 and 32.
    """

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        self._copy = _with_pruned(study, self._memory_bytes)
        self._ranked_space = super().infer_relative_search_space(self._copy, trial)
        own = {name: one for other in _all_trials(study) for name, one in other.distributions.items()}
        self._space = {name: own[name] for name in self._ranked_space}
        return self._space

    def sample_relative(
        self,
        study: Study,  # noqa: ARG002
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],  # noqa: ARG002
    ) -> dict[str, Any]:
        # Optuna has just asked for the search space of this trial.
        params = super().sample_relative(
            self._copy, _all_trials(self._copy)[trial.number], self._ranked_space
        )
        return {name: _of_rank(self._space[name], value) for name, value in params.items()}


def _with_pruned(study: Study, memory_bytes: int | None) -> Study:
    trials = _all_trials(study)
    value_of = {t.number: t.values for t in trials if t.state == TrialState.COMPLETE}
    value_of |= _expected(study, [trials[number] for number in value_of], trials)
    known = list(value_of.values()) or [[0.0] * len(study.directions)]
    worst = [
        min(of_objective) if direction == StudyDirection.MAXIMIZE else max(of_objective)
        for direction, of_objective in zip(study.directions, zip(*known, strict=True), strict=True)
    ]
    copy = optuna.create_study(directions=study.directions)
    for t in trials:
        shown = (
            worst if is_infeasible(t) and not oom_at_lower_limit(t, memory_bytes) else value_of.get(t.number)
        )
        copy.add_trial(
            optuna.trial.create_trial(
                state=t.state if shown is None else TrialState.COMPLETE,
                values=shown,
                params={name: _rank(t.distributions[name], value) for name, value in t.params.items()},
                distributions={name: _ranked(one) for name, one in t.distributions.items()},
            )
        )
    return copy


def _expected(
    study: Study, complete: Sequence[FrozenTrial], trials: Sequence[FrozenTrial]
) -> dict[int, list[float]]:
    """{trial number: value} of what the pruner stopped: its best evaluation and what others gained later."""
    stopped = [t for t in trials if t.state == TrialState.PRUNED and not is_infeasible(t)]
    gain_after: dict[int, float] = {}
    for step in {t.last_step for t in stopped if t.last_step is not None}:
        then = ((t.values[0], _best_until(study, t, step)) for t in complete)
        gains = [value - best for value, best in then if best is not None]
        gain_after[step] = statistics.median(gains) if gains else 0.0
    expected = {}
    for t in stopped:
        if t.last_step is not None and (best := _best_until(study, t, t.last_step)) is not None:
            expected[t.number] = [best + gain_after[t.last_step]]
    return expected


def _best_until(study: Study, trial: FrozenTrial, last_step: int) -> float | None:
    """The trial's best evaluation until `last_step`; None without a finite one."""
    reports = [
        value
        for step, value in trial.intermediate_values.items()
        if step <= last_step and math.isfinite(value)
    ]
    better = max if study.directions[0] == StudyDirection.MAXIMIZE else min
    return better(reports, default=None)


def _scale(distribution: BaseDistribution) -> list[Any]:
    """The choices in order where they are numbers, more than two of them; else nothing."""
    if not isinstance(distribution, CategoricalDistribution) or len(distribution.choices) <= 2:
        return []
    numbers = [choice for choice in distribution.choices if type(choice) in (int, float)]
    return sorted(numbers) if len(numbers) == len(distribution.choices) else []


def _ranked(distribution: BaseDistribution) -> BaseDistribution:
    scale = _scale(distribution)
    return IntDistribution(0, len(scale) - 1) if scale else distribution


def _rank(distribution: BaseDistribution, value: Any) -> Any:
    scale = _scale(distribution)
    return scale.index(value) if scale else value


def _of_rank(distribution: BaseDistribution, value: Any) -> Any:
    """The inverse of `_rank`."""
    scale = _scale(distribution)
    return scale[value] if scale else value


class EndlessGrid(optuna.samplers.GridSampler):
    """Optuna's grid, where the budget of the study and not the sampler says when it ends."""

    def after_trial(
        self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """Nothing: Optuna's calls `study.stop`, which is an error outside of `study.optimize`."""


class QuietCmaEs(optuna.samplers.CmaEsSampler):
    """Optuna's CMA-ES without a warning at every infeasible trial that it makes no use of constraints."""

    def after_trial(
        self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """Nothing: Optuna's does nothing else than warn."""
