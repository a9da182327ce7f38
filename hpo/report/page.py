"""The report's HTML page, drawn by `report.html.j2`.

It opens offline: plotly.js is inside, and the page's own policy forbids it to load anything. Text of users
and trials (names, parameters, error messages) is escaped.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from hpo.report.caveats import caveats
from hpo.report.figures import Chart, plotly_figure
from hpo.report.formats import (
    format_bytes,
    format_metric,
    format_number,
    format_seconds,
    format_value,
    objective_values,
    precision_facts,
)
from hpo.report.tables import (
    objective_column,
    precision_comparison,
    reasons_table,
    searched_parameters,
    task_metrics_table,
    trial_seconds,
    trials_table,
)
from hpo.study.study_record import best_trials, complete_trials

if TYPE_CHECKING:
    from hpo.study.study_record import StudyRecord, TrialRecord


def report_html(record: StudyRecord, charts: list[Chart], study_file: str | None = None) -> str:
    """The page. Sections without data say so in a sentence.

    `study_file` is the study in the command that trains a trial again: STUDY as `hpo train` takes it.
    """
    from plotly.offline import get_plotlyjs

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["inline"] = _inline
    best = best_trials(record)
    counts = Counter(trial.outcome for trial in record.trials)
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    reasons = reasons_table(record)
    reasons["time"] = reasons["seconds"].map(format_seconds)
    return templates.get_template("report.html.j2").render(
        name=record.name,
        plotly=Markup(get_plotlyjs()),
        facts=_facts(record),
        num_objectives=len(record.metric_names),
        num_complete=len(complete_trials(record)),
        outcomes=outcomes,
        cards=_cards(record, best[0]) if best else {},
        front=pd.DataFrame([{"trial": ""} | _cards(record, trial) for trial in best]),
        best=[_trial(record, trial, study_file) for trial in best],
        study_file=study_file,
        caveats=caveats(record),
        precisions=precision_comparison(record),
        charts=[(chart, None if chart.absent else _plot(chart)) for chart in charts],
        reasons=reasons[["number", "precision", "outcome", "time", "reason"]],
        trials=_all_trials(record),
    )


def _facts(record: StudyRecord) -> list[str]:
    """The lines under the name of the study."""
    goals = ", ".join(map(" ".join, zip(record.directions, record.metric_names, strict=True)))
    seconds = pd.to_numeric(trials_table(record)["seconds"]).sum()
    environments = {text for trial in record.trials if (text := _environment(trial))}
    return [
        f"{len(record.trials)} trials, {len(complete_trials(record))} complete. Objective: {goals}.",
        f"Planned: {sum(record.slots.values())}, of which {record.slots.get('done', 0)} are done.",
        f"Time in trials: {format_seconds(float(seconds))}.",
        f"Ran on: {'; '.join(sorted(environments)) or 'not known'}.",
        f"Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.",
    ]


def _environment(trial: TrialRecord) -> str:
    device = trial.telemetry.get("device") or {}
    if not device.get("name"):
        return ""
    parts = [str(device["name"])]
    if device.get("type") == "cpu" and (threads := device.get("num_threads")):
        parts.append(f"{threads} thread{'s' if threads > 1 else ''}")
    parts += [f"{name} {device[name]}" for name in ("torch", "transformers", "cuda") if device.get(name)]
    return ", ".join(parts)


def _cards(record: StudyRecord, trial: TrialRecord) -> dict[str, str]:
    """The headline of one of the best trials."""
    throughput = trial.telemetry.get("throughput") or {}
    precision = trial.telemetry.get("precision") or {}
    cards = objective_values(record, trial) | {"trial": str(trial.number)}
    cards["precision that ran"] = precision.get("effective") or "not known"
    if "train_examples_per_second" not in cards:
        cards["train examples/s"] = format_number(throughput.get("train_examples_per_second"))
    if "peak_memory_bytes" not in cards:
        cards["peak memory"] = format_bytes(trial.telemetry.get("peak_memory_bytes"))
    return cards | {"time": format_seconds(trial_seconds(trial))}


def _trial(record: StudyRecord, trial: TrialRecord, study_file: str | None) -> dict[str, Any]:
    """One of the best trials below its headline."""
    searched = {name: format_value(value) for name, value in trial.params.items()}
    training = record.definition.get("training") or {}
    # A None stands for a default that is decided elsewhere.
    fixed = {
        name: format_value(value)
        for name, value in training.items()
        if value is not None and name not in trial.params
    }
    arguments = [f"--param {shlex.quote(f'{name}={value}')}" for name, value in searched.items()]
    metrics = task_metrics_table(trial)
    return {
        "number": trial.number,
        "precision": precision_facts(trial),
        "searched": pd.DataFrame(searched.items(), columns=["searched", "value"]),
        "fixed": pd.DataFrame(fixed.items(), columns=["fixed", "value"]),
        "command": [f"hpo train {shlex.quote(study_file or 'STUDY.yaml')}", *arguments],
        "metrics": metrics.assign(value=metrics["value"].map(format_number)),
    }


def _plot(chart: Chart) -> Markup:
    html = plotly_figure(chart, standalone=False).to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id=chart.key,
        default_height=f"{chart.height}px",
        config={"responsive": True, "displaylogo": False, "displayModeBar": False},
    )
    return Markup(html)


def _all_trials(record: StudyRecord) -> pd.DataFrame:
    trials = trials_table(record)
    table = trials[["number", "outcome", "precision"]].copy()
    table["effective"] = trials["effective"].fillna("–")
    for metric in record.metric_names:
        table[metric] = [format_metric(metric, value) for value in trials[objective_column(metric)]]
    table["examples/s"] = trials["train_examples_per_second"].map(format_number)
    table["peak memory"] = trials["peak_memory_bytes"].map(format_bytes)
    table["time"] = trials["seconds"].map(format_seconds)
    for name in searched_parameters(trials):
        table[name] = trials[f"param.{name}"].map(_cell)
    return table


def _cell(value: Any) -> str:
    return format_number(value) if value is None or isinstance(value, float) else str(value)


def _inline(text: Any) -> Markup:
    """Escaped, then `code` between backticks, as messages of this package write it."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(str(text)))))
