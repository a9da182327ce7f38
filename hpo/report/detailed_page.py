"""What the best model gets right and wrong: a section of the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpo.json_safe import is_number
from hpo.report.detailed import Detailed, decided_text, num_rows
from hpo.report.detailed_tables import classes_text, confusions_text, metrics_text, outside_text
from hpo.report.formats import format_number
from hpo.report.marked import LOOKS, MEANINGS, marked_labels, marked_text
from hpo.tasks.kind import known_kind

HEADING = "What the best model gets right and wrong"


def evaluation(one: Detailed) -> dict[str, Any]:
    """A detailed evaluation as the template shows it."""
    return {
        "title": f"Trial {one.trial_number} on {one.split}: {num_rows(one)}",
        "about": _about(one),
        "warnings": one.warnings,
        "metrics": metrics_text(one),
        "tasks": [_task(task, of_task) for task, of_task in one.tasks.items()],
    }


def _about(one: Detailed) -> str:
    document = one.document
    lines = []
    if is_number(document["num_resamples"]) and is_number(document["level"]):
        lines.append(
            f"Intervals of {document['level']:.0%}: Wilson's for shares of right rows, else a percentile "
            f"bootstrap over the rows with {format_number(document['num_resamples'])} resamples, extended to "
            "what so many rows cannot exclude. They show the chance in the choice of rows. They say nothing "
            "about other seeds. `best constant`: the value for the best constant prediction."
        )
    if decided := decided_text(one):
        lines.append(f"{decided[0].upper()}{decided[1:]}.")
    return " ".join(lines)


def _task(name: str, of_task: Mapping[str, Any]) -> dict[str, Any]:
    threshold = of_task["threshold"]
    facts = [f"{format_number(of_task['num_rows'])} rows have the truth."]
    facts += [f"Threshold {format_number(threshold)}."] if is_number(threshold) else []
    num = len(of_task["classes"] or ())
    facts += [f"{num} class{'es, the most frequent first' if num > 1 else ''}."] if num else []
    worst = of_task["worst"] or ()
    kind = known_kind(of_task["kind"])
    pairs = "classes true and predicted in the same rows" if kind.is_list else "most frequent confusions"
    legend = [(look, sign, MEANINGS[look]) for look, sign in LOOKS.items()]
    if kind.in_spans:
        legend.append(("mixed", "− +", "several spans, each with its sign"))
    return {
        "name": name,
        "title": f"{name} ({of_task['kind']})",
        "about": " ".join(facts),
        "classes": classes_text(of_task),
        "pairs": f"{name}: {pairs}",
        "confusions": confusions_text(of_task),
        "legend": [] if kind.is_number else legend,
        "worst": [_error(of_task, row) for row in worst],
    }


def _error(of_task: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    text, kind = row["text"] or "", known_kind(of_task["kind"])
    shown: dict[str, Any] = {"id": row["id"], "loss": format_number(row["loss"]), "text": text}
    if kind.in_spans:
        sides = [row[side] or [] for side in ("truth", "predicted")]
        exact = sum(span in sides[1] for span in sides[0])
        answer = f"· {len(sides[0])} true, {len(sides[1])} predicted, {exact} of them the same spans"
        if outside := outside_text(row["num_outside"]):
            answer += f", {outside}"
        marked = marked_text(text, *sides, named=len(of_task["classes"] or ()) > 1)
        return shown | {"text": marked, "answer": answer}
    if kind.is_number:
        numbers = [format_number(row[side]) for side in ("truth", "predicted")]
        return shown | {"answer": "· true {}, predicted {}".format(*numbers)}
    return shown | {"answer": marked_labels(row["truth"], row["predicted"])}
