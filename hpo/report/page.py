"""The HTML page of the report. It opens offline, since plotly.js is inside, and its policy forbids it to load
anything. Text of users and trials is escaped.
"""

from __future__ import annotations

import base64
import gzip
import json
import shlex
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pandas as pd
from markupsafe import Markup, escape

from hpo.outcome import Outcome
from hpo.report.caveats import caveats
from hpo.report.detailed import evaluations_of, objectives
from hpo.report.detailed_page import HEADING, evaluation
from hpo.report.detailed_tables import detailed_evaluations
from hpo.report.figures import Chart, plotly_figure
from hpo.report.formats import (
    format_bytes,
    format_cell,
    format_metric,
    format_number,
    format_seconds,
    format_value,
    objective_values,
    objectives_text,
    precision_facts,
    score_explained,
)
from hpo.report.limits import best_or_nearest, limits_told
from hpo.report.number_formats import precision_that_ran, ran_otherwise, unusual_formats
from hpo.report.spending import spending_told
from hpo.report.status import paused_told
from hpo.report.tables import (
    StudyTables,
    brief_summary,
    objective_column,
    searched_parameters,
    task_metrics_text,
)
from hpo.report.templates import fill
from hpo.report.verdicts import comparison_tables, details, sentences

if TYPE_CHECKING:
    from hpo.study.reading.study_record import StudyRecord, TrialRecord


_FIRST = ("objectives", "history", "metric_throughput")
"""What the keys of the charts on the first screen begin with; then those of precision."""
_OF_PRECISION = "precision_metric"


def report_html(tables: StudyTables, charts: list[Chart], study_file: str | None = None) -> str:
    """The page; `study_file` is the study in the command that trains a trial again."""
    record, cards = tables.record, [_cards(tables, trial) for trial in tables.best]
    outcomes = Counter(tables.trials["outcome"]).most_common()
    plots = [(chart, plot(chart)) for chart in charts]
    not_complete = tables.trials[tables.trials["outcome"].ne(Outcome.COMPLETE)]
    reasons = not_complete.assign(time=not_complete["seconds"].map(format_seconds))
    return render(
        "report.html.j2",
        name=record.name,
        goals=objectives_text(record.metric_names, record.directions),
        explained=score_explained(record.metric_names, record.definition),
        facts=_facts(tables),
        sentences=sentences(tables),
        compared=[
            (details(comparison), comparison_tables(comparison))
            for comparison in tables.record.comparisons.values()
        ],
        num_objectives=len(tables.record.metric_names),
        num_complete=len(tables.complete),
        outcomes=", ".join(f"{count} {outcome}" for outcome, count in outcomes),
        cards=cards,
        front=pd.DataFrame([{"trial": ""} | card for card in cards]).fillna("–"),
        best=[_trial(tables.record, trial, study_file) for trial in tables.best],
        study_file=study_file,
        detailed_heading=HEADING,
        detailed=[evaluation(one) for one in detailed_evaluations(tables)],
        evaluate_command=_evaluate_command(tables, study_file),
        caveats=caveats(tables),
        brief=brief_summary(tables),
        shared_formats=tables.formats.text(),
        verdict_charts=[drawn for drawn in plots if drawn[0].key.startswith("verdicts")],
        first_charts=[drawn for drawn in plots if drawn[0].key.startswith(_FIRST)],
        precision_charts=[drawn for drawn in plots if drawn[0].key.startswith(_OF_PRECISION)],
        search_charts=[
            drawn for drawn in plots if not drawn[0].key.startswith(("verdicts", *_FIRST, _OF_PRECISION))
        ],
        reasons=reasons[["number", "precision", "outcome", "time", "reason"]],
        trials=_all_trials(tables),
    )


def _evaluate_command(tables: StudyTables, study_file: str | None) -> str | None:
    """That which evaluates the best trial in detail; None where the study keeps no checkpoint."""
    record = tables.record
    if not tables.best or (record.definition.get("checkpoint") or {}).get("top_k") == 0:
        return None
    splits = (tables.best[0].telemetry.get("data") or {}).get("splits", ())
    split = "test" if "test" in splits else "validation"
    return f"hpo best {shlex.quote(study_file or record.name)} --evaluate {split}"


def _facts(tables: StudyTables) -> list[str]:
    record = tables.record
    environments = sorted({_environment(trial) for trial in record.trials} - {""})
    return [
        f"{len(record.trials)} trials, {len(tables.complete)} complete.",
        *limits_told(record),
        *spending_told(record),
        f"{record.counts['done']} of the {sum(record.counts.values())} planned trials have ended.",
        *filter(None, [paused_told(record)]),
        f"Time in trials: {format_seconds(float(tables.trials['seconds'].sum()))}.",
        f"Ran on: {'; '.join(environments) or 'not known'}.",
        f"Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.",
    ]


def _environment(trial: TrialRecord) -> str:
    device = trial.telemetry.get("device")
    if not device:
        return ""
    parts = [device["name"]]
    if device["type"] == "cpu" and (threads := device.get("num_threads")):
        parts.append(f"{threads} thread{'s' if threads > 1 else ''}")
    parts += [
        f"{name} {device[name]}" for name in ("torch", "transformers", "cuda", "rocm") if device.get(name)
    ]
    return ", ".join(parts)


def _cards(tables: StudyTables, trial: TrialRecord) -> dict[str, str]:
    record = tables.record
    throughput = trial.telemetry.get("throughput") or {}
    cards = objective_values(record, trial)
    for one in evaluations_of(trial)[:1]:  # the split that says most
        # The interval may be on its own line.
        values = objectives(one, record.metric_names).items()
        cards |= {f"{name} on {one.split}": text.replace("\u00a0", " ", 1) for name, text in values}
    cards["trial"] = str(trial.number)
    if best_or_nearest(trial) == "nearest":
        cards["limits"] = "not met: it is the nearest"
    cards["precision that ran"] = precision_that_ran(trial) or "not known"
    for name, value in unusual_formats(trial, record.definition).items():
        cards[name.replace("_", " ")] = value + ran_otherwise([trial], name, value)
    if "train_examples_per_second" not in cards:
        cards["train examples/s"] = format_number(throughput.get("train_examples_per_second"))
    energy = throughput.get("train_joules_per_example")
    if energy is not None and "train_joules_per_example" not in cards:
        cards["train joules/example"] = format_number(energy)
    if "peak_memory_bytes" not in cards:
        cards["peak memory"] = format_bytes(trial.telemetry.get("peak_memory_bytes"))
    if len(tables.devices) > 1:
        cards["device"] = tables.trials.set_index("number")["device"].fillna("not known")[trial.number]
    return cards | {"time": format_seconds(trial.active_seconds)}


def _trial(record: StudyRecord, trial: TrialRecord, study_file: str | None) -> dict[str, Any]:
    searched = {name: format_value(value) for name, value in trial.params.items()}
    # A None stands for a default that is decided elsewhere.
    fixed = {
        name: format_value(value)
        for name, value in record.definition.get("training", {}).items()
        if value is not None and name not in trial.params
    }
    arguments = [f"--param {shlex.quote(f'{name}={value}')}" for name, value in searched.items()]
    return {
        "number": trial.number,
        "precision": precision_facts(trial),
        "searched": pd.DataFrame(searched.items(), columns=["searched", "value"]),
        "fixed": pd.DataFrame(fixed.items(), columns=["fixed", "value"]),
        "command": [f"hpo train {shlex.quote(study_file or 'STUDY.yaml')}", *arguments],
        "metrics": task_metrics_text(trial.telemetry),
    }


def render(template: str, **values: Any) -> str:
    """A page from a template of this folder, with plotly.js inside."""
    from plotly.offline import get_plotlyjs

    packed = gzip.compress(get_plotlyjs().encode(), compresslevel=6, mtime=0)
    return fill(template, plotly=Markup(base64.b64encode(packed).decode()), **values)


def plot(chart: Chart) -> Markup:
    """The chart's place in a page that `render` makes, and what is drawn there."""
    figure = json.loads(plotly_figure(chart, standalone=False).to_json())
    config = {
        "responsive": True,
        "displaylogo": False,
        "modeBarButtons": [["toImage"]],
        "toImageButtonOptions": {"format": "svg", "filename": chart.key},
    }
    content = {"id": chart.key, "data": figure["data"], "layout": figure["layout"], "config": config}
    drawn = json.dumps(content).replace("<", "\\u003c")  # nothing in it ends the script
    return Markup(
        f'<div id="{escape(chart.key)}" class="plotly-graph-div" style="height:{chart.height}px"></div>'
        f'<script type="application/json" class="chart-data">{drawn}</script>'
    )


def _all_trials(tables: StudyTables) -> pd.DataFrame:
    trials = tables.trials
    table = trials[["number", "outcome", "precision"]].assign(effective=trials["effective"].fillna("–"))
    for metric in tables.record.metric_names:
        table[metric] = [format_metric(metric, value) for value in trials[objective_column(metric)]]
    if len(tables.devices) > 1:
        table["device"] = trials["device"].fillna("–")
    table["examples/s"] = trials["train_examples_per_second"].map(format_number)
    if trials["train_joules_per_example"].notna().any():
        table["joules/example"] = trials["train_joules_per_example"].map(format_number)
    table["peak memory"] = trials["peak_memory_bytes"].map(format_bytes)
    table["time"] = trials["seconds"].map(format_seconds)
    for name in searched_parameters(trials):
        table[name] = trials[f"param.{name}"].map(format_cell)
    return table
