"""A detailed evaluation in the terminal: metrics with intervals, then the weak sides of each task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from hpo.cli.display import dataframe_table, print_indented
from hpo.data.examples import SPAN_KINDS
from hpo.errors import shorten
from hpo.report.detailed_tables import (
    Detailed,
    classes_text,
    decided_text,
    metrics_text,
    num_rows,
    off_diagonal,
    outside_text,
    sorted_classes,
)
from hpo.report.formats import format_number
from hpo.report.marked import LOOKS, MEANINGS, pieces
from hpo.study.study_record import is_number

MAX_CLASSES = 15
MAX_CONFUSIONS = 5
MAX_ERRORS = 3
EXCERPT = 240
"""Characters of a text that are shown."""
_CONTEXT = 60
"""Characters of a long text that are shown before the first span that is marked."""
_SPAN, _SIDE = 40, 160
"""Characters of a span, and of all that is true or predicted, that are shown."""
_STYLES = {"missed": "yellow", "spurious": "red", "both": "green", "mixed": "magenta"}


def print_detailed(one: Detailed) -> None:
    """Metrics with intervals; of each task the worst classes, the most frequent confusions and the worst
    errors; all warnings."""
    console = Console(highlight=False)
    title = f"Trial {one.trial_number} on {one.split}: {num_rows(one)}"
    if decided := decided_text(one):
        title += f"; {decided}"
    print_indented(console, Text(title, style="bold"), 0)
    console.print(dataframe_table(metrics_text(one).map(_plain)))
    for task, found in one.tasks.items():
        _print_task(console, task, found)
    for text in one.warnings:
        print_warning(text)


def print_warning(text: str) -> None:
    """A sentence that a reader of the figures must know."""
    print_indented(Console(highlight=False), Text.assemble(("Warning: ", "bold yellow"), _plain(text)), 0)


def _print_task(console: Console, task: str, found: Mapping[str, Any]) -> None:
    facts = [found["kind"].replace("_", " "), f"{found['num_rows']} annotated rows"]
    if is_number(found["threshold"]):
        facts.append(f"threshold {format_number(found['threshold'])}")
    if found["calibration"] and is_number(found["calibration"]["ece"]):
        facts.append(f"calibration error {format_number(found['calibration']['ece'])}")
    print_indented(console, Text.assemble((_plain(task), "bold"), f": {', '.join(facts)}"), 0)
    if classes := sorted_classes(found):
        order = sorted(range(len(classes)), key=lambda at: _weakness(classes[at]))[:MAX_CLASSES]
        table = classes_text(found).drop(columns="threshold", errors="ignore")
        console.print(dataframe_table(table.iloc[order].map(_plain)))
    if len(classes) > MAX_CLASSES:
        console.print(f"  and {len(classes) - MAX_CLASSES} more: --json or the report", style="dim")
    if confused := off_diagonal(found)[:MAX_CONFUSIONS]:
        verb = "confused" if found["kind"] == "single_label" else "predicted where another class holds"
        pairs = ", ".join(f"{_plain(said)} for {_plain(true)} ({count})" for true, said, count in confused)
        print_indented(console, Text(f"most often {verb}: {pairs}"), 2)
    has_spans = found["kind"] in SPAN_KINDS
    worst = (found["worst"] or ())[:MAX_ERRORS]
    if worst:
        legend = f" ({'; '.join(f'{sign} {MEANINGS[look]}' for look, sign in LOOKS.items())})"
        print_indented(console, Text(f"worst rows{legend if has_spans else ''}:", style="dim"), 2)
    for row in worst:
        _print_error(console, row, has_spans=has_spans)
    if worst or confused:
        console.print()


def _weakness(one: Mapping[str, Any]) -> tuple[float, int]:
    """Sorts the lowest F1 first; of equal ones the most frequent. A class without an F1 is the last."""
    return (one["f1"] if is_number(one["f1"]) else 2.0), -(one["support"] or 0)


def _print_error(console: Console, row: Mapping[str, Any], *, has_spans: bool) -> None:
    head = f"{_plain(str(row['id']))}, loss {format_number(row['loss'])}: "
    sides = {"true": row["truth"], "predicted": row["predicted"]}
    said = (f"{name} {_named(side, row['text'], has_spans=has_spans)}" for name, side in sides.items())
    print_indented(console, Text(head + "; ".join(said)), 4)
    print_indented(console, _excerpt(row, has_spans=has_spans), 6)


def _named(side: Any, text: str, *, has_spans: bool) -> str:
    """A class, classes, a number, or spans with their texts."""
    if isinstance(side, list):
        if has_spans:
            side = [f"{name} “{shorten(text[start:end], _SPAN)}”" for name, start, end in side]
        return shorten(_plain(", ".join(map(str, side))), _SIDE) or "none"
    return format_number(side) if is_number(side) else _plain(str(side or "none"))


def _excerpt(row: Mapping[str, Any], *, has_spans: bool) -> Text:
    """A piece of the text, with marks where spans differ (`hpo.report.marked`)."""
    text = row["text"]
    truth, predicted = (row[side] if has_spans else [] for side in ("truth", "predicted"))
    shown, length, begin = Text(style="dim"), len(text), 0
    first = min((start for _, start, _ in (*truth, *predicted)), default=0)
    if length > EXCERPT and first > EXCERPT - _CONTEXT:
        begin = first - _CONTEXT
    end = min(length, begin + EXCERPT)
    shown.append("... " if begin else "")
    cut = [[[name, start - begin, stop - begin] for name, start, stop in side] for side in (truth, predicted)]
    for piece in pieces(text[begin:end], *cut, named=False):
        style = _STYLES.get(piece.look, "")
        shown.append(f"[{piece.sign}{_plain(piece.text)}]" if piece.look else _plain(piece.text), style)
    wrong = set(map(tuple, truth)) ^ set(map(tuple, predicted))
    hidden = sum(stop <= begin or start >= end for _, start, stop in wrong)
    outside = outside_text(row["num_outside"] + hidden)
    return shown.append(f" ... {outside}" if outside else " ..." if end < length else "")


def _plain(text: str) -> str:
    """The text in one line, without characters that a terminal would obey."""
    return "".join(character if character.isprintable() else " " for character in text)
