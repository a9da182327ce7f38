"""Made-up detailed evaluations in the form that a study stores. No number here was measured."""

from collections.abc import Mapping, Sequence
from typing import Any

TEXT = "The parcel came two weeks late, and the screen was broken.\nI asked for my money <twice> & got none."


def interval(value: float | None) -> dict[str, float | None]:
    low, high = (None, None) if value is None else (value - 0.03, value + 0.03)
    return {"value": value, "low": low, "high": high}


def class_row(name: str, hits: int, support: int, num_predicted: int) -> dict[str, Any]:
    """From the counts, as scikit-learn with `zero_division=0`; None where there is neither."""
    known = bool(support or num_predicted)
    return {
        "name": name,
        "precision": hits / max(num_predicted, 1) if known else None,
        "recall": hits / max(support, 1) if known else None,
        "f1": 2 * hits / max(support + num_predicted, 1) if known else None,
        "support": support,
        "num_predicted": num_predicted,
    }


def error(id_: str, text: str, truth: Any, predicted: Any, **parts: Any) -> dict[str, Any]:
    row = {"id": id_, "text": text, "truth": truth, "predicted": predicted, "loss": 1.0}
    return row | {"text_start": 0, "num_outside": 0} | parts


def task_document(kind: str, metrics: Mapping[str, float | None], **parts: Any) -> dict[str, Any]:
    """A task of a document; what is not given is not known."""
    return {
        "kind": kind,
        "num_rows": 480,
        "metrics": {name: interval(value) for name, value in metrics.items()},
        "threshold": None,
        "decisions": {"threshold": parts.get("threshold") or 0.5, "null_offset": 0.0, "merge_gap": 0},
        "classes": [],
        "confusion": None,
        "worst": [],
        "warnings": [],
        **parts,
    }


def document(tasks: Mapping[str, Any], **parts: Any) -> dict[str, Any]:
    return {
        "version": 2,
        "split": "test",
        "num_examples": 500,
        "decided_on": "validation",
        "num_resamples": 1000,
        "level": 0.95,
        "score": interval(0.712),
        "baseline": {"score": 0.25, "tags/f1_macro": 0.31, "topic/f1_macro": 0.125, "stars/r2": 0.0},
        "tasks": dict(tasks),
        **parts,
    }


def single_label(names: Sequence[str], **parts: Any) -> dict[str, Any]:
    classes = [class_row(name, 20, 25, 25) for name in names]
    confusion = {"labels": [*names], "counts": [[at, at, 20] for at in range(len(names))]}
    metrics = {"f1_macro": 0.71, "f1_micro": 0.74, "accuracy": 0.74}
    return task_document("single_label", metrics, classes=classes, confusion=confusion, **parts)


def every_kind() -> dict[str, Any]:
    """One task of each kind."""
    tags = task_document(
        "multi_label",
        {"f1_macro": 0.52, "f1_micro": 0.61, "exact_match": 0.33},
        threshold=0.41,
        classes=[class_row("late", 40, 50, 55), class_row("never seen", 0, 0, 0)],
        confusion={"labels": ["late", "never seen"], "counts": [[0, 0, 40], [0, 1, 6]]},
        worst=[error("row-9", TEXT, ["late"], [])],
    )
    spans = task_document(
        "token_classification",
        {"span_f1": 0.48, "span_overlap_f1": 0.63},
        classes=[class_row("delay", 30, 50, 44)],
        worst=[error("row-4", TEXT, [["delay", 4, 30]], [["delay", 20, 46]], text_start=800, num_outside=3)],
    )
    answer = task_document(
        "span_extraction",
        {"span_f1": 0.58, "exact_match": 0.44},
        classes=[class_row("answer", 30, 50, 44)],
        worst=[error("row-7", TEXT, [["answer", 15, 24]], [])],
    )
    stars = task_document("regression", {"r2": 0.41, "mae": 0.83}, worst=[error("row-8", TEXT, 1.0, 4.27)])
    topic = single_label(["delivery", "quality"], worst=[error("row-1", TEXT, "delivery", "quality")])
    return document({"topic": topic, "tags": tags, "phrases": spans, "why": answer, "stars": stars})


def nothing_known() -> dict[str, Any]:
    """None wherever a document may have it."""
    classes = [class_row(name, 0, 0, 0) for name in "ab"]
    no_rows = {"classes": classes, "num_rows": 0, "confusion": {"labels": ["a", "b"], "counts": []}}
    tasks = {
        "empty": task_document("multi_label", {"f1_macro": None}, **no_rows),
        "number": task_document("regression", {"r2": None}, worst=[error("1", "", None, None, loss=None)]),
    }
    return document(tasks, score=None, decided_on=None, num_resamples=None, level=None)
