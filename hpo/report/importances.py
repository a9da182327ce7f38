"""How much each searched parameter, `fp_precision` among them, decides whether a trial is one of the best.

PED-ANOVA (Watanabe et al. 2023, arXiv 2304.10255), Optuna's default: it compares the parameters of the best
trials with those of all complete ones. Optuna takes the best tenth; a small study needs more, so at least
five trials are taken (as Optuna advises), and at most half.
"""

from __future__ import annotations

import math
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from hpo.study.study_record import complete_trials, loss_signs

if TYPE_CHECKING:
    import optuna

    from hpo.study.study_record import StudyRecord

MIN_TRIALS_FOR_IMPORTANCES = 8


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
    return max(math.ceil(0.1 * num_complete), min(5, num_complete // 2))


def compared_trials(record: StudyRecord) -> list[optuna.trial.FrozenTrial]:
    """The complete trials as Optuna has them.

    Trials that were enqueued with a value outside the search space are left out: Optuna's distributions
    reject such a value.
    """
    from optuna.trial import create_trial

    trials = []
    for one in complete_trials(record):
        with suppress(ValueError):
            trials.append(create_trial(params=one.params, distributions=one.distributions, values=one.values))
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
    top_share = num_top_trials(len(trials)) / len(trials)
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=top_share)
    signs, table = loss_signs(record.directions), {}
    with warnings.catch_warnings():
        # That a lower target is better, and that few trials have a conditional parameter.
        warnings.simplefilter("ignore", UserWarning)
        for index, metric in enumerate(record.metric_names):

            def loss(trial: optuna.trial.FrozenTrial, index: int = index) -> float:
                return float(trial.values[index] * signs[index])

            table[metric] = optuna.importance.get_param_importances(study, evaluator=evaluator, target=loss)
    frame = pd.DataFrame(table).rename_axis("parameter").reset_index()
    return frame.sort_values(record.metric_names[0], ascending=False, ignore_index=True)
