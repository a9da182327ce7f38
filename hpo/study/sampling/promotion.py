"""Short starts, of which the best go on: the pruner `promote`.

A trial *pauses* at its first evaluation at or behind `starts` of its budget. To Optuna it has ended there,
as PRUNED with that value, so that plain Optuna and the dashboard show what is known of it, and a sampler
compares it with trials of the same length. Its checkpoint stays, and its slot is `paused`. When every trial
of the study has begun, the best `keep` of the paused ones *go on*: each as a trial of its own, with the
parameters and the evaluations so far, from the checkpoint. The schedule knew the whole budget from the start,
so the result is that of a trial which never paused. Nothing waits for a straggler: one that pauses late and
is among the best goes on as well.

Egele et al., "The Unreasonable Effectiveness of Early Discarding After One Epoch in Neural Network
Hyperparameter Optimization", 2024, https://arxiv.org/abs/2307.15422.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optuna.trial import FrozenTrial, TrialState

from hpo.config.limits import violation
from hpo.outcome import Outcome

if TYPE_CHECKING:
    from hpo.config.sampler_config import PrunerConfig

PAUSED_ATTR = "paused_at"
"""User attribute of a trial: the number of the evaluation at which it is to pause."""
ORIGIN_ATTR = "origin"
"""User attribute of a trial that goes on: the number of the one that paused, whose checkpoints it has."""


@dataclass(frozen=True)
class Promotion:
    """How far trials start, and how many of them go on."""

    starts: float
    """Share of the budget."""
    keep: int
    maximize: bool

    def pauses(self, budget_used: float) -> bool:
        """Whether a trial that has not paused yet is to do so at an evaluation."""
        return self.starts <= budget_used < 1

    def going_on(self, trials: Sequence[FrozenTrial], unfinished: Collection[int | None]) -> list[int]:
        """The numbers of the paused trials that go on now; none before all trials have begun.

        One that went on and broke leaves its place to the next, down to the place `2 * keep`.

        Args:
            unfinished: the numbers of the trials that unfinished slots have, with None where one has not
                begun: only these can go on, and one that failed and is among them is tried again.
        """
        if None in unfinished:
            return []
        later = _later(trials)
        chosen, num_kept = [], 0
        for number in self._ranked(trials, unfinished):
            if number in later and _broke(later[number], unfinished):
                continue
            if num_kept == self.keep:
                break
            num_kept += 1
            if number not in later:
                chosen.append(number)
        return chosen

    def hopeless(self, trials: Sequence[FrozenTrial], unfinished: Collection[int | None]) -> set[int]:
        """The numbers of the paused trials that will never go on: there are better ones."""
        return {trial.number for trial in trials if is_paused(trial)} - {*self._ranked(trials, unfinished)}

    def work(self, num_trials: int, went_on: Iterable[bool]) -> tuple[float, float]:
        """How much of a study is done, and how much there is, in whole trials.

        Args:
            went_on: of each trial that has ended, whether it had paused before.
        """
        later = 1 - self.starts
        total = num_trials * self.starts + min(num_trials, self.keep) * later
        return min(total, sum(later if each else self.starts for each in went_on)), total

    def _ranked(self, trials: Sequence[FrozenTrial], unfinished: Collection[int | None]) -> list[int]:
        sign, later = -1.0 if self.maximize else 1.0, _later(trials)
        paused = [trial for trial in trials if is_paused(trial)]
        # A slot may be gone with its trial: `n_trials` was lowered, or the study was cancelled.
        known = [trial for trial in paused if trial.number in unfinished or trial.number in later]
        known.sort(key=lambda t: (violation(t.constraints) > 0, sign * t.values[0], t.number))
        return [trial.number for trial in known[: 2 * self.keep]]


def promotion_of(pruner: PrunerConfig, direction: str) -> Promotion | None:
    """How the trials of a study with this pruner and direction pause; None: they do not."""
    if pruner.name != "promote":
        return None
    return Promotion(pruner.options["starts"], pruner.options["keep"], direction == "maximize")


def is_paused(trial: FrozenTrial) -> bool:
    """Whether the trial has paused; it may have gone on since, as another trial."""
    is_pruned = trial.state == TrialState.PRUNED and trial.user_attrs.get("outcome") == Outcome.PRUNED
    return is_pruned and bool(trial.values) and PAUSED_ATTR in trial.user_attrs


def origin_of(number: int, user_attrs: Mapping[str, Any]) -> int:
    """The number by which the checkpoints of a trial are known."""
    return int(user_attrs.get(ORIGIN_ATTR, number))


def _later(trials: Sequence[FrozenTrial]) -> dict[int, FrozenTrial]:
    """The last trial that goes on from where another has paused, by the number of that one."""
    return {trial.user_attrs[ORIGIN_ATTR]: trial for trial in trials if ORIGIN_ATTR in trial.user_attrs}


def _broke(trial: FrozenTrial, unfinished: Collection[int | None]) -> bool:
    """Whether a trial that went on has ended without a result, and is not to be tried again."""
    is_over = trial.state.is_finished() and trial.number not in unfinished
    return is_over and trial.state != TrialState.COMPLETE
