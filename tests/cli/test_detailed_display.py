"""A detailed evaluation on the screen."""

from __future__ import annotations

import copy
import io
import re
from typing import Any

import pytest
from detailed_documents import class_row, document, every_kind, nothing_known, task_document
from rich.console import Console

from hpo.cli import detailed_display, display
from hpo.cli.detailed_display import MAX_CLASSES, print_detailed
from hpo.report.detailed_tables import Detailed


def shown(content: dict[str, Any], monkeypatch: pytest.MonkeyPatch, width: int = 100, **options: Any) -> str:
    """What is printed of a document."""
    console = Console(file=io.StringIO(), width=width, color_system=None, **options)
    for module in (detailed_display, display):
        monkeypatch.setattr(module, "Console", lambda **_: console)
    before = copy.deepcopy(content)
    print_detailed(Detailed(7, content["split"], content))
    assert content == before
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())


def in_one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("width", [60, 80, 120])
def test_every_kind_fits_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(every_kind(), monkeypatch, width, force_terminal=True)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text, "no name or number is cut"
    flat = in_one_line(text)
    for part in (
        "Trial 7 on test: 500 rows; thresholds were chosen on validation",
        "topic: single label, 480 annotated rows, calibration error 0.061",
        "tags: multi label, 480 annotated rows, threshold 0.41, calibration error 0.061",
        "most often predicted where another class holds: late for broken (9), broken for late (6)",
        "Warning: tags: The class `rude` is true in 12 rows of test and never predicted.",
    ):
        assert part in flat, part
    assert re.search(r"all\s+tasks\s+score\s+0\.712\s\[0\.682,\s0\.742\]", text)


def test_the_weakest_classes_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [class_row(f"c{at:02d}", at, 100, 100) for at in range(40)]
    rows += [class_row("frequent", 0, 500, 1), class_row("unknown", 0, 0, 0)]
    task = task_document("single_label", {"accuracy": 0.5}, classes=rows)
    text = shown(document({"topic": task}), monkeypatch)
    names = re.findall(r"^ (frequent|unknown|c\d\d) ", text, re.MULTILINE)
    assert names == ["frequent", *(f"c{at:02d}" for at in range(MAX_CLASSES - 1))]
    assert f"and {len(rows) - MAX_CLASSES} more: --json or the report" in text
    few = task_document("single_label", {"accuracy": 0.5}, classes=rows[-2:])
    text = shown(document({"topic": few}), monkeypatch)
    assert re.findall(r"^ (frequent|unknown) ", text, re.MULTILINE) == ["frequent", "unknown"]
    assert "more: --json" not in text


def test_what_others_wrote_is_neither_markup_nor_an_order_to_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nasty = "[red]a\x1b[2J\nb[/red]"
    plain = "[red]a [2J b[/red]"
    task = task_document(
        "single_label",
        {"accuracy": 0.5},
        classes=[class_row(nasty, 1, 2, 3), class_row("b", 1, 2, 3)],
        confusion={"labels": [nasty, "b"], "counts": [[0, 1, 5], [1, 1, 9]]},
        warnings=[nasty],
    )
    text = shown(document({nasty: task}), monkeypatch)
    assert "\x1b" not in text
    assert f"most often confused: b for {plain} (5)" in text
    assert f"Warning: {plain}: {plain}" in text
    assert len(re.findall(re.escape(plain), text)) >= 5


def test_what_is_not_known_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(nothing_known(), monkeypatch)
    assert "None" not in text
    assert "nan" not in text
    assert "Trial 7 on test: 500 rows\n" in text
    assert re.search(r"empty +f1_macro +–", text)


def test_scores_of_the_split_that_decided_are_flattering(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_document("regression", {"mae": 0.5})
    text = shown(document({"size": task}, "validation"), monkeypatch, 200)
    assert "thresholds were chosen on validation, so the scores here are flattering" in text
