"""The report's HTML page: sections in the order in which a person asks.

It opens offline: plotly.js is inside, and the page's own policy forbids it to load anything. Text that
comes from users and trials (names, parameters, error messages) is escaped.
"""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pandas as pd

from hpo.report.caveats import caveats
from hpo.report.charts import Chart
from hpo.report.figures import plotly_figure
from hpo.report.formats import (
    format_bytes,
    format_metric,
    format_number,
    format_seconds,
    format_value,
    precision_facts,
)
from hpo.report.tables import (
    objective_column,
    precision_comparison,
    reasons_table,
    task_metrics_table,
    trial_seconds,
    trials_table,
)
from hpo.study.study_record import best_trials, complete_trials, trial_outcome

if TYPE_CHECKING:
    from hpo.study.study_record import StudyRecord, TrialRecord


def report_html(record: StudyRecord, charts: list[Chart]) -> str:
    """The page. Sections without data say so in a sentence."""
    from plotly.offline import get_plotlyjs

    sections = [
        _header(record),
        _section("Best", _best(record)),
        _section("Before you draw conclusions", _notices(record)),
        _section("Precision", _precision(record)),
        *[_section(chart.title, _chart(chart)) for chart in charts],
        _section("Metrics of the best, by task", _task_metrics(record)),
        _section("Trials that are not complete, and why", _reasons(record)),
        _section("All trials", _all_trials(record)),
        _section("Files", _FILES),
    ]
    return _PAGE.format(
        title=html.escape(f"{record.name}: study report"),
        css=_CSS,
        plotly=get_plotlyjs(),
        body="\n".join(sections),
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>\n{body}\n</section>"


def _header(record: StudyRecord) -> str:
    trials = trials_table(record)
    complete = len(complete_trials(record))
    goals = ", ".join(
        f"{direction} {metric}"
        for metric, direction in zip(record.metric_names, record.directions, strict=True)
    )
    environment = sorted({text for trial in record.trials if (text := _environment(trial))})
    lines = [
        f"{len(trials)} trials, {complete} complete. Objective: {goals}.",
        f"Planned: {sum(record.slots.values())}, of which {record.slots.get('done', 0)} are done.",
        f"Time in trials: {format_seconds(float(pd.to_numeric(trials['seconds']).sum()))}.",
        f"Ran on: {'; '.join(environment) or 'not known'}.",
        f"Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.",
    ]
    text = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
    return f"<header><h1>{html.escape(record.name)}</h1>{text}</header>"


def _environment(trial: TrialRecord) -> str:
    device = trial.telemetry.get("device") or {}
    if not device.get("name"):
        return ""
    parts = [str(device["name"])]
    if device.get("type") == "cpu" and device.get("num_threads"):
        parts.append(f"{device['num_threads']} threads")
    parts += [f"{name} {device[name]}" for name in ("torch", "transformers", "cuda") if device.get(name)]
    return ", ".join(parts)


def _best(record: StudyRecord) -> str:
    best = best_trials(record)
    if not best:
        count = len(record.trials)
        return _paragraph(
            "There is no trial yet."
            if count == 0
            else f"No trial is complete, so there is no best one. {_outcomes(record)}"
        )
    if len(record.metric_names) == 1:
        return _cards(record, best[0]) + _configuration(record, best[0], is_open=True)
    rows = [
        {"trial": trial.number, "precision that ran": _effective(trial)}
        | {
            metric: format_metric(metric, value)
            for metric, value in zip(record.metric_names, trial.values or (), strict=True)
        }
        for trial in best
    ]
    text = (
        f"{len(best)} of {len(complete_trials(record))} complete trials are on the Pareto front: no other "
        "trial is as good or better in every objective."
    )
    parts = [_configuration(record, trial, is_open=False) for trial in best]
    return _paragraph(text) + _table(pd.DataFrame(rows)) + "".join(parts)


def _outcomes(record: StudyRecord) -> str:
    counts = pd.Series([trial_outcome(trial) for trial in record.trials]).value_counts()
    return "Outcomes: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) + "."


def _effective(trial: TrialRecord) -> str:
    return str((trial.telemetry.get("precision") or {}).get("effective") or "not known")


def _cards(record: StudyRecord, trial: TrialRecord) -> str:
    throughput = trial.telemetry.get("throughput") or {}
    cards = {
        metric: format_metric(metric, value)
        for metric, value in zip(record.metric_names, trial.values or (), strict=True)
    }
    cards |= {
        "trial": str(trial.number),
        "precision that ran": _effective(trial),
        "train examples/s": format_number(throughput.get("train_examples_per_second")),
        "peak memory": format_bytes(trial.telemetry.get("peak_memory_bytes")),
        "time": format_seconds(trial_seconds(trial)),
    }
    items = [f"<div><dt>{_inline(name)}</dt><dd>{_inline(value)}</dd></div>" for name, value in cards.items()]
    return f'<dl class="cards">{"".join(items)}</dl>'


def _configuration(record: StudyRecord, trial: TrialRecord, is_open: bool) -> str:
    searched = pd.DataFrame(
        [{"searched": name, "value": format_value(value)} for name, value in trial.params.items()]
    )
    fixed = pd.DataFrame(
        [
            {"fixed": name, "value": format_value(value)}
            for name, value in _given(record.definition.get("training")).items()
            if name not in trial.params
        ]
    )
    arguments = [
        f"--param {shlex.quote(f'{name}={format_value(value)}')}" for name, value in trial.params.items()
    ]
    command = " ".join(["hpo train", shlex.quote(record.name), *arguments])
    return (
        f"{_paragraph(f'Precision of trial {trial.number}: {precision_facts(trial)}')}"
        f"<details{' open' if is_open else ''}><summary>Configuration of trial {trial.number}</summary>"
        f'<div class="columns">{_table(searched)}{_table(fixed)}</div>'
        f"<p>Train it again:</p><pre>{html.escape(command)}</pre></details>"
    )


def _given(settings: Any) -> Mapping[str, Any]:
    """The settings that say something: a None stands for a default decided elsewhere."""
    return {name: value for name, value in (settings or {}).items() if value is not None}


def _notices(record: StudyRecord) -> str:
    found = caveats(record)
    if not found:
        return _paragraph("Nothing is known that limits what this study shows, except its size.")
    items = "".join(
        f"<li>{_inline(notice.text)} <span>{_inline(notice.advice)}</span></li>" for notice in found
    )
    return f'<ul class="caveats">{items}</ul>'


def _precision(record: StudyRecord) -> str:
    table = precision_comparison(record)
    if table.empty:
        return _paragraph("There is no trial yet.")
    return _table(table, kind="precision") + _paragraph(
        "By the precision requested; only trials that ran it count. Metrics are from complete trials, speed "
        "and memory (median, min to max) from all that trained. Wasted: time in trials that ended without "
        "an answer (neither complete nor pruned)."
    )


def _chart(chart: Chart) -> str:
    if chart.absent:
        return _paragraph(chart.absent)
    figure = plotly_figure(chart, standalone=False)
    plot = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id=chart.key,
        default_height=f"{chart.height}px",
        config={"responsive": True, "displaylogo": False, "displayModeBar": False},
    )
    return f"<figure>{plot}<figcaption>{_inline(chart.caption)}</figcaption></figure>"


def _task_metrics(record: StudyRecord) -> str:
    best = best_trials(record)
    parts = []
    for trial in best:
        table = task_metrics_table(trial)
        if table.empty:
            continue
        if len(best) > 1:
            parts.append(f"<h3>Trial {trial.number}</h3>")
        parts.append(_table(table.assign(value=table["value"].map(format_number))))
    return "".join(parts) or _paragraph("No metrics by task are stored.")


def _reasons(record: StudyRecord) -> str:
    table = reasons_table(record)
    if table.empty:
        return _paragraph("Every trial is complete." if record.trials else "There is no trial yet.")
    table["seconds"] = table["seconds"].map(format_seconds)
    return _table(table.rename(columns={"seconds": "time"}), kind="reasons")


def _all_trials(record: StudyRecord) -> str:
    trials = trials_table(record)
    if trials.empty:
        return _paragraph("There is no trial yet.")
    params = [column for column in trials if column.startswith("param.")]
    table = trials[["number", "outcome", "precision", "effective"]].copy()
    for metric in record.metric_names:
        table[metric] = [format_metric(metric, value) for value in trials[objective_column(metric)]]
    table["examples/s"] = trials["train_examples_per_second"].map(format_number)
    table["peak memory"] = trials["peak_memory_bytes"].map(format_bytes)
    table["time"] = trials["seconds"].map(format_seconds)
    for column in params:
        if column != "param.fp_precision":
            table[column.removeprefix("param.")] = trials[column].map(_cell)
    table["effective"] = table["effective"].fillna("–")
    return f"<details><summary>{len(table)} trials</summary>{_table(table)}</details>"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return format_number(value)
    return "–" if value is None else str(value)


def _table(table: pd.DataFrame, kind: str = "") -> str:
    """The table in a container that scrolls by itself; `kind` is a CSS class."""
    if table.empty:
        return ""
    head = "".join(f"<th>{_inline(name)}</th>" for name in table.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{_inline(cell)}</td>" for cell in row) + "</tr>"
        for row in table.itertuples(index=False)
    )
    table_html = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="scroll {kind}" tabindex="0">{table_html}</div>'


def _paragraph(text: str) -> str:
    return f"<p>{_inline(text)}</p>"


def _inline(text: Any) -> str:
    """Escaped, then `code` between backticks, as messages of this package write it."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(str(text)))


_FILES = (
    "<p>Beside this page: <code>figures/</code> holds the charts as PNG, <code>tables/</code> the numbers "
    "as CSV (seconds, bytes).</p>"
)

_CSS = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1160px; padding: 16px; font: 15px/1.5 system-ui, sans-serif;
       color: #22272e; background: #fff; overflow-wrap: anywhere; }
header p { margin: 2px 0; color: #4a5561; }
h1 { margin: 4px 0 8px; font-size: 26px; }
h2 { margin: 34px 0 10px; font-size: 19px; border-top: 1px solid #e3e6ea; padding-top: 16px; }
h3 { margin: 14px 0 6px; font-size: 15px; }
figure { margin: 0; }
figcaption { color: #4a5561; font-size: 14px; margin-top: 6px; }
/* The shadow at an edge shows that there is more to scroll to. */
.scroll { overflow-x: auto; max-width: 100%;
          background: linear-gradient(to right, #fff 30%, transparent) left / 32px 100%,
                      linear-gradient(to left, #fff 30%, transparent) right / 32px 100%,
                      linear-gradient(to right, #0002, transparent) left / 10px 100%,
                      linear-gradient(to left, #0002, transparent) right / 10px 100%;
          background-repeat: no-repeat; background-attachment: local, local, scroll, scroll; }
.columns { display: flex; flex-wrap: wrap; gap: 8px 40px; }
.columns > * { min-width: 0; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums;
        overflow-wrap: normal; }
th, td { text-align: left; vertical-align: top; padding: 5px 18px 5px 0; border-bottom: 1px solid #e3e6ea;
         white-space: nowrap; }
th { color: #4a5561; font-weight: 600; }
td:first-child { font-weight: 600; }
.reasons td:last-child { white-space: normal; min-width: 240px; max-width: 640px; overflow-wrap: anywhere; }
.precision th, .precision td { white-space: normal; overflow-wrap: normal; min-width: 84px; }
.precision td:first-child, .precision th:first-child { position: sticky; left: 0; background: #fff; }
@media (max-width: 640px) {
  .reasons tr { display: flex; flex-wrap: wrap; border-bottom: 1px solid #e3e6ea; }
  .reasons th, .reasons td { border: 0; padding: 3px 14px 3px 0; }
  .reasons td:last-child { flex-basis: 100%; padding-bottom: 8px; }
}
code { font-size: 0.92em; background: #f4f6f8; padding: 0 3px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); gap: 8px;
         margin: 12px 0; }
.cards div { border: 1px solid #d5dae0; border-radius: 6px; padding: 8px 12px; }
.cards dt { color: #4a5561; font-size: 13px; }
.cards dd { margin: 0; font-size: 20px; }
.caveats { padding-left: 20px; }
.caveats li { margin: 6px 0; }
.caveats span { color: #4a5561; }
pre { background: #f4f6f8; padding: 10px; font-size: 13px; white-space: pre-wrap; }
summary { cursor: pointer; }
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline';
               img-src data: blob:">
<title>{title}</title>
<style>{css}</style>
<script>{plotly}</script>
</head>
<body>
<noscript><p>The charts need JavaScript; the same ones are PNG files in the folder figures.</p></noscript>
{body}
</body>
</html>
"""
