"""Retention of checkpoints: the best trials of a study and its last non-finite trials keep them."""

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState

from hpo.config.limits import violation
from hpo.errors import CheckpointError
from hpo.outcome import Outcome
from hpo.study.checkpoints.remote_store import RemoteStore
from hpo.study.sampling.fronts import loss_signs, pareto_front
from hpo.study.store.studies import BUDGET_SPENT

_logger = logging.getLogger(__name__)

NUM_NONFINITE = 2
"""Non-finite trials that keep their checkpoints, with the optimiser's state; at most as many as `top_k`."""


class Ended(NamedTuple):
    number: int
    values: Sequence[float] | None  # values of a complete trial, otherwise None
    constraints: Mapping[str, float]
    outcome: str
    reason: str


def without_checkpoints(trials: Sequence[Ended], directions: Sequence[str], top_k: int) -> set[int]:
    """Return the numbers of the trials without checkpoints.

    The first `top_k` by the first objective keep theirs: the Pareto front first, trials beyond the study's
    limits last. So do the last non-finite trials, for `hpo diagnose`, and trials ended by the budget.
    """
    complete = [trial for trial in trials if trial.values is not None]
    values = np.array([trial.values for trial in complete], dtype=float).reshape(-1, len(directions))
    outside = np.array([violation(trial.constraints) for trial in complete])
    front, losses = outside == 0, values[:, 0] * loss_signs(directions)[0]
    front[front] = pareto_front(values[front], directions)
    best = np.lexsort((losses, ~front, outside))[:top_k]
    nonfinite = [trial.number for trial in trials if trial.outcome == Outcome.NONFINITE]
    last = sorted(nonfinite, reverse=True)[: min(top_k, NUM_NONFINITE)]
    stopped = [trial.number for trial in trials if trial.reason == BUDGET_SPENT]
    return {trial.number for trial in trials} - {*(complete[index].number for index in best), *last, *stopped}


def keep_best_checkpoints(
    study: optuna.Study,
    study_folder: Path,
    top_k: int,
    remote: RemoteStore | None = None,
    removed: set[int] | None = None,
) -> None:
    """Remove all checkpoints of `without_checkpoints`, here and in the store, and note them in `removed`."""
    removed = set() if removed is None else removed
    directions = [direction.name.lower() for direction in study.directions]
    # With one objective, a trial never becomes one of the best again.
    known = removed if len(directions) == 1 else ()
    trials = (trial for trial in study.get_trials(deepcopy=False) if trial.number not in known)
    ended = [_ended(trial) for trial in trials if trial.state.is_finished()]
    numbers = without_checkpoints(ended, directions, top_k) - removed
    removed |= numbers
    for number in numbers:
        shutil.rmtree(study_folder / f"trial-{number:05d}", ignore_errors=True)
    if remote is not None:
        try:
            remote.remove_trials(study_folder, numbers)
        except CheckpointError as error:
            _logger.warning("Old checkpoints stay: %s", error)


def _ended(trial: FrozenTrial) -> Ended:
    outcome, reason = (str(trial.user_attrs.get(name, "")) for name in ("outcome", "outcome_reason"))
    values = trial.values if trial.state == TrialState.COMPLETE else None
    return Ended(trial.number, values, trial.constraints, outcome, reason)
