"""Sentences about a study, alike in the terminal, the page and the dashboard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpo.config.limits import Limit, violation
from hpo.config.sampler_config import PrunerConfig
from hpo.extensions import has_own_loop, own_loop_of
from hpo.json_safe import is_number
from hpo.report.formats import format_metric, format_number, format_percent, plural
from hpo.report.status import budget_status
from hpo.study.reading.study_record import (
    StudyRecord,
    TrialRecord,
    limit_counts,
    nearest_message,
)

SCORE = "the mean of the primary metrics of all tasks"
BASELINE = "best constant"
"""Column of the best constant predictions."""


def objectives_text(metrics: Sequence[str], directions: Sequence[str]) -> str:
    return ", ".join(map(" ".join, zip(directions, metrics, strict=True)))


def score_message(record: StudyRecord) -> str:
    with own_loop_of(record.definition):
        return f"`score` is {SCORE}." if "score" in record.metric_names and not has_own_loop() else ""


def objective_values(record: StudyRecord, trial: TrialRecord) -> dict[str, str]:
    """Return the values of the objectives, each with its best constant prediction if known."""
    baseline = trial.telemetry.get("baseline") or {}
    pairs = zip(record.metric_names, trial.values or (), strict=True)
    return {
        metric: with_baseline(format_metric(metric, value), baseline.get(metric)) for metric, value in pairs
    }


def with_baseline(value: str, baseline: Any) -> str:
    return f"{value} (best constant prediction {format_number(baseline)})" if is_number(baseline) else value


def rank_name(trial: TrialRecord) -> str:
    return "nearest" if violation(trial.constraints) else "best"


def resume_message(study: str) -> str:
    """Name the commands to continue a paused or cancelled study."""
    return f"To continue it: hpo resume {study}, then hpo worker {study}"


def progress_message(counts: Mapping[str, int], *, has_budget: bool = False) -> str:
    """Describe the progress of a study. A budget may end it with fewer trials."""
    paused = f", {counts['paused']} paused" if counts.get("paused") else ""
    at_most = "at most " if has_budget else ""
    return f"{counts['done']} of {at_most}{sum(counts.values())} trials ended{paused}"


def paused_message(record: StudyRecord) -> str:
    """Tell how many trials are paused and when they continue; empty if none is paused."""
    paused = record.counts.get("paused", 0)
    factor = PrunerConfig.model_validate(record.definition.get("pruner", {})).options.get("reduction_factor")
    if not paused or not factor:
        return ""
    return (
        f"{plural(paused, 'trial')} paused. The best 1 in {factor} at each rung continue. More continue when "
        "no new trial is left."
    )


def limit_messages(record: StudyRecord) -> list[str]:
    """Count the trials within the limits, and name the nearest trial if there is none."""
    counts = limit_counts(record)
    if not counts or not (counts["complete"] or counts["ended_early"]):
        return []
    parts = [f"{counts['met']} of {plural(counts['complete'], 'complete trial')} within all limits."]
    if counts["ended_early"]:
        parts.append(f"Ended early over a limit: {plural(counts['ended_early'], 'trial')}.")
    for metric, count in counts["broken"].items():
        limit = Limit.model_validate(record.definition["constraints"][metric])
        parts += [f"Not within `{metric} {limit}`: {plural(count, 'trial')}."] if count else []
    return [" ".join(parts), *filter(None, [nearest_message(record)])]


def budget_messages(record: StudyRecord) -> list[str]:
    """Describe the spent part of the budget; empty without a budget."""
    budget = budget_status(record)
    if budget is None:
        return []
    share = format_percent(budget["spent_hours"] / budget["hours"])
    text = f"{budget['spent_hours']:.3g} of {budget['hours']:.3g} device-hours spent ({share})."
    for part in ("by_precision", "by_outcome"):
        hours = ", ".join(f"{name} {hours:.3g} h" for name, hours in budget[part].items())
        text += f" {part.replace('_', ' ').capitalize()}: {hours}." if hours else ""
    return [text, *filter(None, [budget["unspent"]])]
