"""Section of the report on the best model's right and wrong predictions.

Marks in a text compare prediction and truth: `−` true only, `+` predicted only, `=` both. Signs, colours and
underlines say the same, so no reader depends on one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from markupsafe import Markup, escape

from hpo.json_safe import is_number
from hpo.report.detailed import Detailed, classes_table, confusions_table, metrics_table
from hpo.report.formats import format_number, format_percent, plural
from hpo.tasks.kind import known_kind

HEADING = "Right and wrong predictions of the best model"
SIGNS = {"missed": "−", "spurious": "+", "both": "="}
"""CSS class -> sign. A piece with several signs has the class `mixed`."""
_LEGEND = [("missed", "−", "true only"), ("spurious", "+", "predicted only"), ("both", "=", "both")]
_MARK = Markup('<mark class="{}"><b>{}</b>{}</mark>')


def evaluation(one: Detailed) -> dict[str, Any]:
    """Return a detailed evaluation for the template."""
    return {
        "title": one.title,
        "about": _about(one),
        "warnings": one.warnings,
        "metrics": metrics_table(one),
        "tasks": [_task(name, task) for name, task in one.tasks.items()],
    }


def _about(one: Detailed) -> str:
    document, lines = one.document, []
    if is_number(document["num_resamples"]) and is_number(document["level"]):
        lines.append(
            f"Intervals of {format_percent(document['level'])} by Wilson or the bootstrap "
            f"({format_number(document['num_resamples'])} resamples) show the chance in the choice of rows, "
            "not of seeds. `best constant`: the best constant prediction."
        )
    if one.thresholds:
        lines.append(f"{one.thresholds[0].upper()}{one.thresholds[1:]}.")
    return " ".join(lines)


def _task(name: str, task: Mapping[str, Any]) -> dict[str, Any]:
    kind, threshold = known_kind(task["kind"]), task["threshold"]
    facts = [f"{plural(task['num_rows'], 'labelled row')}."]
    facts += [f"Threshold {format_number(threshold)}."] if is_number(threshold) else []
    mixed = [("mixed", "− +", "several spans, each with its sign")] if kind.in_spans else []
    return {
        "title": f"{name} ({task['kind']})",
        "about": " ".join(facts),
        "classes": classes_table(task),
        "pairs": "classes true and predicted in one row" if kind.is_list else "most frequent confusions",
        "confusions": confusions_table(task),
        "legend": [] if kind.is_number else [*_LEGEND, *mixed],
        "worst": [_error(task, row) for row in task["worst"] or ()],
    }


def _error(task: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    text, kind, truth, predicted = row["text"] or "", known_kind(task["kind"]), row["truth"], row["predicted"]
    if kind.in_spans:
        outside = row["num_outside"]
        answer = f"· {len(truth or ())} true, {len(predicted or ())} predicted"
        answer += f", {plural(outside, 'wrong span')} outside this excerpt" if outside else ""
        text = marked_text(text, truth, predicted, named=len(task["classes"] or ()) > 1)
    elif kind.is_number:
        answer = f"· true {format_number(truth)}, predicted {format_number(predicted)}"
    else:
        answer = marked_labels(truth, predicted)
    return {"id": row["id"], "loss": format_number(row["loss"]), "text": text, "answer": answer}


def marked_text(
    text: str, truth: Sequence[Any] | None, predicted: Sequence[Any] | None, *, named: bool
) -> Markup:
    """Return a text as HTML with marks for its spans [name, start, end]. Everything in it is escaped.

    The text is cut wherever a span begins or ends, so each piece lies in a span as a whole or not at all.
    With `named`, signs have the names of the spans.
    """
    sides = [{(str(name), start, end) for name, start, end in spans or ()} for spans in (truth, predicted)]
    ends = {min(max(0, at), len(text)) for side in sides for _, *range_ in side for at in range_}
    pieces = []
    for start, end in pairwise(sorted({0, len(text), *ends})):
        true, found = ({span for span in side if span[1] <= start and end <= span[2]} for side in sides)
        groups = {"missed": true - found, "spurious": found - true, "both": true & found}
        names = {look: sorted({name for name, *_ in spans}) for look, spans in groups.items() if spans}
        if not names:
            pieces.append(escape(text[start:end]))
            continue
        signs = [SIGNS[look] + name * named for look in names for name in (names[look] if named else [""])]
        look = next(iter(names)) if len(names) == 1 else "mixed"
        pieces.append(_MARK.format(look, " ".join(signs), text[start:end]))
    return Markup("").join(pieces)


def marked_labels(truth: Any, predicted: Any) -> Markup:
    """Return the true and predicted classes of a row as marks."""
    true, found = _labels(truth), _labels(predicted)
    looks = [("missed", name) for name in true if name not in found]
    looks += [("spurious", name) for name in found if name not in true]
    looks += [("both", name) for name in true if name in found]
    marks = [_MARK.format(look, SIGNS[look], f" {name}") for look, name in looks]
    return Markup(" ").join(marks) if marks else Markup("none")


def _labels(value: Any) -> list[str]:
    return [] if value is None else list(map(str, value)) if isinstance(value, list) else [str(value)]
