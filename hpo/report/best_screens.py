"""Text and tables of `hpo best` and of the end of `hpo run`."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rich.text import Text

from hpo.evaluation.detailed import baseline_warnings
from hpo.report.detailed import (
    Detailed,
    evaluations_of,
    metrics_table,
    source_metrics_table,
    task_metrics_table,
)
from hpo.report.screens import best
from hpo.report.status import record_warnings
from hpo.report.tables import StudyTables, precision_table
from hpo.report.terminal import Part, one_line, warning
from hpo.report.trial_precision import shared_formats
from hpo.study.reading.study_record import (
    StudyRecord,
    TrialRecord,
    best_trials,
    complete_trials,
    limit_counts,
    lost_updates,
    lost_weights,
)


def summary(record: StudyRecord) -> Iterator[Part]:
    """Show the table by precision, the best configuration, warnings and the next commands."""
    if any(trial.ended for trial in record.trials):
        yield f"{record.name}: by requested precision", precision_table(StudyTables(record))
        yield from filter(None, [shared_formats(record.trials, record.definition)])
    yield from best(record)
    yield from map(warning, record_warnings(record))
    if complete_trials(record):
        hints = "   ".join(f"hpo {command} {record.name}" for command in ("report", "dashboard", "best"))
        yield Text(f"More about it: {hints}", style="dim")


def best_model(record: StudyRecord, evaluated: str | None, exported: str | None) -> Iterator[Part]:
    """Show the best trials, the metrics of the first on validation and on `evaluated`, and warnings."""
    yield from best(record)
    trials = best_trials(record)
    for trial in trials[:1]:
        evaluations = evaluations_of(trial)
        if "validation" not in trial.detailed:
            yield from _metrics(trial)
        if evaluations:
            yield from detailed(next((one for one in evaluations if one.split == evaluated), evaluations[0]))
    yield from map(warning, model_warnings(record))
    if exported:
        yield f"Trial {trials[0].number} is exported to {exported}."


def best_as_json(record: StudyRecord) -> dict[str, Any]:
    return {
        "study": record.name,
        "trials": [
            {
                "number": trial.number,
                "values": dict(zip(record.metric_names, trial.values or (), strict=True)),
                "params": trial.params,
                "precision": trial.telemetry.get("precision"),
                "metrics": trial.telemetry.get("metrics"),
                "source_metrics": trial.telemetry.get("source_metrics") or {},
                "baseline": trial.telemetry.get("baseline"),
                "detailed": trial.detailed,
            }
            for trial in best_trials(record)
        ],
        "limits": limit_counts(record),
        "comparisons": record.comparisons,
        "warnings": model_warnings(record),
    }


def _metrics(trial: TrialRecord) -> Iterator[Part]:
    if trial.telemetry.get("metrics"):
        yield Text(f"Trial {trial.number} on validation, measured by the search", style="bold")
        yield "", task_metrics_table(trial.telemetry)
        yield "tasks with several sources", source_metrics_table(trial.telemetry)


def detailed(one: Detailed) -> Iterator[Part]:
    """Show the metrics of a detailed evaluation with intervals and warnings; the page has the rest."""
    yield Text("; ".join(filter(None, (one.title, one.thresholds))), style="bold")
    yield "", [{name: one_line(cell) for name, cell in row.items()} for row in metrics_table(one)]
    yield from map(warning, one.warnings)


def model_warnings(record: StudyRecord) -> list[str]:
    of_best = replace(record, trials=best_trials(record))
    lost = map(" ".join, (*lost_weights(record), *lost_updates(of_best)))
    return [*constant_warnings(record), *split_warnings(record), *lost]


def constant_warnings(record: StudyRecord) -> list[str]:
    """Warn of best trials no better on validation than the best constant prediction."""
    warnings = []
    for trial in best_trials(record):
        baseline = trial.telemetry.get("baseline") or {}
        for metric, value in zip(record.metric_names, trial.values or (), strict=True):
            texts = baseline_warnings(metric, value, baseline.get(metric))
            warnings += [f"Trial {trial.number} on validation: {text}" for text in texts]
    return warnings


def split_warnings(record: StudyRecord) -> list[str]:
    """Warn if `hpo compare` has chosen between precisions on the test split."""
    names = [
        row["name"]
        for comparison in record.comparisons.values()
        for row in comparison.get("verdicts", ())
        if comparison.get("split") == "test" and row["num_runs"]
    ]
    if not names:
        return []
    used = f"`hpo compare` chose between fp32 and {', '.join(names)} on the test split"
    return [f"{used}: the test score of the chosen one is a little too good."]
