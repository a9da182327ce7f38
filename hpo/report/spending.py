"""What a study with a budget has spent, and on what."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from hpo.config.sections import MAX_TRIALS, BudgetConfig
from hpo.outcome import concerns_precision
from hpo.precision.table import PRECISION
from hpo.report.formats import format_seconds
from hpo.report.outlook import Outlook, stored_outlook
from hpo.study.reading.study_record import StudyRecord, is_over

WORTH_A_WORD = 0.02
"""Share of a budget that may stay unspent without a reason."""


def spending(record: StudyRecord, ahead: Outlook | None = None) -> dict[str, Any] | None:
    """Return the device-hours that were spent and on what, and those that are left; None: no budget.

    If the study has ended and some are left, `unspent` says why.
    """
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
        "unspent": _why_unspent(record, hours - spent, ahead or stored_outlook(record)),
    }


def _why_unspent(record: StudyRecord, hours_left: float, ahead: Outlook) -> str:
    """Why a study that has ended did not spend its budget; empty: it goes on, or hardly anything is left."""
    if not is_over(record) or hours_left <= WORTH_A_WORD * record.definition["budget"]["hours"]:
        return ""
    left = f"{format_seconds(3600 * hours_left)} of device time are not spent"
    if record.state == "cancelled":
        return f"{left}, because the study was cancelled."
    if record.counts["done"] >= record.definition.get("n_trials", MAX_TRIALS):
        return (
            f"{left}, because all of the study's {record.counts['done']} trials have ended. Raise `n_trials`."
        )
    if ahead.cost is None:
        return f"{left}, because no trial has trained."
    need = (
        f"one more trial, with the continuation of the best, takes about {format_seconds(ahead.next_seconds)}"
    )
    return f"{left}, because {need}."


def spending_told(record: StudyRecord) -> list[str]:
    """Return the same in sentences; [] without a budget."""
    if (spent := spending(record)) is None:
        return []
    share = spent["spent_hours"] / spent["hours"]
    told = f"{spent['spent_hours']:.3g} of {spent['hours']:.3g} device-hours are spent ({share:.0%})."
    for part in ("by_precision", "by_outcome"):
        hours_of = ", ".join(f"{name} {hours:.3g} h" for name, hours in spent[part].items())
        told += f" {part.replace('_', ' ').capitalize()}: {hours_of}." if hours_of else ""
    return [told, *filter(None, [spent["unspent"]])]
