"""How much each searched parameter, `fp_precision` among them, decides whether a trial is one of the best.

PED-ANOVA (Watanabe et al. 2023, arXiv 2304.10255), Optuna's default: it compares the parameters of the best
trials with those of all complete ones. Optuna takes the best tenth; a study of a dozen trials has no tenth
to speak of, so at least five are taken, and at most half.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from hpo.study.study_record import complete_trials, loss_signs

if TYPE_CHECKING:
    import optuna

    from hpo.study.study_record import StudyRecord

MIN_TRIALS_FOR_IMPORTANCES = 8
"""PED-ANOVA compares the best trials with all of them; with fewer there is nothing to compare."""

MIN_TOP_TRIALS = 5
"""Optuna's advice for PED-ANOVA: at least five trials among the best."""


def why_no_importances(record: StudyRecord) -> str:
    """Empty when importances can be computed, else the reason why they cannot."""
    trials = compared_trials(record)
    if len(trials) < MIN_TRIALS_FOR_IMPORTANCES:
        return (
            f"Importances compare the best trials with the others and need at least "
            f"{MIN_TRIALS_FOR_IMPORTANCES} complete trials; there are {len(trials)}."
        )
    if not any(trial.params for trial in trials):
        return "No parameter was searched."
    losses = np.sort(np.array([trial.values for trial in trials]) * loss_signs(record.directions), axis=0)
    if (losses[num_top_trials(len(trials)) - 1] == losses[-1]).any():
        return "The complete trials differ too little in their values to tell the best from the others."
    return ""


def num_top_trials(num_complete: int) -> int:
    """How many trials count as the best for PED-ANOVA: a tenth, but at least five, at most half."""
    return max(math.ceil(0.1 * num_complete), min(MIN_TOP_TRIALS, num_complete // 2))


def compared_trials(record: StudyRecord) -> list[optuna.trial.FrozenTrial]:
    """The complete trials as Optuna has them, without those enqueued with a value outside of
    the search space, which its distributions cannot hold."""
    import optuna

    trials = []
    for trial in complete_trials(record):
        try:
            trials.append(
                optuna.trial.create_trial(
                    params=trial.params, distributions=trial.distributions, values=trial.values
                )
            )
        except ValueError:
            continue
    return trials


def importance_table(record: StudyRecord) -> pd.DataFrame:
    """`parameter`, then for each metric the share (0 to 1) of its PED-ANOVA importance.

    Empty where `why_no_importances` gives a reason.
    """
    if why_no_importances(record):
        return pd.DataFrame(columns=["parameter", *record.metric_names])
    import optuna

    trials = compared_trials(record)
    directions = [optuna.study.StudyDirection[direction.upper()] for direction in record.directions]
    study = optuna.create_study(directions=directions)
    study.add_trials(trials)
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(
        target_quantile=num_top_trials(len(trials)) / len(trials)
    )
    signs, table = loss_signs(record.directions), {}
    with warnings.catch_warnings():
        # That less of a target is better, and that a conditional parameter is seen in a trial or two.
        warnings.simplefilter("ignore", UserWarning)
        for index, metric in enumerate(record.metric_names):

            def loss(trial: optuna.trial.FrozenTrial, index: int = index) -> float:
                return float(trial.values[index] * signs[index])

            table[metric] = optuna.importance.get_param_importances(study, evaluator=evaluator, target=loss)
    frame = pd.DataFrame(table).rename_axis("parameter").reset_index()
    return frame.sort_values(record.metric_names[0], ascending=False, ignore_index=True)
