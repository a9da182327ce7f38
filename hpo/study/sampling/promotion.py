"""Short starts, of which the best go on: the pruner `promote`.

A trial *pauses* at its first evaluation at or behind `starts` of its budget. To Optuna it has ended there,
as PRUNED with that value, so that plain Optuna and the dashboard show what is known of it, and a sampler
compares it with trials of the same length. Its checkpoint stays, and its slot is open again. When every trial
of the study has begun, the best `keep` of the paused ones *go on*: each as a trial of its own, with the
parameters and the evaluations so far, from the checkpoint. The schedule knew the whole budget from the start,
so the result is that of a trial which never paused. Nothing waits for a straggler: one that pauses late and
is among the best goes on as well.

Egele et al., "The Unreasonable Effectiveness of Early Discarding After One Epoch in Neural Network
Hyperparameter Optimization", 2024, https://arxiv.org/abs/2307.15422.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optuna.trial import FrozenTrial, TrialState

from hpo.outcome import Outcome

if TYPE_CHECKING:
    from hpo.config.study_config import StudyConfig

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

    def pauses(self, user_attrs: Mapping[str, Any], budget_used: float) -> bool:
        """Whether a trial with these user attributes is to pause at an evaluation."""
        return ORIGIN_ATTR not in user_attrs and self.starts <= budget_used < 1

    @property
    def reason(self) -> str:
        """Why a trial has paused."""
        return f"paused at {self.starts:.0%} of its budget; the best {self.keep} of the study go on."

    def goes_on(self, trials: Sequence[FrozenTrial]) -> list[int]:
        """The numbers of the paused trials that go on now, the best first, where all trials have begun.

        One that went on and broke leaves its place to the next, down to the place `2 * keep`.
        """
        later = {origin_of(trial): trial for trial in trials if ORIGIN_ATTR in trial.user_attrs}
        chosen, num_kept = [], 0
        for number in self._ranked(trials):
            if number in later and _broke(later[number]):
                continue
            if num_kept == self.keep:
                break
            num_kept += 1
            if number not in later:
                chosen.append(number)
        return chosen

    def hopeless(self, trials: Sequence[FrozenTrial]) -> set[int]:
        """The numbers of the paused trials that will never go on: there are better ones."""
        return {trial.number for trial in trials if is_paused(trial)} - {*self._ranked(trials)}

    def _ranked(self, trials: Sequence[FrozenTrial]) -> list[int]:
        sign = -1.0 if self.maximize else 1.0
        paused = [(sign * trial.values[0], trial.number) for trial in trials if is_paused(trial)]
        return [number for _, number in sorted(paused)[: 2 * self.keep]]


def promotion_of(config: StudyConfig) -> Promotion | None:
    """How the trials of a study pause; None: they do not."""
    pruner = config.pruner
    if pruner.name != "promote":
        return None
    options = pruner.options
    return Promotion(options["starts"], options["keep"], config.objective[0].direction == "maximize")


def is_paused(trial: FrozenTrial) -> bool:
    """Whether the trial has paused; it may have gone on since, as another trial."""
    is_pruned = trial.state == TrialState.PRUNED and bool(trial.values)
    return is_pruned and PAUSED_ATTR in trial.user_attrs and trial.user_attrs["outcome"] == Outcome.PRUNED


def origin_of(trial: FrozenTrial) -> int:
    """The number by which the trial's checkpoints are known."""
    return int(trial.user_attrs.get(ORIGIN_ATTR, trial.number))


def _broke(trial: FrozenTrial) -> bool:
    return trial.state.is_finished() and trial.state != TrialState.COMPLETE
