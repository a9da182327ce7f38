"""A detailed evaluation in the terminal: metrics with intervals, then the weak sides of each task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from hpo.cli.display import dataframe_table, one_line, print_indented, print_warning
from hpo.report.detailed_tables import (
    Detailed,
    classes_text,
    decided_text,
    metrics_text,
    num_rows,
    off_diagonal,
    sorted_classes,
)
from hpo.report.formats import format_number
from hpo.study.reading.study_record import is_number

MAX_CLASSES = 15
MAX_CONFUSIONS = 5


def print_detailed(one: Detailed) -> None:
    """Metrics with intervals; of each task the worst classes and the most frequent confusions; all warnings.

    The worst errors, with their texts and spans, are on the page of `hpo report`.
    """
    console = Console(highlight=False)
    title = f"Trial {one.trial_number} on {one.split}: {num_rows(one)}"
    if decided := decided_text(one):
        title += f"; {decided}"
    print_indented(console, Text(title, style="bold"), 0)
    console.print(dataframe_table(metrics_text(one).map(one_line)))
    for task, of_task in one.tasks.items():
        _print_task(console, task, of_task)
    for text in one.warnings:
        print_warning(text)


def _print_task(console: Console, task: str, of_task: Mapping[str, Any]) -> None:
    facts = [of_task["kind"].replace("_", " "), f"{of_task['num_rows']} annotated rows"]
    if is_number(of_task["threshold"]):
        facts.append(f"threshold {format_number(of_task['threshold'])}")
    if of_task["calibration"] and is_number(of_task["calibration"]["ece"]):
        facts.append(f"calibration error {format_number(of_task['calibration']['ece'])}")
    print_indented(console, Text.assemble((one_line(task), "bold"), f": {', '.join(facts)}"), 0)
    if classes := sorted_classes(of_task):
        order = sorted(range(len(classes)), key=lambda at: _weakness(classes[at]))[:MAX_CLASSES]
        table = classes_text(of_task).drop(columns="threshold", errors="ignore")
        console.print(dataframe_table(table.iloc[order].map(one_line)))
    if len(classes) > MAX_CLASSES:
        console.print(f"  and {len(classes) - MAX_CLASSES} more: --json or the report", style="dim")
    if confused := off_diagonal(of_task)[:MAX_CONFUSIONS]:
        verb = "confused" if of_task["kind"] == "single_label" else "predicted where another class holds"
        pairs = ", ".join(f"{said} for {true} ({count})" for true, said, count in confused)
        print_indented(console, Text(one_line(f"most often {verb}: {pairs}")), 2)


def _weakness(one: Mapping[str, Any]) -> tuple[float, int]:
    """Sorts the lowest F1 first; of equal ones the most frequent. A class without an F1 is the last."""
    return (one["f1"] if is_number(one["f1"]) else 2.0), -(one["support"] or 0)
