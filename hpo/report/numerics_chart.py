"""Numeric telemetry of a study's evaluations: the table behind it, and its chart."""

from __future__ import annotations

from typing import Any

import pandas as pd

from hpo.report.figures import Chart, Series, style_of
from hpo.report.tables import StudyTables, group_order

MEASURES = {"updates_lost": "updates lost to rounding", "underflow": "gradients that underflow"}
"""What the chart shows, in the words of its caption."""

_NUMBERS = ("loss_scale", "skipped_steps", "underflow", "overflow", "update_ratio", "updates_lost")
_TRIAL = ("number", "precision", "counts")
_COLUMNS = (*_TRIAL, "evaluation", "step", "epoch", *_NUMBERS)


def numerics_table(tables: StudyTables) -> pd.DataFrame:
    """One row for each evaluation that was measured.

    `hpo.training.numerics` says what of. `skipped_steps` are those since the evaluation before.
    """
    rows: list[dict[str, Any]] = []
    for trial, precision, counts in zip(
        tables.record.trials, tables.trials["precision"], tables.trials["counts"], strict=True
    ):
        of_trial = dict(zip(_TRIAL, (trial.number, precision, counts), strict=True))
        for index, row in enumerate(trial.evaluations, 1):
            if (measured := row.numerics) is None:
                continue
            at: dict[str, Any] = {"evaluation": index, "step": row.step, "epoch": row.epoch}
            at |= {name: measured.get(name) for name in ("loss_scale", "skipped_steps")}
            rows.append({**of_trial, **at, **measured["all"]})
    table = pd.DataFrame(rows, columns=list(_COLUMNS))
    return table.assign(**{name: pd.to_numeric(table[name]) for name in _NUMBERS})


def numerics(tables: StudyTables) -> Chart:
    """What rounding loses in each precision as the training goes on: medians over trials."""
    key, title = "numerics", "What rounding loses while training"
    table = numerics_table(tables)
    table = table[table["counts"].astype(bool)].copy()
    if table.empty:
        return Chart(key, title, absent="No evaluation has numeric telemetry.")
    groups = dict(zip(tables.trials["number"], tables.groups(tables.trials), strict=True))
    table["label"] = table["number"].map(groups)
    series: list[Series] = []
    for label in sorted(table["label"].unique(), key=lambda label: (group_order(label), label)):
        color, markers = style_of(label, sorted(set(groups.values())))
        of_label = table[table["label"].eq(label)]
        for measure, what in MEASURES.items():
            values = of_label.dropna(subset=[measure]).groupby("evaluation")[measure]
            if not len(values):
                continue
            measured = values.agg(["median", "min", "max", "count"])
            series.append(
                Series(
                    label,
                    color,
                    list(measured.index.astype(float)),
                    list(measured["median"]),
                    "line",
                    markers=markers,
                    with_markers=True,
                    dashed=measure == "underflow",
                    hover=[
                        f"{label}: {what} {median:.2%}\n{count:.0f} trials, {low:.2%} to {high:.2%}"
                        for median, low, high, count in measured.to_numpy()
                    ],
                    in_legend=all(one.name != label for one in series),
                )
            )
    if not series:
        return Chart(key, title, absent="No share was measured.")
    caption = (
        "Shares; medians over trials. Solid: updates lost to rounding. Dashed: gradients that underflow."
    )
    return Chart(
        key,
        title,
        x_label="evaluation",
        y_label="share",
        series=series,
        caption=caption,
        x_whole=True,
    )
