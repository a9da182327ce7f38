"""What a reader of an evaluation must know before believing it, in whole sentences."""

from __future__ import annotations

from collections.abc import Sequence

from hpo.data.examples import Example
from hpo.data.tasks import Task
from hpo.evaluation.classes import ClassFigures
from hpo.tasks.kind import DecodingThresholds, Kind, Span
from hpo.tasks.registry import kind_of
from hpo.tasks.spans import SpanKind, word_counts
from hpo.training.metrics import RowStatistics

FEW_ROWS_OF_A_CLASS = 10
FEW_ROWS = 30
NEARLY_ALL = 0.95
"""Above it, the share of the rows a class is predicted in, or of the words that spans cover, is near 1."""
FAR_ABOVE = 1.5
"""What is predicted so many times as often as it is true is predicted far too often."""
_NAMES_SHOWN = 5


def task_warnings(
    statistics: RowStatistics, classes: Sequence[ClassFigures], decisions: DecodingThresholds
) -> tuple[str, ...]:
    """Of one task on one split; `decisions` are those that its predictions were made with."""
    task, num_rows = statistics.task, statistics.num_rows
    if not num_rows:
        return (f"No row of this split is annotated for {task.name}: there is nothing to evaluate.",)
    warnings = []
    if not statistics.scores():
        warnings.append("Some predictions are not finite, so there is no metric.")
    if num_rows < FEW_ROWS:
        rows = "Only 1 row is" if num_rows == 1 else f"Only {num_rows} rows are"
        warnings.append(f"{rows} annotated: the intervals are too narrow, and the figures say little.")
    kind = kind_of(task)
    at, item = kind.decided_by(decisions), "class" if kind.has_classes else "span"
    if classes and not any(one.num_predicted for one in classes) and any(one.support for one in classes):
        warnings.append(f"No {item} is predicted in any row{at}.")
    else:
        unpredicted = [one.name for one in classes if one.support and not one.num_predicted]
        if unpredicted:
            verb = "occurs but is" if len(unpredicted) == 1 else "occur but are"
            warnings.append(f"{_names(unpredicted)} {verb} never predicted.")
    if kind.is_by_row:
        warnings += _everywhere(kind, classes, num_rows, at)
    rare = [one.name for one in classes if 0 < one.support < FEW_ROWS_OF_A_CLASS]
    if rare:
        has = "has" if len(rare) == 1 else "have"
        what = "rows" if kind.is_by_row else "spans"
        few = f"fewer than {FEW_ROWS_OF_A_CLASS} {what}"
        macro = ", and the interval of f1_macro is too narrow" if "f1_macro" in task.metrics else ""
        warnings.append(f"{_names(rare)} {has} {few}: figures of so few are mostly chance{macro}.")
    absent = [one.name for one in classes if not one.support]
    if absent:
        verb = "does" if len(absent) == 1 else "do"
        left_out = "; f1_macro is of the others" if "f1_macro" in task.metrics else ""
        warnings.append(f"{_names(absent)} {verb} not occur in this split{left_out}.")
    return tuple(warnings)


def cover_warnings(
    task: Task,
    predicted: Sequence[Sequence[Span]],
    examples: Sequence[Example],
    decisions: DecodingThresholds,
) -> tuple[str, ...]:
    """Whether spans are predicted over nearly all of the texts they are in; of the kinds with many spans."""
    kind = kind_of(task)
    if not isinstance(kind, SpanKind) or kind.is_by_row:
        return ()
    texts = [example.text for example in examples]
    share = _share_covered(predicted, texts)
    true_share = _share_covered([sorted(kind.true_spans(example)) for example in examples], texts)
    if share <= NEARLY_ALL or share < FAR_ABOVE * true_share:
        return ()
    text = f"Predicted spans cover {share:.1%} of the words of the texts they are in"
    return (f"{text}{kind.decided_by(decisions)}; true ones cover {true_share:.1%}.",)


def _everywhere(kind: Kind, classes: Sequence[ClassFigures], num_rows: int, at: str) -> list[str]:
    """Of classes predicted in every row, or in nearly every one and in far fewer true."""
    every = [one.name for one in classes if one.num_predicted == num_rows > one.support]
    most = [
        one.name
        for one in classes
        if NEARLY_ALL * num_rows < one.num_predicted < num_rows
        and one.num_predicted >= FAR_ABOVE * one.support
    ]
    warnings = []
    for names, where, more in (
        (every, "in every row", ""),
        (most, f"in more than {NEARLY_ALL:.0%} of the rows", ", and true in far fewer"),
    ):
        if names:
            is_all = kind.is_list and len(names) == len(classes) > 1
            verb = "is" if len(names) == 1 or is_all else "are"
            subject = "Every class" if is_all else _names(names)
            warnings.append(f"{subject} {verb} predicted {where}{at}{more}.")
    return warnings


def _share_covered(spans_of_rows: Sequence[Sequence[Span]], texts: Sequence[str]) -> float:
    """Of the words of the texts, each taken once for every span name in it."""
    covered = total = 0
    for spans, text in zip(spans_of_rows, texts, strict=True):
        if spans:
            whole = [(name, 0, len(text)) for name in {name for name, _, _ in spans}]
            covered += word_counts(text, set(), spans)[1]
            total += word_counts(text, set(), whole)[1]
    return covered / max(total, 1)


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
