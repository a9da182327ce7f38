"""Does a precision need other settings? Partial dependence of the metric on a setting, for each precision.

A random forest is fitted to the complete trials, and asked for the metric of all of them with the setting at
a value and the precision at another (Friedman, Annals of Statistics 2001), so what else differs between the
trials is averaged out. Curves that are parallel say that the precision and the setting do not interact. How
far they are from it is Friedman and Popescu's H^2 (Annals of Applied Statistics 2008): the share of the
variance of the joint dependence that is not the sum of both. Intervals are those of forests fitted to
resampled trials.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hpo.precision.table import PRECISION
from hpo.report.figures import Chart, Series, style_of
from hpo.report.tables import StudyTables, group_order, objective_column

SETTINGS = ("learning_rate", "batch_size", "init_scale", "encoder")
"""What a precision is known to interact with."""
MIN_TRIALS = 12
"""With fewer complete trials a forest says nothing."""
NUM_RESAMPLED = 20
NUM_VALUES = 9
"""Of a setting that is a number, at most."""

Array = NDArray[np.float64]


def interactions(tables: StudyTables) -> list[Chart]:
    """A chart for each of `SETTINGS` that the study searches beside the precision."""
    searched = tables.record.definition.get("search_space", {})
    if PRECISION not in searched or len(tables.record.metric_names) > 1:
        return []
    return [_interaction(tables, name) for name in SETTINGS if name in searched]


def _interaction(tables: StudyTables, name: str) -> Chart:
    metric = tables.record.metric_names[0]
    key, title = f"interaction_{name}", f"{metric} by {name} under each precision"
    column = f"param.{name}"
    rows = tables.complete[tables.complete["counts"]]
    rows = rows.dropna(subset=[column]) if column in rows else rows.iloc[:0]
    groups = tables.groups(rows)  # a precision whose kinds of device differ is one on each
    rows = rows.assign(precision=groups, **{f"param.{PRECISION}": groups})
    precisions = sorted(rows["precision"].unique(), key=group_order)
    if len(rows) < MIN_TRIALS or len(precisions) < 2 or rows[column].nunique() < 2:
        told = f"{MIN_TRIALS} complete trials with `{name}` in at least two precisions and with two values"
        return Chart(key, title, absent=f"This needs {told}.")
    values, is_number = _values(rows[column])
    curves = _curves(rows, metric, column, values, precisions)
    low, middle, high = np.quantile(curves, [0.05, 0.5, 0.95], axis=0)
    strength = np.quantile([_h_squared(curve) for curve in curves], [0.05, 0.95])
    x = [float(value) for value in values] if is_number else [float(index) for index in range(len(values))]
    series = []
    for position, precision in enumerate(precisions):
        color, markers = style_of(precision, precisions)
        of_precision: Any = {"color": color, "x": x, "draw": "line", "markers": markers}
        series.append(Series(precision, y=list(middle[position]), with_markers=True, **of_precision))
        of_precision |= {"dashed": True, "in_legend": False}
        series += [Series(precision, y=list(bound[position]), **of_precision) for bound in (low, high)]
    return Chart(
        key,
        title,
        x_label=name,
        y_label=metric,
        series=series,
        x_ticks=[] if is_number else [str(value) for value in values],
        x_log=is_number and values[-1] > 20 * values[0] > 0,
        caption=(
            f"Partial dependence in a forest of {len(rows)} complete trials; dashed: 90 % of forests of "
            f"resampled trials. Share of the joint variance that is interaction: {strength[0]:.0%} to "
            f"{strength[1]:.0%}."
        ),
    )


def _values(column: pd.Series) -> tuple[list[Any], bool]:
    """The values that the setting is put to, and whether they are numbers."""
    if not pd.api.types.is_numeric_dtype(column):
        return sorted(column.astype(str).unique()), False
    different = np.unique(column.astype(float))
    if len(different) > NUM_VALUES:
        different = np.unique(np.quantile(different, np.linspace(0, 1, NUM_VALUES)))
    return list(different), True


def _curves(
    rows: pd.DataFrame, metric: str, column: str, values: Sequence[Any], precisions: Sequence[str]
) -> Array:
    """[forest, precision, value]: the metric that forests of resampled trials expect."""
    from sklearn.ensemble import RandomForestRegressor

    parameters = [name for name in rows if name.startswith("param.")]
    features = rows[parameters].copy()
    for name in parameters:
        if not pd.api.types.is_numeric_dtype(features[name]):
            features[name] = features[name].astype(str)
    target = rows[objective_column(metric)].to_numpy(dtype=float)
    asked = [
        features.assign(**{f"param.{PRECISION}": precision, column: value})
        for precision in precisions
        for value in values
    ]
    encoded = pd.get_dummies(pd.concat([features, *asked])).fillna(-1.0).to_numpy(dtype=float)
    known, at_values = encoded[: len(rows)], encoded[len(rows) :]
    draws = np.random.default_rng(0)
    curves = []
    for number in range(NUM_RESAMPLED):
        drawn = draws.integers(len(rows), size=len(rows))
        forest = RandomForestRegressor(n_estimators=30, min_samples_leaf=2, random_state=number)
        forest.fit(known[drawn], target[drawn])
        expected = forest.predict(at_values).reshape(len(precisions), len(values), len(rows))
        curves.append(expected.mean(axis=2))
    return np.array(curves)


def _h_squared(joint: Array) -> float:
    """Friedman's H^2 of a dependence [precision, value]; 0 where nothing depends on either."""
    centred = joint - joint.mean()
    rest = centred - centred.mean(axis=0) - centred.mean(axis=1, keepdims=True)
    total = float((centred**2).sum())
    return float((rest**2).sum()) / total if total else 0.0
