"""Which learning rates work under each precision: every trial by rate and outcome.

The range that works is that of the trials which trained (were complete or pruned). What lies beyond it is not
known to fail: where no trial failed, an upper bound of the share that would is given (Clopper and Pearson,
Biometrika 1934).
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from hpo.outcome import Outcome
from hpo.report.figures import OUTCOME_COLORS, Chart, Series
from hpo.report.formats import format_number
from hpo.report.tables import OUTCOMES, StudyTables, group_order

RATE = "param.learning_rate"
TRAINED = (Outcome.COMPLETE, Outcome.PRUNED)
SHOWN = (*TRAINED, Outcome.NONFINITE, Outcome.INCOMPATIBLE, Outcome.CRASHED)
"""Outcomes that say something of the learning rate."""
_MARKERS = {True: ("circle", "o"), False: ("x-thin-open", "x")}


def failure_map(tables: StudyTables) -> Chart:
    """Trials by learning rate and precision, those that did not train marked."""
    key, title = "failure_map", "Learning rates that work under each precision"
    trials = tables.trials
    if RATE not in trials or trials[RATE].dropna().nunique() < 2:
        return Chart(key, title, absent="The study does not search the learning rate.")
    rows = trials[trials["outcome"].isin(SHOWN)].dropna(subset=[RATE])
    if rows.empty:
        return Chart(key, title, absent="No trial has begun to train yet.")
    groups = tables.groups(rows)
    precisions = sorted(groups.unique(), key=group_order, reverse=True)
    places = groups.map(precisions.index).astype(float)
    # Spread, so that trials at one rate stay visible.
    spread = rows.groupby(groups).cumcount().map(lambda count: 0.09 * (count % 5 - 2))
    y = places + spread
    series = [
        Series(
            outcome,
            OUTCOME_COLORS[outcome],
            list(of_outcome[RATE].astype(float)),
            list(y[of_outcome.index]),
            markers=_MARKERS[outcome in TRAINED],
            hover=[f"trial {row.number}: {row.outcome}" for row in of_outcome.itertuples()],
        )
        for outcome in OUTCOMES
        if len(of_outcome := rows[rows["outcome"].eq(outcome)])
    ]
    told = [working_range(rows[groups.eq(name)], name) for name in reversed(precisions)]
    return Chart(
        key,
        title,
        x_label="learning rate",
        series=series,
        y_ticks=precisions,
        x_log=True,
        caption=" ".join(told),
        height=190 + 52 * len(precisions),
    )


def working_range(rows: pd.DataFrame, name: str) -> str:
    """A sentence on the rates that worked in the trials of one precision."""
    from scipy.stats import beta

    trained = rows["outcome"].isin(TRAINED)
    if not trained.any():
        return f"{name}: none of {len(rows)} trials trained."
    rates = rows[RATE].astype(float)
    low, high = rates[trained].min(), rates[trained].max()
    inside = rates.between(low, high)
    num, num_failed = int(inside.sum()), int((inside & ~trained).sum())
    bound = float(beta.ppf(0.95, num_failed + 1, num - num_failed)) if num > num_failed else 1.0
    beyond = rates[~trained & ~inside]
    above, below = beyond[beyond > high].min(), beyond[beyond < low].max()
    sides = [f"at {format_number(rate)}" for rate in (below, above) if not np.isnan(rate)]
    failed = f" and failed {' and '.join(sides)}" if sides else ""
    return (
        f"{name}: trained from {format_number(low)} to {format_number(high)}{failed}; there {num_failed} of "
        f"{num} failed, so with 95 % at most {bound:.0%}."
    )
