"""Short starts, of which the best go on: the pruner `promote`.

A trial *pauses* at each *rung*, which is a share of its budget. To Optuna it has ended there, as PRUNED with
its value. Its checkpoint stays, and its slot is `paused`. The best of a rung *go on* to the next one: each as
a new trial, with the parameters, the evaluations so far and the checkpoint. The schedule knew the whole
budget from the start, so the result is that of a trial which never paused.

Of `reduction_factor` trials at a rung one goes on, at once and before another trial starts (asynchronous
successive halving). When every trial of the study has begun, more go on so that `keep` reach the end. A trial
that pauses late and is among the best goes on as well. With several objectives the best are the first fronts
(`hpo.study.sampling.fronts`).

Li et al., "A System for Massively Parallel Hyperparameter Tuning", 2020, https://arxiv.org/abs/1810.05934.
Egele et al., "The Unreasonable Effectiveness of Early Discarding After One Epoch in Neural Network
Hyperparameter Optimization", 2024, https://arxiv.org/abs/2307.15422.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from optuna.trial import FrozenTrial, TrialState

from hpo.config.limits import violation
from hpo.outcome import Outcome
from hpo.study.sampling.fronts import loss_signs, num_better, order
from hpo.study.store.optuna_internals import non_domination_ranks

if TYPE_CHECKING:
    from hpo.config.sampler_config import PrunerConfig

PAUSED_ATTR = "paused_at"
"""User attribute of a trial: the rung at which it is to pause."""
VALUES_ATTR = "paused_values"
"""User attribute of a trial with several objectives: their values at that rung, which become its own when it
pauses; Optuna keeps reports for one objective only."""
RESUMED_ATTR = "resumed_at"
"""User attribute of a trial that goes on: the rung at which it had paused."""
ORIGIN_ATTR = "origin"
"""User attribute of a trial that goes on: the number of the one that started, whose checkpoints it has."""

RUNGS_ATTR = "rungs"
"""User attribute of a trial: {rung: {"values": its objectives there, "violation": by how much it broke the
limits of the study there}}."""


def rungs_of(attributes: Mapping[str, Any]) -> dict[float, Mapping[str, Any]]:
    """Return what a trial with these user attributes was at each rung, the first rung first."""
    return {float(rung): at for rung, at in sorted(attributes.get(RUNGS_ATTR, {}).items(), key=_by_rung)}


def _by_rung(item: tuple[str, Any]) -> float:
    return float(item[0])


@dataclass(frozen=True)
class Stage:
    """So many trials train from one share of their budget to another."""

    begin: float
    end: float
    num_trials: int

    @property
    def whole_trials(self) -> float:
        """How much that is."""
        return self.num_trials * (self.end - self.begin)


@dataclass(frozen=True)
class Promotion:
    """Where trials pause, and how many of them go on."""

    rungs: tuple[float, ...]
    reduction_factor: int
    keep: int
    directions: tuple[str, ...]
    """`minimize` or `maximize`, of each objective."""
    num_trials: int
    """Of the study. At a rung from which all of them would go on, none pauses."""

    def pauses_at(self, budget_used: float, resumed_at: float) -> float | None:
        """The rung at which a trial is to pause at an evaluation; None: it trains on.

        Args:
            resumed_at: the rung at which it paused before; 0: it has not.
        """
        reached = (rung for rung in self._used if resumed_at < rung <= budget_used < 1)
        return max(reached, default=None)

    def going_on(self, trials: Sequence[FrozenTrial], unfinished: Collection[int | None]) -> list[int]:
        """The numbers of the paused trials that go on now, those of the last rungs first.

        A trial that went on and broke leaves its place to the next.

        Args:
            unfinished: the trials of the unfinished slots, None for a slot that has not begun. Only these
                can go on, and a failed one among them is tried again.
        """
        rungs = self._at_rungs(trials, unfinished)
        chosen = [number for rung in reversed(rungs) for number in rung.chosen(rung.num_promoted)]
        if chosen or None in unfinished:
            return chosen
        # Where there are more to come, the last rungs wait for the first.
        at_least = (rung.chosen(rung.at_least) for rung in rungs)
        return next(filter(None, at_least), [])

    def hopeless(self, trials: Sequence[FrozenTrial], unfinished: Collection[int | None]) -> set[int]:
        """The numbers of the paused trials that will never go on: there are better ones.

        Some of each rung are kept: for the places of trials that break, and as more go on when more trials
        come.
        """
        return {
            number
            for rung in self._at_rungs(trials, unfinished)
            for number in rung.beyond(max(rung.at_least, rung.num_promoted * 3 // 2) + 2 * self.keep)
        }

    def left(
        self, trials: Sequence[FrozenTrial], unfinished: Collection[int | None], num_new: int = 0
    ) -> float:
        """What it takes, in whole trials, until all that have begun and so many new ones have ended."""
        running = (trial for trial in trials if trial.state == TrialState.RUNNING)
        starts = [trial for trial in running if RESUMED_ATTR not in trial.user_attrs]
        arriving = len(starts) + num_new
        left = arriving * self.rungs[0]
        ends = (*self.rungs[1:], 1.0)
        for share, end, rung in zip(self.rungs, ends, self._at_rungs(trials, unfinished), strict=True):
            num_promoted = self._num_promoted(rung.num_paused + arriving, rung.at_least)
            arriving = max(0, num_promoted - rung.num_kept) + rung.num_running
            left += arriving * (end - share)
        return left

    def work(self, resumed_at: Iterable[float]) -> tuple[float, float]:
        """How much of a study is done, and about how much there is, in whole trials.

        `resumed_at` has the rung at which each ended trial had paused before; 0 for none.
        """
        total = sum(stage.whole_trials for stage in self.stages(self.num_trials))
        return min(total, self.done(resumed_at)), total

    def stages(self, num_trials: int) -> Iterator[Stage]:
        """What so many trials train, if none breaks: to the first rung, and so on to the end."""
        ends = zip((0.0, *self.rungs), (*self.rungs, 1.0), (*self.at_least, 0), strict=True)
        for begin, end, at_least in ends:
            yield Stage(begin, end, num_trials)
            num_trials = self._num_promoted(num_trials, at_least)

    def _num_promoted(self, num_paused: int, at_least: int) -> int:
        """How many of so many go on from a rung in the end."""
        return min(num_paused, max(num_paused // self.reduction_factor, at_least))

    def _at_rungs(self, trials: Sequence[FrozenTrial], unfinished: Collection[int | None]) -> list[_Rung]:
        return [_Rung(self, rung, trials, unfinished) for rung in self.rungs]

    def done(self, resumed_at: Iterable[float]) -> float:
        """What trials that have ended took, in whole trials, by the rungs at which they had paused before."""
        ends = (*self._used, 1.0)
        return sum(ends[bisect_right(ends, begin)] - begin for begin in resumed_at)

    @property
    def _used(self) -> list[float]:
        pairs = zip(self.rungs, self.at_least, strict=True)
        return [rung for rung, at_least in pairs if at_least < self.num_trials]

    @property
    def at_least(self) -> list[int]:
        """How many trials of each rung go on, if so many have begun."""
        last = len(self.rungs) - 1
        return [self.keep * self.reduction_factor ** (last - index) for index in range(last + 1)]


class _Rung:
    """The trials of a study that have paused at a rung."""

    def __init__(
        self,
        promotion: Promotion,
        rung: float,
        trials: Sequence[FrozenTrial],
        unfinished: Collection[int | None],
    ) -> None:
        self._unfinished = unfinished
        # The last one, where one that failed was tried again.
        self._later = {
            trial.user_attrs[ORIGIN_ATTR]: trial
            for trial in trials
            if trial.user_attrs.get(RESUMED_ATTR) == rung
        }
        paused = [trial for trial in trials if is_paused(trial) and trial.user_attrs[PAUSED_ATTR] == rung]
        self.num_paused = len(paused)
        self.num_promoted = len(paused) // promotion.reduction_factor
        # A slot may be gone with its trial: `n_trials` was lowered, or the study was cancelled.
        known = [trial for trial in paused if trial.number in unfinished or _origin(trial) in self._later]
        signs_K = loss_signs(promotion.directions)
        losses_NK = np.array([t.values for t in known], dtype=float).reshape(-1, len(signs_K)) * signs_K
        # What breaks limits is behind all that meets them.
        behind_K = 1 + losses_NK.max(axis=0, initial=0) - losses_NK.min(axis=0, initial=0)
        losses_NK[[violation(trial.constraints) > 0 for trial in known]] += behind_K
        order_N = order(losses_NK)
        self._losses_NK = losses_NK[order_N]
        self._origin_of = {known[index].number: _origin(known[index]) for index in order_N}
        self.at_least = promotion.at_least[promotion.rungs.index(rung)]
        if len(signs_K) > 1:
            self.at_least = max(self.at_least, int((non_domination_ranks(self._losses_NK) == 0).sum()))
        later = self._later.values()
        self.num_running = sum(not trial.state.is_finished() for trial in later)
        self.num_kept = sum(not self._broke(trial) for trial in later)

    def beyond(self, place: int) -> list[int]:
        """Those that have not gone on, behind so many that are better.

        With several objectives a trial that comes may change the order of others, but not who beats whom.
        """
        return [
            number
            for row, (number, origin) in enumerate(self._origin_of.items())
            if row >= place and origin not in self._later
            if self._losses_NK.shape[1] == 1 or num_better(self._losses_NK, row) >= place
        ]

    def chosen(self, num_promoted: int) -> list[int]:
        """Those that go on now, so that so many have gone on without breaking."""
        chosen, num_kept = [], 0
        for number, origin in self._origin_of.items():
            later = self._later.get(origin)
            if later is not None and self._broke(later):
                continue
            if num_kept == num_promoted:
                break
            num_kept += 1
            if later is None:
                chosen.append(number)
        return chosen

    def _broke(self, trial: FrozenTrial) -> bool:
        """Whether a trial that went on has ended without a value, and is not to be tried again."""
        is_over = trial.state.is_finished() and trial.number not in self._unfinished
        return is_over and trial.state != TrialState.COMPLETE and not is_paused(trial)


def promotion_of(pruner: PrunerConfig, directions: Sequence[str], num_trials: int) -> Promotion | None:
    """How the trials of a study with this pruner and these directions pause; None: they do not."""
    if pruner.name != "promote":
        return None
    options = pruner.options
    rungs = tuple(map(float, pruner.rungs))
    factor = options["reduction_factor"]
    return Promotion(rungs, factor, options["keep"], tuple(directions), num_trials)


def is_paused(trial: FrozenTrial) -> bool:
    """Whether the trial has paused; it may have gone on since, as another trial."""
    is_pruned = trial.state == TrialState.PRUNED and trial.user_attrs.get("outcome") == Outcome.PRUNED
    return is_pruned and bool(trial.values) and PAUSED_ATTR in trial.user_attrs


def origin_of(number: int, user_attrs: Mapping[str, Any]) -> int:
    """The number by which the checkpoints of a trial are known."""
    return int(user_attrs.get(ORIGIN_ATTR, number))


def _origin(trial: FrozenTrial) -> int:
    return origin_of(trial.number, trial.user_attrs)
