"""A study that ran on several kinds of device: what carries over between them, and what does not.

Rounding is arithmetic: scores, divergences and their shares are a precision's own on every device that
computes it alike, so trials of several kinds are put together, unless something speaks against it:

- trials had equal time (`max_seconds`), in which a faster device trains more;
- the compatibility check failed on one kind, which says nothing of another;
- the share of trials that became not finite, or the scores, differ between one kind and the others by more
  than chance (Fisher's exact test; Mann and Whitney's, Annals of Mathematical Statistics 1947; 5 % over all).

Speed, memory and time are a device's own, and never put together. Nor are objectives that measure them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from hpo.config.study_config import MEASURED_METRICS
from hpo.outcome import Outcome
from hpo.report.formats import format_bytes, format_metric, format_number, format_seconds

if TYPE_CHECKING:
    from hpo.report.tables import StudyTables

LEVEL = 0.05
"""Of all tests together."""
EQUAL_TIME = "trials have equal time (`max_seconds`), in which a faster device trains more"
FINITE = (Outcome.COMPLETE, Outcome.PRUNED)
TELLING = (*FINITE, Outcome.NONFINITE, Outcome.INCOMPATIBLE)
"""Outcomes that say something of a precision's arithmetic."""


def not_pooled(trials: pd.DataFrame, metrics: Sequence[str], definition: Mapping[str, Any]) -> dict[str, str]:
    """Each precision that ran on several kinds of device, with the reason why these are kept apart; an empty
    one: they are put together.

    Args:
        trials: `StudyTables.trials`.
        metrics: the columns of `trials` with the objectives that are scores.
        definition: the study's.
    """
    ran_itself = trials["effective"].isna() | trials["effective"].eq(trials["precision"])
    telling = trials[trials["outcome"].isin(TELLING) & ran_itself].dropna(subset=["device"])
    groups = {name: rows for name, rows in telling.groupby("precision") if rows["device"].nunique() > 1}
    equal_time = (definition.get("training") or {}).get("max_seconds") is not None
    if equal_time or "max_seconds" in (definition.get("search_space") or {}):
        return dict.fromkeys(
            groups, "trials have equal time (`max_seconds`), in which a faster device trains more"
        )
    level = LEVEL / max(1, sum(_num_tests(rows, metrics) for rows in groups.values()))
    return {name: _why_apart(rows, metrics, level) for name, rows in groups.items()}


def _num_tests(rows: pd.DataFrame, metrics: Sequence[str]) -> int:
    num_devices = rows["device"].nunique()
    return (1 + len(metrics)) * (1 if num_devices == 2 else num_devices)


def _why_apart(rows: pd.DataFrame, metrics: Sequence[str], level: float) -> str:
    from scipy.stats import fisher_exact, mannwhitneyu

    failed = rows[rows["outcome"].eq(Outcome.INCOMPATIBLE)].groupby("device").size()
    if len(failed):
        told = _and(f"{count} on {device}" for device, count in failed.items())
        return f"the compatibility check failed ({told}), which says nothing of another device"
    devices = sorted(rows["device"].unique())
    for device in devices if len(devices) > 2 else devices[:1]:
        here = rows["device"].eq(device)
        others = _and(other for other in devices if other != device)
        sides = (rows[here], rows[~here])
        finite = [int(side["outcome"].isin(FINITE).sum()) for side in sides]
        broken = [len(side) - num for side, num in zip(sides, finite, strict=True)]
        if fisher_exact([finite, broken]).pvalue < level:
            return (
                f"{broken[0]} of {len(sides[0])} trials became not finite on {device}, "
                f"{broken[1]} of {len(sides[1])} on {others}"
            )
        for metric in metrics:
            scores = [pd.to_numeric(side[metric]).dropna() for side in sides]
            if all(map(len, scores)) and mannwhitneyu(*scores).pvalue < level:
                name = metric.removeprefix("objective.")
                low, high = (format_number(one.median()) for one in scores)
                return f"the median {name} is {low} on {device} and {high} on {others}"
    return ""


def pooling(tables: StudyTables) -> list[str]:
    """A sentence for each precision; none where the study ran on one kind of device."""
    sentences = []
    for precision, rows in tables.by_precision.groupby("precision", sort=False):
        ran = rows[rows["device"].isin(tables.devices)]
        counts = [f"{row['trials']} on {row['device']}" for row in ran.to_dict("records")]
        others = [device for device in tables.devices if device not in set(ran["device"])]
        why = tables.not_pooled.get(precision)
        if why:
            sentences.append(f"{precision}: kept apart by device, because {why}.")
        elif why is not None:
            sentences.append(
                f"{precision}: put together ({_and(counts)}); no difference between the devices shows."
            )
        if len(ran) and others:
            here, there = _and(ran["device"]), _and(others)
            sentences.append(f"{precision}: ran on {here} alone, which says nothing of {there}.")
    return sentences if len(tables.devices) > 1 else []


def numbers_by_device(tables: StudyTables) -> pd.DataFrame:
    """A row for each precision and device: outcomes, scores and the compatibility check, as text."""
    scores = [name for name in tables.record.metric_names if name not in MEASURED_METRICS]
    rows = []
    for row in tables.by_precision.to_dict("records"):
        here = tables.trials["precision"].eq(row["precision"]) & tables.trials["device"].eq(row["device"])
        if not here.any():
            continue
        of_group = tables.trials[here]
        telling = int(of_group["outcome"].isin(TELLING).sum())
        finite = int(of_group["outcome"].isin(FINITE).sum())
        verdicts = of_group["compatibility"].dropna().value_counts()
        rows.append(
            {
                "precision": row["precision"],
                "device": row["device"],
                "support": row["support"] or "–",
                "trained": f"{finite} of {telling}",
                **{f"{name}, median": format_metric(name, row[f"median_{name}"]) for name in scores},
                **{f"{name}, best": format_metric(name, row[f"best_{name}"]) for name in scores},
                "compatibility check": ", ".join(f"{num} {name}" for name, num in verdicts.items()) or "–",
                "logits error, at most": format_number(of_group["logits_error"].max()),
                "gradient cosine, at least": format_number(of_group["gradient_cosine"].min()),
            }
        )
    return pd.DataFrame(rows)


def costs_by_device(tables: StudyTables) -> pd.DataFrame:
    """A row for each device and precision: speed, memory and time, as text."""
    summary = tables.by_precision[tables.by_precision["device"].isin(tables.devices)]
    rows = []
    for row in summary.sort_values("device", kind="stable").to_dict("records"):
        cells = {"device": row["device"], "precision": row["precision"]}
        for name, quantity in (
            ("examples/s", "train_examples_per_second"),
            ("tokens/s", "train_tokens_per_second"),
        ):
            cells[f"train {name}"] = spread(row, quantity, format_number)
        cells["trials measured"] = str(row["measured"])
        cells["peak memory"] = spread(row, "peak_memory_bytes", format_bytes)
        for metric in set(tables.record.metric_names) & set(MEASURED_METRICS):
            cells[f"{metric}, best"] = format_metric(metric, row[f"best_{metric}"])
        cells["time"] = format_seconds(row["seconds"])
        cells["wasted"] = format_seconds(row["wasted_seconds"])
        rows.append(cells)
    return pd.DataFrame(rows)


def spread(row: Mapping[str, Any], quantity: str, show: Any) -> str:
    """Median, and in brackets min to max, of a quantity of `StudyTables.by_precision`."""
    low, middle, high = (show(row[f"{quantity}_{name}"]) for name in ("min", "median", "max"))
    return middle if low == high else f"{middle} ({low} to {high})"


def _and(names: Any) -> str:
    return " and ".join(map(str, names))
