"""The pruner `promote`: short starts, and continuation of the best.

A trial *pauses* at each *rung*, a share of its budget. To Optuna it stays RUNNING; no worker has it, and its
checkpoint is kept. The best trials of a rung are *promoted*: a worker continues the same trial, with its
number and its curve. The schedule knew the whole budget from the start, so the result equals that of a trial
without pauses.

One of `reduction_factor` trials at a rung is promoted, at once and before another trial starts (asynchronous
successive halving). When every trial of the study has begun, more are promoted so that `keep` trials for each
objective reach the end. A late good trial is promoted as well. Trials of several objectives are ranked by
fronts (`hpo.study.sampling.fronts`). At each rung the best `MOST_PAUSED` of the waiting trials are kept,
because Optuna reads every unfinished trial again and again. The others end as PRUNED, and so do all of them
when the study ends.

A rung ranks nothing if most trials there are no better than the best constant prediction. If the first one
does, it is not used, and its trials continue to the next. Each worker derives this from the stored trials.

Li et al., "A System for Massively Parallel Hyperparameter Tuning", 2020, https://arxiv.org/abs/1810.05934.
Egele et al., "The Unreasonable Effectiveness of Early Discarding After One Epoch in Neural Network
Hyperparameter Optimization", 2024, https://arxiv.org/abs/2307.15422.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import numpy as np
from optuna.trial import FrozenTrial

from hpo.config.limits import violation
from hpo.config.sampler_config import PrunerConfig
from hpo.config.study_file import show
from hpo.errors import StorageError
from hpo.json_safe import is_number
from hpo.study.sampling.fronts import order

PAUSED_ATTR = "paused_at"  # user attribute of a trial: the rung of its last pause
RESUMED_ATTR = "resumed_at"  # user attribute of a promoted trial: the rung of its last continuation
RUNGS_ATTR = "rungs"
"""User attribute of a trial: {rung: {"values": its objectives there, "constraints": its violation of each
limit of the study there, "is_constant": true if no better than the best constant prediction}}."""
RUN_ATTRS = (
    *("outcome", "outcome_reason", "telemetry", "traceback", "worker", "active_seconds", "retry_of"),
    *(PAUSED_ATTR, RESUMED_ATTR, RUNGS_ATTR),
)
"""User attributes of a running or ended trial. An enqueued trial has none of them."""
WHOLE_ATTR = "whole"  # user attribute of an enqueued trial: true if it neither pauses nor is pruned
MOST_PAUSED = 12  # largest number of waiting trials at a rung, unless more can still be promoted


def is_at_rung(attributes: Mapping[str, Any]) -> bool:
    """Return true if a trial with these user attributes has paused at a rung and not continued."""
    return bool(attributes.get(PAUSED_ATTR, 0.0) > attributes.get(RESUMED_ATTR, 0.0))


def is_paused(trial: FrozenTrial) -> bool:
    return trial.state.name == "RUNNING" and is_at_rung(trial.user_attrs)


def check_attributes(trial: FrozenTrial, num_objectives: int) -> None:
    """Raise StorageError if the attributes of paused trials are not valid."""
    attributes = trial.user_attrs
    for name in (PAUSED_ATTR, RESUMED_ATTR):
        if name in attributes and not is_number(attributes[name]):
            _refuse(trial, name, "a number")
    rungs = attributes.get(RUNGS_ATTR, {})
    is_valid = isinstance(rungs, dict) and all(_is_rung(*item, num_objectives) for item in rungs.items())
    if not is_valid:
        _refuse(trial, RUNGS_ATTR, "{share: {values: a number for each objective, constraints: numbers}}")


def _is_rung(share: str, at_rung: Any, num_objectives: int) -> bool:
    try:
        values, limits = [*at_rung["values"]], [*at_rung["constraints"].values()]
        return 0 < float(share) < 1 and len(values) == num_objectives and all(map(is_number, values + limits))
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


def _refuse(trial: FrozenTrial, name: str, required: str) -> NoReturn:
    raise StorageError(
        f"The user attribute `{name}` of trial {trial.number} must be {required}, but the database has "
        f"{show(trial.user_attrs[name])}. Somebody has changed it. Delete the trial's study or the attribute."
    )


def rungs_of(attributes: Mapping[str, Any]) -> dict[float, Mapping[str, Any]]:
    """Return the values and constraints of a trial at each of its rungs, the first rung first."""
    at_rungs = {float(rung): at for rung, at in attributes.get(RUNGS_ATTR, {}).items()}
    return dict(sorted(at_rungs.items()))


def last_rung(attributes: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
    """Return the last rung of a trial that has paused, and its values and constraints there."""
    return [*rungs_of(attributes).items()][-1]


@dataclass(frozen=True)
class Promotion:
    """The rungs of a study, and the number of promoted trials."""

    rungs: tuple[float, ...]
    reduction_factor: int
    keep: int
    directions: tuple[str, ...]  # `minimize` or `maximize`, for each objective
    num_trials: int  # trials of the study; a rung is not used if all of them would be promoted

    def pauses_at(self, budget_used: float, resumed_at: float) -> float | None:
        """Return the rung for a pause, later than the one of the last continuation; None: the trial
        continues.
        """
        reached = (rung for rung in self.used if resumed_at < rung <= budget_used < 1)
        return max(reached, default=None)

    @property
    def used(self) -> list[float]:
        pairs = zip(self.rungs, self.at_least, strict=True)
        return [rung for rung, at_least in pairs if at_least < self.num_trials]

    @property
    def at_least(self) -> list[int]:
        """Smallest number of promoted trials for each rung, if enough trials have begun."""
        least = [self.keep * self.reduction_factor**index for index in reversed(range(len(self.rungs)))]
        return [max(number, self.keep * len(self.directions)) for number in least]

    def most_paused(self, num_trials: int) -> int:
        """Return the largest number of waiting trials at all rungs together."""
        pairs = zip(self.rungs, self.at_least, strict=True)
        return sum(min(num_trials, max(MOST_PAUSED, least)) for rung, least in pairs if rung in self.used)

    def num_promoted(self, num_paused: int, at_least: int) -> int:
        """Return how many of a rung's trials are promoted in the end."""
        return min(num_paused, max(num_paused // self.reduction_factor, at_least))


MIN_AT_RUNG = 5  # number of trials at a rung before it can rank nothing


class Standing(NamedTuple):
    """A trial at a rung. The lowest is the best."""

    is_last: bool
    """True if it continues after all others, because it breaks limits or its precision broke elsewhere."""
    losses: tuple[float, ...]
    number: int


@dataclass
class Rung:
    num_paused: int = 0  # number of pauses here so far
    num_constant: int = 0  # those no better than the best constant prediction
    promoted: list[Standing] = field(default_factory=list)  # continued trials, except for broken ones; sorted
    num_running: int = 0  # number of promoted trials on their way to the next rung
    waiting: list[Standing] = field(default_factory=list)  # paused trials for the live workers

    @property
    def ranks_nothing(self) -> bool:
        return self.num_paused >= MIN_AT_RUNG and 2 * self.num_constant > self.num_paused

    def chosen(self, num_promoted: int) -> list[int]:
        """Return the paused trials to promote, so that the best `num_promoted` have been promoted."""
        ranked = self._ranked()
        return [standing.number for rank, standing in ranked if rank < num_promoted]

    def beyond(self, rank: int) -> list[int]:
        """Return the paused trials behind this number of better waiting ones."""
        return [standing.number for _, standing in self._ranked()[rank:]]

    def _ranked(self) -> list[tuple[int, Standing]]:
        """Return the waiting trials, the best first, each with its rank among waiting and promoted ones."""
        if not self.waiting or len(self.waiting[0].losses) == 1:
            waiting = sorted(self.waiting)
            return [(bisect_left(self.promoted, one) + index, one) for index, one in enumerate(waiting)]
        every = [*self.promoted, *self.waiting]
        losses_NK = np.array([standing.losses for standing in every], dtype=float)
        behind_K = 1 + losses_NK.max(axis=0) - losses_NK.min(axis=0)
        losses_NK[[standing.is_last for standing in every]] += behind_K
        ranked = enumerate(order(losses_NK))
        return [(rank, every[index]) for rank, index in ranked if index >= len(self.promoted)]


class Standings:
    """The rungs of a study, as one worker sees them. An ended trial is added once and for all."""

    def __init__(
        self, promotion: Promotion, continues_last: Callable[[FrozenTrial], bool] = lambda _: False
    ) -> None:
        self.promotion = self._given = promotion  # with the rungs in use, as of the last `rungs`
        self.left_out = ""  # sentence on the rungs that rank nothing; empty: none
        self._continues_last = continues_last
        self._signs = [-1.0 if direction == "maximize" else 1.0 for direction in promotion.directions]
        self._ended = {rung: Rung() for rung in promotion.rungs}

    def add_ended(self, trial: FrozenTrial) -> None:
        """Add an ended trial. A FAILed trial does not count."""
        if trial.state.name == "FAIL":
            return
        last = max(rungs_of(trial.user_attrs), default=0.0)
        for number, rung, at in _reached(self._ended, trial):
            if number < last or trial.state.name == "COMPLETE":
                insort(rung.promoted, self._standing(trial, at))

    def rungs(
        self,
        unfinished: Sequence[FrozenTrial],
        is_waiting: Callable[[FrozenTrial], bool],
        continued: Container[int] = (),
    ) -> list[Rung]:
        """Return the rungs in use, with the unfinished trials.

        Args:
            is_waiting: tells if a paused trial may be promoted now.
            continued: numbers of trials that have continued since they were read.
        """
        rungs = {
            number: Rung(ended.num_paused, ended.num_constant, list(ended.promoted))
            for number, ended in self._ended.items()
        }
        for trial in unfinished:
            last = max(rungs_of(trial.user_attrs), default=0.0)
            for number, rung, at in _reached(rungs, trial):
                if number < last or not is_paused(trial) or trial.number in continued:
                    insort(rung.promoted, self._standing(trial, at))
                    rung.num_running += number == last
                elif is_waiting(trial):
                    rung.waiting.append(self._standing(trial, at, self._continues_last(trial)))
        used, self.left_out = [*rungs], ""
        while len(used) > 1 and (rung := rungs[used[0]]).ranks_nothing:
            first = used.pop(0)
            self.left_out = (
                f"At {first:.0%} of their training, {rung.num_constant} of {rung.num_paused} trials are no "
                f"better than the best constant prediction. So trials pause at {used[0]:.0%} first."
            )
        self.promotion = replace(self._given, rungs=tuple(used))
        return [rungs[number] for number in used]

    def promoted(self, rungs: Sequence[Rung], *, more_begin: bool) -> list[int]:
        """Return the numbers of the trials to promote now, the last rung first.

        `more_begin`: other trials of the study may still begin.
        """
        factor = self.promotion.reduction_factor
        chosen = [number for rung in reversed(rungs) for number in rung.chosen(rung.num_paused // factor)]
        if chosen or more_begin:
            return chosen
        # The last rungs wait for the first, from which more may come.
        pairs = zip(rungs, self.promotion.at_least, strict=True)
        return next(filter(None, (rung.chosen(at_least) for rung, at_least in pairs)), [])

    def fallen_behind(self, rungs: Sequence[Rung]) -> list[int]:
        """Return the numbers of the paused trials behind `MOST_PAUSED` better waiting ones."""
        pairs = zip(rungs, self.promotion.at_least, strict=True)
        return [number for rung, at_least in pairs for number in rung.beyond(max(MOST_PAUSED, at_least))]

    def _standing(self, trial: FrozenTrial, at: Mapping[str, Any], is_last: bool = False) -> Standing:
        losses = tuple(float(value * sign) for value, sign in zip(at["values"], self._signs, strict=True))
        return Standing(is_last or violation(at.get("constraints", {})) > 0, losses, trial.number)


def _reached(
    rungs: Mapping[float, Rung], trial: FrozenTrial
) -> Iterator[tuple[float, Rung, Mapping[str, Any]]]:
    """Count a trial at its rungs, and yield them. The study may have had others."""
    for number, at in rungs_of(trial.user_attrs).items():
        if (rung := rungs.get(number)) is not None:
            rung.num_paused += 1
            rung.num_constant += bool(at.get("is_constant"))
            yield number, rung, at


def promotion_of(pruner: PrunerConfig, directions: Sequence[str], num_trials: int) -> Promotion | None:
    if pruner.name != "promote":
        return None
    options = pruner.options
    rungs = tuple(map(float, pruner.rungs))
    return Promotion(rungs, options["reduction_factor"], options["keep"], tuple(directions), num_trials)
