"""What a study with a budget has spent, and on what."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from hpo.config.budget import BudgetConfig
from hpo.outcome import concerns_precision
from hpo.precision.table import PRECISION
from hpo.study.reading.study_record import StudyRecord


def spending(record: StudyRecord) -> dict[str, Any] | None:
    """The device-hours that were spent and on what, and those that are left; None: no budget."""
    given = record.definition.get("budget")
    if given is None:
        return None
    budget = BudgetConfig.model_validate(given)
    of_trial = {trial.number: trial for trial in record.trials}
    by_precision: dict[str, float] = defaultdict(float)
    by_outcome: dict[str, float] = defaultdict(float)
    for number, seconds in record.spent.items():
        if trial := of_trial.get(number):
            by_outcome[trial.outcome] += seconds / 3600
            if not concerns_precision(trial.outcome, trial.telemetry):
                continue
            asked = trial.telemetry.get("precision", {}).get("requested") or trial.params.get(PRECISION)
            by_precision[asked or "not known yet"] += seconds / 3600
    spent, hours = sum(record.spent.values()) / 3600, budget.hours
    return {
        "hours": hours,
        "spent_hours": spent,
        "left_hours": max(0.0, hours - spent),
        "by_precision": dict(by_precision),
        "by_outcome": dict(by_outcome),
    }


def spending_told(record: StudyRecord) -> list[str]:
    """The same in a sentence; [] without a budget."""
    if (spent := spending(record)) is None:
        return []
    share = spent["spent_hours"] / spent["hours"]
    parts = ("by_precision", "by_outcome")
    by = "; ".join(", ".join(f"{name} {hours:.3g}" for name, hours in spent[part].items()) for part in parts)
    of = f"{spent['spent_hours']:.3g} of {spent['hours']:.3g} device-hours, {share:.0%}"
    return [f"Spent {of}{f': {by}' if record.spent else ''}."]
