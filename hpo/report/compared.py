"""What was compared by `hpo compare`, and what each precision costs and loses: tables for the page, the
dashboard and the terminal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from hpo.compare.settings import differing_settings
from hpo.outcome import Outcome
from hpo.report.formats import format_interval, format_number

SHARE_TITLES = {"underflow": "underflow", "overflow": "overflow", "updates_lost": "updates lost"}


def configuration_table(found: Mapping[str, Any]) -> pd.DataFrame:
    """A row for each configuration: its trial, the questions it is in, and the settings that differ.

    Args:
        found: what a comparison has found, as it is stored.
    """
    rows = found.get("configurations", ())
    names = differing_settings([row["params"] for row in rows])
    return pd.DataFrame(
        {
            "trial": str(row["trial"]),
            "compared": _questions(row),
            **{name: _cell(row["params"].get(name)) for name in names},
        }
        for row in rows
    )


def precision_table(found: Mapping[str, Any]) -> pd.DataFrame:
    """A row for each precision: how many trials trained, speed and memory over fp32's, and numeric telemetry.

    Args:
        found: what a comparison has found, as it is stored.
    """
    costs = {row["precision"]: row for row in found.get("verdicts", ())[::-1] if not row["is_noise_floor"]}
    rows = []
    for row in found.get("precisions", ()):
        numerics, cost = row["numerics"], costs.get(row["precision"], {})
        rows.append(
            {
                "precision": row["precision"],
                "trained": f"{row['outcomes'].get(Outcome.COMPLETE, 0)} of {row['num_trials']}",
                **{name: _cost(cost, f"{name}_ratio") for name in ("speed", "memory")},
                **{title: _share(numerics[name]) for name, title in SHARE_TITLES.items()},
                "skipped steps": format_number(numerics["skipped_steps"]),
            }
        )
    return pd.DataFrame(rows)


def ratio(row: Mapping[str, Any], name: str) -> str:
    """`speed_ratio` or `memory_ratio` of a stored verdict, with its interval where that is stored."""
    return format_interval(row.get(name), row.get(f"{name}_low"), row.get(f"{name}_high"))


def _cost(row: Mapping[str, Any], name: str) -> str:
    return "by device" if len(row.get("devices", ())) > 1 else ratio(row, name)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.3g} %"


def _questions(row: Mapping[str, Any]) -> str:
    tuned = [f"tuned for {', '.join(row['tuned'])}"] if row["tuned"] else []
    return "; ".join(["paired"] * row["paired"] + tuned) or f"in {', '.join(row['precisions'])}"


def _cell(value: Any) -> str:
    return format_number(value) if value is None or isinstance(value, float) else str(value)
