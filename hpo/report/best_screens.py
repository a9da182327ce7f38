"""Text and tables of `hpo best`, `hpo train`, `hpo verify` and of the end of `hpo run`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from hpo.evaluation.detailed import baseline_warnings
from hpo.outcome import TrialResult
from hpo.report.detailed import (
    Detailed,
    evaluations_of,
    metrics_table,
    source_metrics_table,
    task_metrics_table,
)
from hpo.report.formats import format_metric, format_seconds
from hpo.report.screens import best
from hpo.report.status import record_warnings
from hpo.report.tables import StudyTables, precision_table
from hpo.report.terminal import OUTCOME_STYLES, Part, one_line, warning
from hpo.report.trial_precision import shared_formats
from hpo.study.claims.lease import trial_attributes
from hpo.study.reading.study_record import (
    StudyRecord,
    TrialRecord,
    best_trials,
    complete_trials,
    limit_counts,
    lost_weights,
)
from hpo.training.evaluate import Evaluation
from hpo.trial.compat import Compatibility
from hpo.trial.costs import Costs
from hpo.trial.verify import PrecisionCheck


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
    lost = map(" ".join, lost_weights(record))
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


def trial_record(metrics: Sequence[str], params: Mapping[str, Any], result: TrialResult) -> dict[str, Any]:
    values = None if result.values is None else dict(zip(metrics, result.values, strict=True))
    return {"params": params, "values": values, **trial_attributes(result)}


def trial(record: Mapping[str, Any]) -> Iterator[Part]:
    if record["telemetry"].get("metrics"):
        yield "Best evaluation", task_metrics_table(record["telemetry"])
    reason = f": {record['outcome_reason']}" if record["outcome_reason"] else ""
    yield Text.assemble((record["outcome"], OUTCOME_STYLES.get(record["outcome"], "")), reason)
    facts = [item for item in record.items() if item[0].startswith(("fp_precision", "train_", "peak_"))]
    for key, value in [*(record["values"] or {}).items(), *facts]:
        yield f"{key}: {value if isinstance(value, str) else format_metric(key, value)}"


def evaluation(metrics: Sequence[str], one: Evaluation) -> str:
    """Return a line for an evaluation during the trial of `hpo train`."""
    pairs = zip(metrics, one.values, strict=True)
    values = "  ".join(f"{name} {format_metric(name, value)}" for name, value in pairs)
    loss = "" if math.isnan(one.train_loss) else f"  loss {one.train_loss:.4g}"
    return f"step {one.step}  {one.budget_used:4.0%}  {format_seconds(one.seconds)}{loss}  {values}"


def verification(checks: Sequence[PrecisionCheck], device: str, advice: str) -> Iterator[Part]:
    yield Text(device, style="bold")
    yield "", [_precision(check) for check in checks]
    yield Text(
        "Speed and memory against fp32: forward and backward of a micro-batch, the fastest of the repeats.",
        style="dim",
    )
    yield from (f"{check.name}: {check.note}" for check in checks if check.note)
    yield Text(advice, style="bold")


def _precision(check: PrecisionCheck) -> dict[str, str]:
    result = check.compatibility
    return {
        "precision": check.name,
        "support": check.support.level,
        "verdict": result.verdict if result else "",
        **_errors(result),
        "speed": _ratio(result.costs if result else None, "speed_ratio"),
        "memory": _ratio(result.costs if result else None, "memory_ratio"),
    }


def _errors(check: Compatibility | None) -> dict[str, str]:
    measured = check.measurement if check else None
    error = max(measured.logits_relative_error.values(), default=None) if measured else None
    cosine = measured.gradient_cosine if measured else None
    return {
        "logits\nerror": "" if error is None else f"{error:.1e}",
        "gradient\ncosine": "" if cosine is None else f"{cosine:.6f}",
    }


def _ratio(costs: Costs | None, name: str) -> str:
    ratio = getattr(costs, name, None)
    return "" if ratio is None else f"{ratio:.2f}x"
