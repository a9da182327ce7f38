"""Limits that trials meet or break, and trials that are no better than a constant prediction, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpo.config.limits import Limit, violation
from hpo.study.reading.study_record import best_trials, limit_counts, nearest_message

if TYPE_CHECKING:
    from hpo.study.reading.study_record import StudyRecord, TrialRecord


def limits_told(record: StudyRecord) -> list[str]:
    """Say how many trials meet the limits, what breaks each, and the nearest trial if none meets them.

    []: the study has no limits, or no trial has come to one.
    """
    counts = limit_counts(record)
    if not counts or not (counts["complete"] or counts["ended_early"]):
        return []
    said = []
    if complete := counts["complete"]:
        meet = "meets" if counts["met"] == 1 else "meet"
        said.append(f"{counts['met']} of {_trials(complete, 'complete ')} {meet} all limits of the study.")
    if early := counts["ended_early"]:
        said.append(f"{_trials(early)} ended early because {'it' if early == 1 else 'they'} broke a limit.")
    for metric, count in counts["broken"].items():
        limit = Limit.model_validate(record.definition["constraints"][metric])
        said += [f"`{metric} {limit}` is broken by {_trials(count)}."] if count else []
    return [" ".join(said), *filter(None, [nearest_message(record)])]


def _trials(count: int, kind: str = "") -> str:
    return f"{count} {kind}trial{'' if count == 1 else 's'}"


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
