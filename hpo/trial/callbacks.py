"""What a running trial calls. Knows no PyTorch, as those who make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpo.trial.telemetry import Progress, ScoredEvaluation


@dataclass(frozen=True)
class Callbacks:
    """Each may end the trial by raising a TrialEnd."""

    on_evaluation: Callable[[ScoredEvaluation], None] = lambda _: None
    should_stop: Callable[[], bool] = lambda: False
    """Asked between micro-batches; True: the trial is checkpointed and ends as `preempted`."""
    on_progress: Callable[[Progress], None] = lambda _: None
    """After each step but the last."""
