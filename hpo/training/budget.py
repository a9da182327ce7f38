"""The budget of a trial, and its progress in a checkpoint."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import Tensor

FIRST_STEP_SHARE = 0.005  # half of the first step, as an assumed share of a budget in seconds


@dataclass(frozen=True)
class Budget:
    """Length of a training: exactly one of the two limits is set."""

    max_steps: int | None = None
    max_seconds: float | None = None  # seconds of training, without evaluation and compilation

    def used(self, state: TrainState) -> float:
        return self._share(state.step, state.train_seconds)

    def learning_rate_position(self, state: TrainState) -> float:
        """Return the position of the next step on the schedule: its middle, so no step has a rate of zero.

        Under `max_seconds` the step is expected to last as long as the last one, the first one
        `FIRST_STEP_SHARE` of the budget.
        """
        half = state.step_seconds / 2 or FIRST_STEP_SHARE * (self.max_seconds or 0)
        return min(1.0, self._share(state.step + 0.5, state.train_seconds + half))

    def _share(self, steps: float, seconds: float) -> float:
        if self.max_seconds is not None:
            return seconds / self.max_seconds
        assert self.max_steps is not None
        return steps / self.max_steps

    def evaluations_due(self, state: TrainState, evaluate_at: Sequence[Fraction]) -> int:
        """Return the number of evaluations due by now. `evaluate_at` are their shares of the budget.

        In steps, an evaluation is due after exactly ceil(share * steps).
        """
        used: float | Fraction = self.used(state)
        if self.max_steps is not None:
            used = Fraction(state.step, self.max_steps)
        return bisect_right(evaluate_at, used)


@dataclass
class TrainState:
    """Progress of a trial; checkpointed."""

    step: int = 0
    epoch: int = 0
    batch: int = 0  # finished batches of this epoch
    num_examples: float = 0.0  # A window counts as its part of an example
    num_tokens: int = 0
    loss_sum: float | Tensor = 0.0
    """Sum over the `num_losses` steps since the last evaluation; in fp64, on the device."""
    num_losses: int = 0
    train_seconds: float = 0.0
    step_seconds: float = 0.0  # duration of the last step
    evaluation_seconds: float = 0.0
    evaluation_scoring_seconds: float = 0.0  # decoding and scoring, a part of `evaluation_seconds`
    callback_seconds: float = 0.0  # time in callbacks of the study's own code
    num_evaluations: int = 0
    micro_batch_size: int = 0
    oom_halvings: int = 0
    num_graphs: int = 0  # shapes recorded as CUDA graphs by this process
    graph_problem: str = ""  # reason why this process records no more graphs; empty: no problem

    def count_step(self, loss: Tensor, num_examples: float, num_tokens: int) -> None:
        self.step += 1
        self.batch += 1
        self.num_examples += num_examples
        self.num_tokens += num_tokens
        self.loss_sum = self.loss_sum + loss.double()
        self.num_losses += 1

    def take_mean_loss(self) -> float:
        """Return the mean loss of the steps since the last call. Waits for the device."""
        mean = float(self.loss_sum) / self.num_losses
        self.loss_sum, self.num_losses = 0.0, 0
        return mean

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers for a checkpoint. Waits for the device."""
        return vars(self) | {"loss_sum": float(self.loss_sum)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
