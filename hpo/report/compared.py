"""What was compared: the configurations of `hpo compare`, for the page, the dashboard and the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from hpo.compare.settings import differing_settings
from hpo.report.formats import format_number


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


def _questions(row: Mapping[str, Any]) -> str:
    tuned = [f"tuned for {', '.join(row['tuned'])}"] if row["tuned"] else []
    return "; ".join(["paired"] * row["paired"] + tuned) or f"in {', '.join(row['precisions'])}"


def _cell(value: Any) -> str:
    return format_number(value) if value is None or isinstance(value, float) else str(value)
