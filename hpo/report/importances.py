"""The importance of each searched parameter: how far it sets the best trials apart (PED-ANOVA, Watanabe et
al. 2023, arXiv 2304.10255). The best are a tenth of the trials as in Optuna, but at least five, and at most
half.
"""

from __future__ import annotations

import math
import warnings
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from hpo.study.reading.study_record import complete_trials
from hpo.study.sampling.fronts import loss_signs

if TYPE_CHECKING:
    import optuna

    from hpo.study.reading.study_record import StudyRecord

MIN_TRIALS_FOR_IMPORTANCES = 8


@dataclass(frozen=True)
class Importances:
    """The importances of a study's parameters, or why they cannot be computed."""

    table: pd.DataFrame
    """`parameter`, then for each metric the share (0 to 1) of its importance; empty with `why_none`."""
    num_trials: int
    """Complete trials that were compared."""
    num_best: int
    """Those of them that count as the best."""
    why_none: str


def compute_importances(record: StudyRecord) -> Importances:
    trials = _complete_trials_as_losses(record)
    num_best = max(math.ceil(0.1 * len(trials)), min(5, len(trials) // 2))
    table = pd.DataFrame(columns=["parameter", *record.metric_names])
    why_none = _why_none(trials, num_best)
    if not why_none:
        table = _ped_anova(trials, num_best / len(trials), record.metric_names)
    return Importances(table, len(trials), num_best, why_none)


def _complete_trials_as_losses(record: StudyRecord) -> list[optuna.trial.FrozenTrial]:
    """The complete trials as Optuna has them, with values of which the lower is better.

    Optuna's distributions reject enqueued values outside the search space; such trials are left out.
    """
    from optuna.trial import create_trial

    trials = []
    for one in complete_trials(record):
        losses = (loss_signs(record.directions) * np.array(one.values)).tolist()
        with suppress(ValueError):
            trials.append(create_trial(params=one.params, distributions=one.distributions, values=losses))
    return trials


def _why_none(trials: list[optuna.trial.FrozenTrial], num_best: int) -> str:
    if len(trials) < MIN_TRIALS_FOR_IMPORTANCES:
        return (
            f"Importances compare the best trials with the others and need at least "
            f"{MIN_TRIALS_FOR_IMPORTANCES} complete trials; there are {len(trials)}."
        )
    if not any(trial.params for trial in trials):
        return "No parameter was searched."
    losses = np.sort([trial.values for trial in trials], axis=0)
    if (losses[num_best - 1] == losses[-1]).any():
        return "The complete trials differ too little in their values to tell the best from the others."
    return ""


def _ped_anova(
    trials: list[optuna.trial.FrozenTrial], top_share: float, metrics: tuple[str, ...]
) -> pd.DataFrame:
    import optuna

    study = optuna.create_study(directions=["minimize"] * len(metrics))
    study.add_trials(trials)
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=top_share)
    table = {}
    with warnings.catch_warnings():
        # That a lower target is better, and that few trials have a conditional parameter.
        warnings.simplefilter("ignore", UserWarning)
        for index, metric in enumerate(metrics):

            def loss(trial: optuna.trial.FrozenTrial, index: int = index) -> float:
                return float(trial.values[index])

            table[metric] = optuna.importance.get_param_importances(study, evaluator=evaluator, target=loss)
    frame = pd.DataFrame(table).rename_axis("parameter").reset_index()
    return frame.sort_values(metrics[0], ascending=False, ignore_index=True)
