"""Limits that trials meet or break, and trials that are no better than a constant prediction, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpo.config.limits import Limit, violation
from hpo.study.reading.study_record import best_trials, limit_counts, nearest_told

if TYPE_CHECKING:
    from hpo.study.reading.study_record import StudyRecord, TrialRecord


def limits_told(record: StudyRecord) -> list[str]:
    """How many trials meet the limits and what breaks each; then the nearest where none does. []: it has no
    limits, or no trial has come to one."""
    counts = limit_counts(record)
    if not counts or not (counts["complete"] or counts["ended_early"]):
        return []
    broken = ", ".join(
        f"{metric} {Limit.model_validate(record.definition['constraints'][metric])} by {count}"
        for metric, count in counts["broken"].items()
        if count
    )
    met = f"{counts['met']} of {counts['complete']} complete trials meet the limits of the study"
    early = f"{counts['ended_early']} ended early at one" if counts["ended_early"] else ""
    said = f"{'; '.join(filter(None, (met, early)))}." + (f" Broken: {broken}." if broken else "")
    return [said, *filter(None, [nearest_told(record)])]


def no_better_than_constant(record: StudyRecord) -> list[str]:
    """Warnings about the best trials that are no better on validation than the best constant prediction."""
    from hpo.evaluation.cautions import not_better  # SciPy

    warnings = []
    for trial in best_trials(record):
        baseline = trial.telemetry.get("baseline") or {}
        for metric, value in zip(record.metric_names, trial.values or (), strict=True):
            told = not_better(metric, value, baseline.get(metric))
            warnings += [f"Trial {trial.number} on validation: {text}" for text in told]
    return warnings


def best_or_nearest(trial: TrialRecord) -> str:
    return "nearest" if violation(trial.constraints) else "best"
