"""Short starts, of which the best continue: the pruner `promote`.

A trial *pauses* at each *rung*, a share of its budget. To Optuna it stays RUNNING; no worker has it, and its
checkpoint is kept. The best of a rung are *promoted*: a worker continues the same trial, with its number and
its curve. The schedule knew the whole budget from the start, so the result is that of a trial that never
paused.

Of `reduction_factor` trials at a rung one is promoted, at once and before another trial starts (asynchronous
successive halving). When every trial of the study has begun, more are promoted so that `keep` trials for each
objective reach the end. A trial that pauses late and is among the best is promoted as well. Trials of several
objectives are ranked by fronts (`hpo.study.sampling.fronts`). At each rung the best `MOST_PAUSED` of the
waiting trials are kept, because Optuna reads every unfinished trial again and again. The others end as
PRUNED, and so do all of them when the study ends.

Li et al., "A System for Massively Parallel Hyperparameter Tuning", 2020, https://arxiv.org/abs/1810.05934.
Egele et al., "The Unreasonable Effectiveness of Early Discarding After One Epoch in Neural Network
Hyperparameter Optimization", 2024, https://arxiv.org/abs/2307.15422.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from hpo.config.limits import violation
from hpo.config.study_file import show
from hpo.errors import StorageError
from hpo.json_safe import is_number

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from hpo.config.sampler_config import PrunerConfig

PAUSED_ATTR = "paused_at"
"""User attribute of a trial: the rung at which it paused last."""
RESUMED_ATTR = "resumed_at"
"""User attribute of a trial that was promoted: the rung from which it continued."""
RUNGS_ATTR = "rungs"
"""User attribute of a trial: {rung: {"values": its objectives there, "constraints": how far it was outside of
each limit of the study there}}."""
RUN_ATTRS = (
    *("outcome", "outcome_reason", "telemetry", "traceback", "worker", "active_seconds", "retry_of"),
    *(PAUSED_ATTR, RESUMED_ATTR, RUNGS_ATTR),
)
"""User attributes that hpo writes while a trial runs and at its end. An enqueued trial has none of them."""
BUDGET_SPENT = "the budget of the study was not enough for more."
"""Reason of a trial that the budget of its study ended. It continues if the budget is raised."""
WHOLE_ATTR = "whole"
"""User attribute of an enqueued trial: true if it neither pauses nor is pruned."""
MOST_PAUSED = 12
"""At each rung so many paused trials wait at most."""


def is_at_rung(attributes: Mapping[str, Any]) -> bool:
    """Whether a trial with these user attributes has come to a rung and has not continued from it."""
    return bool(attributes.get(PAUSED_ATTR, 0.0) > attributes.get(RESUMED_ATTR, 0.0))


def is_paused(trial: FrozenTrial) -> bool:
    """Whether the trial waits at a rung."""
    return trial.state.name == "RUNNING" and is_at_rung(trial.user_attrs)


def check_attributes(trial: FrozenTrial, num_objectives: int) -> None:
    """Raise StorageError if somebody else wrote the attributes by which a trial pauses."""
    attributes = trial.user_attrs
    for name in (PAUSED_ATTR, RESUMED_ATTR):
        if name in attributes and not is_number(attributes[name]):
            _refuse(trial, name, "a number")
    rungs = attributes.get(RUNGS_ATTR, {})
    at_rungs = rungs.values() if isinstance(rungs, dict) and all(map(_is_share, rungs)) else [None]
    for at in at_rungs:
        values, limits = (at.get("values"), at.get("constraints")) if isinstance(at, dict) else (None, None)
        is_valid = isinstance(values, list) and len(values) == num_objectives and isinstance(limits, dict)
        numbers = [*(values or ()), *(limits or {}).values()] if is_valid else []
        if not is_valid or not all(map(is_number, numbers)):
            _refuse(trial, RUNGS_ATTR, "{share: {values: a number for each objective, constraints: numbers}}")


def _is_share(text: str) -> bool:
    try:
        return 0 < float(text) < 1
    except ValueError:
        return False


def _refuse(trial: FrozenTrial, name: str, required: str) -> NoReturn:
    raise StorageError(
        f"The user attribute `{name}` of trial {trial.number} must be {required}, but the database has "
        f"{show(trial.user_attrs[name])}. Somebody has changed it. Delete the trial's study or the attribute."
    )


def rungs_of(attributes: Mapping[str, Any]) -> dict[float, Mapping[str, Any]]:
    """Return what a trial with these user attributes was at each rung, the first rung first."""
    return {float(rung): at for rung, at in sorted(attributes.get(RUNGS_ATTR, {}).items(), key=_by_rung)}


def _by_rung(item: tuple[str, Any]) -> float:
    return float(item[0])


@dataclass(frozen=True)
class Promotion:
    """The rungs at which trials pause, and how many trials are promoted."""

    rungs: tuple[float, ...]
    reduction_factor: int
    keep: int
    directions: tuple[str, ...]
    """`minimize` or `maximize`, of each objective."""
    num_trials: int
    """Of the study. No trial pauses at a rung from which all of them would be promoted."""

    def pauses_at(self, budget_used: float, resumed_at: float) -> float | None:
        """Return the rung at which a trial is to pause at an evaluation; None: it trains on.

        Args:
            resumed_at: the rung from which it continued; 0: it has not paused yet.
        """
        reached = (rung for rung in self.used if resumed_at < rung <= budget_used < 1)
        return max(reached, default=None)

    @property
    def used(self) -> list[float]:
        """The rungs at which trials pause."""
        pairs = zip(self.rungs, self.at_least, strict=True)
        return [rung for rung, at_least in pairs if at_least < self.num_trials]

    @property
    def at_least(self) -> list[int]:
        """How many trials are promoted from each rung, if so many have begun."""
        least = [self.keep * self.reduction_factor**index for index in reversed(range(len(self.rungs)))]
        return [max(number, self.keep * len(self.directions)) for number in least]

    def most_paused(self, num_trials: int) -> int:
        """Return how many of so many trials wait at all rungs together, at most."""
        pairs = zip(self.rungs, self.at_least, strict=True)
        return sum(min(num_trials, max(MOST_PAUSED, least)) for rung, least in pairs if rung in self.used)

    def num_promoted(self, num_paused: int, at_least: int) -> int:
        """Return how many of the trials that pause at a rung are promoted in the end."""
        return min(num_paused, max(num_paused // self.reduction_factor, at_least))


class Standing(NamedTuple):
    """A trial at a rung. The lower, the better."""

    is_last: bool
    """Whether it continues after all others, because it breaks limits or its precision broke elsewhere."""
    losses: tuple[float, ...]
    number: int


@dataclass
class Rung:
    """The trials of a study that have come to a rung."""

    num_paused: int = 0
    """How many have paused here, whatever became of them."""
    promoted: list[Standing] = field(default_factory=list)
    """Those that continued and have not broken since; sorted."""
    num_running: int = 0
    """Those of the promoted that have not come to the next rung yet."""
    waiting: list[Standing] = field(default_factory=list)
    """The paused trials that a live worker can run."""

    def chosen(self, num_promoted: int) -> list[int]:
        """Return the paused trials to promote, so that the best `num_promoted` have been promoted."""
        ranked = self._ranked()
        return [standing.number for place, standing in ranked if place < num_promoted]

    def beyond(self, place: int) -> list[int]:
        """Return the paused trials behind so many better ones that wait, too."""
        return [standing.number for _, standing in self._ranked()[place:]]

    def _ranked(self) -> list[tuple[int, Standing]]:
        """The paused trials with their places among all that count, the best first."""
        if not self.waiting or len(self.waiting[0].losses) == 1:
            waiting = sorted(self.waiting)
            return [(bisect_left(self.promoted, one) + place, one) for place, one in enumerate(waiting)]
        import numpy as np  # which status does without

        from hpo.study.sampling.fronts import order

        every = [*self.promoted, *self.waiting]
        losses_NK = np.array([standing.losses for standing in every], dtype=float)
        behind_K = 1 + losses_NK.max(axis=0) - losses_NK.min(axis=0)
        losses_NK[[standing.is_last for standing in every]] += behind_K
        is_waiting = range(len(self.promoted), len(every))
        ranked = enumerate(order(losses_NK))
        return [(place, every[index]) for place, index in ranked if index in is_waiting]


class Standings:
    """The rungs of a study as one worker sees them. A trial that has ended is added once and for all.

    Args:
        continues_last: whether a paused trial continues after all others.
    """

    def __init__(
        self, promotion: Promotion, continues_last: Callable[[FrozenTrial], bool] = lambda _: False
    ) -> None:
        self.promotion = promotion
        self._continues_last = continues_last
        self._signs = [-1.0 if direction == "maximize" else 1.0 for direction in promotion.directions]
        self._ended = {rung: Rung() for rung in promotion.rungs}

    def add_ended(self, trial: FrozenTrial) -> None:
        """Add a trial that has ended. A trial that FAILed does not count."""
        if trial.state.name == "FAIL":
            return
        at_rungs = rungs_of(trial.user_attrs)
        last = max(at_rungs, default=0.0)
        for number, at in at_rungs.items():
            rung = self._ended.get(number)
            if rung is None:
                continue  # the study had other rungs
            rung.num_paused += 1
            if number < last or trial.state.name == "COMPLETE":
                insort(rung.promoted, self._standing(trial, at))

    def rungs(
        self,
        unfinished: Sequence[FrozenTrial],
        is_waiting: Callable[[FrozenTrial], bool],
        continued: Container[int] = (),
    ) -> list[Rung]:
        """Return the rungs with the unfinished trials.

        Args:
            is_waiting: whether a paused trial may be promoted now.
            continued: the numbers of the trials that have continued since they were read.
        """
        rungs = {
            number: Rung(ended.num_paused, list(ended.promoted)) for number, ended in self._ended.items()
        }
        for trial in unfinished:
            at_rungs = rungs_of(trial.user_attrs)
            last = max(at_rungs, default=0.0)
            for number, at in at_rungs.items():
                rung = rungs.get(number)
                if rung is None:
                    continue
                rung.num_paused += 1
                if number < last or not is_paused(trial) or trial.number in continued:
                    insort(rung.promoted, self._standing(trial, at))
                    rung.num_running += number == last
                elif is_waiting(trial):
                    rung.waiting.append(self._standing(trial, at, self._continues_last(trial)))
        return [*rungs.values()]

    def promoted(self, rungs: Sequence[Rung], *, more_begin: bool) -> list[int]:
        """Return the numbers of the trials that are promoted now, those of the last rungs first.

        Args:
            more_begin: whether other trials of the study may still begin.
        """
        factor = self.promotion.reduction_factor
        chosen = [number for rung in reversed(rungs) for number in rung.chosen(rung.num_paused // factor)]
        if chosen or more_begin:
            return chosen
        # Where more are to come, the last rungs wait for the first.
        pairs = zip(rungs, self.promotion.at_least, strict=True)
        return next(filter(None, (rung.chosen(at_least) for rung, at_least in pairs)), [])

    def fallen_behind(self, rungs: Sequence[Rung]) -> list[int]:
        """Return the numbers of the paused trials that wait behind `MOST_PAUSED` better ones."""
        pairs = zip(rungs, self.promotion.at_least, strict=True)
        return [number for rung, at_least in pairs for number in rung.beyond(max(MOST_PAUSED, at_least))]

    def _standing(self, trial: FrozenTrial, at: Mapping[str, Any], is_last: bool = False) -> Standing:
        losses = tuple(float(value * sign) for value, sign in zip(at["values"], self._signs, strict=True))
        return Standing(is_last or violation(at.get("constraints", {})) > 0, losses, trial.number)


def promotion_of(pruner: PrunerConfig, directions: Sequence[str], num_trials: int) -> Promotion | None:
    """Return how the trials of a study with this pruner and these directions pause; None: they do not."""
    if pruner.name != "promote":
        return None
    options = pruner.options
    rungs = tuple(map(float, pruner.rungs))
    return Promotion(rungs, options["reduction_factor"], options["keep"], tuple(directions), num_trials)
