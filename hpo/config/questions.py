"""The questions that `hpo compare` answers. The command line reads them without pydantic."""

from __future__ import annotations

from typing import Literal

MOST_SEEDS = 200
"""No comparison has more of a configuration."""
CONFIGURATIONS: Literal["configurations"] = "configurations"
Question = Literal["precisions", "base_precision", "optimizer_state", "configurations"]
