"""Importance of the searched settings, by Optuna, over complete trials in their requested precision."""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import optuna
import pandas as pd
from optuna import distributions, importance

from hpo.config.search_space import encode
from hpo.precision.table import PRECISION
from hpo.report.tables import StudyTables

LEAST_TRIALS, BEST_TRIALS = 10, 5  # PED-ANOVA compares at least 5 with all trials, as Optuna advises


def importances(tables: StudyTables, index: int = 0) -> pd.DataFrame:
    """Return the shares `PED-ANOVA` and `fANOVA` of each searched setting; each column sums to 1.

    NaN: some trials lack the setting. Empty with less than `LEAST_TRIALS` trials, or if all values are equal.
    """
    counted = set(tables.complete["number"][tables.complete["counts"]])
    space = {name: _distribution(entry) for name, entry in tables.search_space.items()}
    direction: Any = tables.record.directions[index]
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction=direction)
    for one in tables.record.trials:
        if one.number in counted and one.values and one.params.keys() <= space.keys():
            of = {name: space[name] for name in one.params}
            trial = optuna.create_trial(params={**one.params}, distributions=of, value=one.values[index])
            study.add_trial(trial)
    num = len(study.trials)
    if num < LEAST_TRIALS or len({trial.value for trial in study.trials}) == 1:
        return pd.DataFrame()
    methods: dict[str, Any] = {
        "PED-ANOVA": importance.PedAnovaImportanceEvaluator(target_quantile=max(0.1, BEST_TRIALS / num)),
        # Optuna's 64 trees take 13 s for 500 trials.
        "fANOVA": importance.FanovaImportanceEvaluator(seed=0, n_trees=min(64, max(16, 6400 // num))),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a setting that one trial has
        shares = {name: importance.get_param_importances(study, evaluator=of) for name, of in methods.items()}
    table = pd.DataFrame(shares, dtype=float)
    return table.loc[table.max(axis="columns").sort_values().index]


def importance_notes(tables: StudyTables) -> Iterator[str]:
    """Yield sentences about missing importances, and about choices without a complete trial."""
    num = int(tables.complete["counts"].sum())
    if num < LEAST_TRIALS and tables.search_space:
        yield f"Importances need {LEAST_TRIALS} complete trials in their precision, but there are {num}."
    for name, entry in tables.search_space.items():
        column = "precision" if name == PRECISION else f"param.{name}"
        for choice in map(encode, entry.get("choices", ()) if column in tables.trials else ()):
            outcomes = tables.trials["outcome"][tables.trials[column].eq(choice)].value_counts()
            if len(outcomes) and not outcomes.get("complete"):
                counts = ", ".join(f"{num} {outcome}" for outcome, num in outcomes.items())
                yield f"No trial with `{name}={choice}` is complete ({counts}), so importances leave it out."


def _distribution(entry: Mapping[str, Any]) -> distributions.BaseDistribution:
    if "choices" in entry:
        return distributions.CategoricalDistribution(tuple(map(encode, entry["choices"])))
    kind = distributions.IntDistribution if entry["type"] == "int" else distributions.FloatDistribution
    return kind(**{name: of for name, of in entry.items() if name not in ("type", "when") and of is not None})
