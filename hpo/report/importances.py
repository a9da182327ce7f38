"""How much each searched parameter, `fp_precision` among them, decides whether a trial is one of the best.

PED-ANOVA (Watanabe et al. 2023, arXiv 2304.10255), Optuna's default: it compares the parameters of the best
trials with those of all complete ones. Optuna takes the best tenth; a study of a dozen trials has no tenth
to speak of, so at least five are taken, and at most half.
"""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from hpo.study.study_record import complete_trials, is_number, loss_signs

if TYPE_CHECKING:
    from hpo.study.study_record import StudyRecord, TrialRecord

MIN_TRIALS_FOR_IMPORTANCES = 8
"""PED-ANOVA compares the best trials with all of them; with fewer there is nothing to compare."""

MIN_TOP_TRIALS = 5
"""Optuna's advice for PED-ANOVA: at least five trials among the best."""


def why_no_importances(record: StudyRecord) -> str:
    """Empty when importances can be computed, else the reason why they cannot."""
    complete = complete_trials(record)
    if len(complete) < MIN_TRIALS_FOR_IMPORTANCES:
        return (
            f"Importances compare the best trials with the others and need at least "
            f"{MIN_TRIALS_FOR_IMPORTANCES} complete trials; there are {len(complete)}."
        )
    if not any(trial.params for trial in complete):
        return "No parameter was searched."
    values = np.array([trial.values for trial in complete], dtype=float)
    losses = np.sort(values * loss_signs(record.directions), axis=0)
    if (losses[num_top_trials(len(complete)) - 1] == losses[-1]).any():
        return "The complete trials differ too little in their values to tell the best from the others."
    return ""


def num_top_trials(num_complete: int) -> int:
    """How many trials count as the best for PED-ANOVA: a tenth, but at least five, at most half."""
    return max(math.ceil(0.1 * num_complete), min(MIN_TOP_TRIALS, num_complete // 2))


def importance_table(record: StudyRecord) -> pd.DataFrame:
    """`parameter`, then for each metric the share (0 to 1) of its PED-ANOVA importance.

    Optuna's default evaluator (arXiv 2304.10255), over complete trials, with the number of best trials
    raised from a tenth to at least five. Empty where `why_no_importances` gives a reason.
    """
    if why_no_importances(record):
        return pd.DataFrame(columns=["parameter", *record.metric_names])
    import optuna

    complete = complete_trials(record)
    distributions = _distributions(record, complete)
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(
        target_quantile=num_top_trials(len(complete)) / len(complete)
    )
    directions = [optuna.study.StudyDirection[direction.upper()] for direction in record.directions]
    table = {}
    with _quiet_optuna(), warnings.catch_warnings():
        # A conditional parameter seen in a trial or two; the report says how many trials it has.
        warnings.simplefilter("ignore", UserWarning)
        for index, metric in enumerate(record.metric_names):
            study = optuna.create_study(direction=directions[index])
            for trial in complete:
                used = {name: distributions[name] for name in trial.params}
                params = {name: _for_optuna(trial.params[name], used[name]) for name in used}
                value = (trial.values or ())[index]
                study.add_trial(optuna.trial.create_trial(params=params, distributions=used, value=value))
            table[metric] = optuna.importance.get_param_importances(study, evaluator=evaluator)
    frame = pd.DataFrame(table).rename_axis("parameter").reset_index()
    return frame.sort_values(record.metric_names[0], ascending=False, ignore_index=True)


@contextlib.contextmanager
def _quiet_optuna() -> Iterator[None]:
    """Without the line that Optuna logs for every study made, in memory too."""
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)


def _distributions(record: StudyRecord, complete: Sequence[TrialRecord]) -> dict[str, Any]:
    """Optuna's distributions of the searched parameters, wide enough for every value that was tried.

    Enqueued values may lie outside the study's ranges, and choices may be lists, which Optuna cannot hold.
    """
    import optuna

    space = record.definition.get("search_space") or {}
    distributions: dict[str, Any] = {}
    for name in {name for trial in complete for name in trial.params}:
        seen = [trial.params[name] for trial in complete if name in trial.params]
        given = space.get(name) or {}
        if given.get("type") in ("float", "int") and all(map(is_number, seen)):
            low, high = min([given["low"], *seen]), max([given["high"], *seen])
            distributions[name] = optuna.distributions.FloatDistribution(
                low, high, log=bool(given.get("log"))
            )
        else:
            choices = dict.fromkeys(json.dumps(value) for value in [*(given.get("choices") or []), *seen])
            distributions[name] = optuna.distributions.CategoricalDistribution(list(choices))
    return distributions


def _for_optuna(value: Any, distribution: Any) -> Any:
    return json.dumps(value) if hasattr(distribution, "choices") else float(value)
