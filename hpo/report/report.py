"""A study as one HTML file and CSV tables in base units (seconds, bytes).

The page opens offline, since plotly.js is inside, and its policy forbids it to load anything. Text of users
and trials is escaped.
"""

import base64
import gzip
import json
import os
import re
import shlex
from collections import Counter
from datetime import UTC, datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from hpo.collector import collector_paused
from hpo.errors import RunError
from hpo.outcome import Outcome
from hpo.report.caveats import caveats
from hpo.report.charts import Chart, all_charts
from hpo.report.detailed import HEADING, evaluation, evaluations_of, objectives, task_metrics_table
from hpo.report.formats import (
    MISSING,
    format_bytes,
    format_cell,
    format_metric,
    format_number,
    format_seconds,
    format_value,
    plural,
)
from hpo.report.importances import importance_notes
from hpo.report.status import (
    budget_messages,
    limit_messages,
    objective_values,
    objectives_text,
    paused_message,
    progress_message,
    rank_name,
    score_message,
)
from hpo.report.tables import UNKNOWN, StudyTables, objective_column, precision_table, searched_parameters
from hpo.report.terminal import Rows
from hpo.report.trial_precision import effective_precision, precision_facts, shared_formats, unusual_formats
from hpo.report.verdicts import (
    VERDICT_COLUMNS,
    comparison_tables,
    details,
    recommendations,
    verdict_table,
)
from hpo.study.reading.study_record import StudyRecord, TrialRecord

_FIRST = ("objectives", "history", "metric_throughput")
"""Keys of the charts on the first screen begin with these."""


def write_report(record: StudyRecord, out_dir: Path, study_file: str | None = None) -> Path:
    """Write the report into `out_dir`, over an earlier one; return the HTML file. Raises RunError."""
    tables = StudyTables(record)
    with collector_paused():
        verdicts = [row for result in record.comparisons.values() for row in verdict_table(result)]
        frames = {
            "precision": tables.by_precision,
            "trials": tables.trials,
            "evaluations": tables.evaluations,
            "verdicts": pd.DataFrame(verdicts, columns=None if verdicts else VERDICT_COLUMNS),
        }
        files = {f"tables/{name}.csv": frame.to_csv(index=False) for name, frame in frames.items()}
        files["report.html"] = report_html(tables, study_file)
    try:
        for name, text in files.items():
            (out_dir / name).parent.mkdir(parents=True, exist_ok=True)
            _write_whole(out_dir / name, text.encode())
    except OSError as error:
        raise RunError(
            f"the report could not be written to {out_dir}: {error.strerror or error}. "
            "Free some space or name another folder."
        ) from error
    return out_dir / "report.html"


def _write_whole(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def report_html(tables: StudyTables, study_file: str | None = None) -> str:
    record = tables.record
    cards = [_cards(tables, trial) for trial in tables.best]
    plots = [(chart, _plot(chart)) for chart in all_charts(tables)]
    sections = {"verdict": ("verdicts",), "first": _FIRST, "settings": ("importances", "parallel")}
    sections |= {"slices": ("precision_metric", "slice")}
    charts: dict[str, list[Any]] = {
        name: [one for one in plots if one[0].key.startswith(keys)] for name, keys in sections.items()
    }
    charts["search"] = [one for one in plots if not any(one in group for group in charts.values())]
    outcomes = Counter(tables.trials["outcome"])
    incomplete = tables.trials[tables.trials["outcome"].ne(Outcome.COMPLETE)]
    reasons = incomplete.assign(time=incomplete["seconds"].map(format_seconds))
    return _rendered(
        name=record.name,
        goals=objectives_text(record.metric_names, record.directions),
        explained=score_message(record),
        facts=_facts(tables),
        recommendations=recommendations(record),
        compared=[(details(one), comparison_tables(one)) for one in record.comparisons.values()],
        charts=charts,
        importance_notes=[*importance_notes(tables)],
        num_objectives=len(record.metric_names),
        num_complete=len(tables.complete),
        num_met=int(tables.complete["meets_limits"].eq(True).sum()),
        outcomes=", ".join(f"{count} {name}" for name, count in outcomes.most_common()),
        cards=cards,
        front=_aligned(cards),
        best=[_trial(record, trial, study_file) for trial in tables.best],
        study_file=study_file,
        detailed_heading=HEADING,
        detailed=[evaluation(one) for trial in tables.best for one in evaluations_of(trial)],
        evaluate_command=_evaluate_command(tables, study_file),
        caveats=caveats(tables),
        by_precision=precision_table(tables),
        shared_formats=shared_formats(record.trials, record.definition),
        reasons=reasons[["number", "precision", "outcome", "time", "reason"]].to_dict("records"),
        trials=_all_trials(tables),
    )


def _rendered(**values: Any) -> str:
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["inline"] = lambda value: _inline(str(value))
    return templates.get_template("report.html.j2").render(**values, plotly=_packed_plotly())


@cache
def _packed_plotly() -> Markup:
    packed = gzip.compress(get_plotlyjs().encode(), compresslevel=6, mtime=0)
    return Markup(base64.b64encode(packed).decode())


@lru_cache(maxsize=2**16)
def _inline(text: str) -> Markup:
    escaped = escape(text)
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escaped))) if "`" in text else escaped


def _plot(chart: Chart) -> Markup:
    figure = json.loads(chart.figure.to_json())
    config = {
        "responsive": True,
        "displaylogo": False,
        "modeBarButtons": [["toImage"]],
        "toImageButtonOptions": {"format": "svg", "filename": chart.key},
    }
    content = {"id": chart.key, "data": figure["data"], "layout": figure["layout"], "config": config}
    drawn = json.dumps(content).replace("<", "\\u003c")  # nothing in it ends the script
    height = figure["layout"]["height"]
    return Markup(
        f'<div id="{escape(chart.key)}" class="plotly-graph-div" style="height:{height}px"></div>'
        f'<script type="application/json" class="chart-data">{drawn}</script>'
    )


def _evaluate_command(tables: StudyTables, study_file: str | None) -> str | None:
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
        f"{plural(len(record.trials), 'trial')}, {len(tables.complete)} complete.",
        *limit_messages(record),
        *budget_messages(record),
        f"{progress_message(record.counts, has_budget=record.definition.get('budget') is not None)}.",
        *filter(None, [paused_message(record)]),
        f"Time in trials: {format_seconds(float(tables.trials['seconds'].sum()))}.",
        f"Ran on: {'; '.join(environments) or UNKNOWN}.",
        f"Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.",
    ]


def _environment(trial: TrialRecord) -> str:
    device = trial.telemetry.get("device")
    if not device:
        return ""
    threads = device.get("num_threads") if device["type"] == "cpu" else None
    versions = [
        f"{name} {device[name]}" for name in ("torch", "transformers", "cuda", "rocm") if device.get(name)
    ]
    return ", ".join([device["name"], *([plural(threads, "thread")] if threads else []), *versions])


def _cards(tables: StudyTables, trial: TrialRecord) -> dict[str, str]:
    record, throughput = tables.record, trial.telemetry.get("throughput") or {}
    cards = objective_values(record, trial)
    for one in evaluations_of(trial)[:1]:  # the split that says most
        # The interval may be on its own line.
        values = objectives(one, record.metric_names).items()
        cards |= {f"{name} on {one.split}": text.replace("\u00a0", " ", 1) for name, text in values}
    cards["trial"] = str(trial.number)
    if rank_name(trial) == "nearest":
        cards["limits"] = "not met: it is the nearest"
    cards["effective precision"] = effective_precision(trial) or UNKNOWN
    formats = unusual_formats(trial, record.definition)
    cards |= {name.replace("_", " "): value for name, value in formats.items()}
    if "train_examples_per_second" not in cards:
        is_busy = (trial.telemetry.get("device_time") or {}).get("busy") is True
        cards["train examples/s"] = _speed(throughput.get("train_examples_per_second"), busy=is_busy)
    energy = throughput.get("train_joules_per_example")
    if energy is not None and "train_joules_per_example" not in cards:
        cards["train joules/example"] = format_number(energy)
    if "peak_memory_bytes" not in cards:
        cards["peak memory"] = format_bytes(trial.telemetry.get("peak_memory_bytes"))
    if len(tables.devices) > 1:
        cards["device"] = tables.trials.set_index("number")["device"].fillna(UNKNOWN)[trial.number]
    return cards | {"time": format_seconds(trial.active_seconds)}


def _speed(value: Any, *, busy: bool) -> str:
    return format_number(value) + " (busy)" * busy


def _aligned(cards: list[dict[str, str]]) -> Rows:
    names = dict.fromkeys(["trial", *(name for card in cards for name in card)], MISSING)
    return [names | card for card in cards]


def _trial(record: StudyRecord, trial: TrialRecord, study_file: str | None) -> dict[str, Any]:
    searched = {name: format_value(value) for name, value in trial.params.items()}
    # None stands for a default that is decided elsewhere.
    fixed = {
        name: format_value(value)
        for name, value in record.definition.get("training", {}).items()
        if value is not None and name not in trial.params
    }
    arguments = [f"--param {shlex.quote(f'{name}={value}')}" for name, value in searched.items()]
    return {
        "number": trial.number,
        "precision": precision_facts(trial),
        "searched": [{"searched": name, "value": value} for name, value in searched.items()],
        "fixed": [{"fixed": name, "value": value} for name, value in fixed.items()],
        "command": [f"hpo train {shlex.quote(study_file or 'STUDY.yaml')}", *arguments],
        "metrics": task_metrics_table(trial.telemetry),
    }


def _all_trials(tables: StudyTables) -> Rows:
    trials = tables.trials
    table = trials[["number", "outcome"]].assign(precision=trials["precision"].replace("", MISSING))
    table["effective"] = [effective_precision(trial) or MISSING for trial in tables.record.trials]
    for metric in tables.record.metric_names:
        table[metric] = [format_metric(metric, value) for value in trials[objective_column(metric)]]
    if len(tables.devices) > 1:
        table["device"] = trials["device"].fillna(MISSING)
    speeds = zip(trials["train_examples_per_second"], trials["busy"].eq(True), strict=True)
    table["examples/s"] = [_speed(speed, busy=busy) for speed, busy in speeds]
    if trials["train_joules_per_example"].notna().any():
        table["joules/example"] = trials["train_joules_per_example"].map(format_number)
    if trials["skipped_steps"].gt(0).any():
        table["skipped steps"] = trials["skipped_steps"].map(format_number)
    table["peak memory"] = trials["peak_memory_bytes"].map(format_bytes)
    table["time"] = trials["seconds"].map(format_seconds)
    for name in searched_parameters(trials):
        table[name] = trials[f"param.{name}"].map(format_cell)
    return list(table.to_dict("records"))
