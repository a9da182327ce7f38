"""Detailed evaluations of the best trials as text, tables and a section of the page.

In a document an unknown value is None. Marks in a text compare prediction and truth: `−` true only, `+`
predicted only, `=` both. Signs, colours and underlines say the same, so no reader depends on one of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from markupsafe import Markup, escape

from hpo.json_safe import is_number
from hpo.report.formats import format_interval, format_number, format_percent, plural
from hpo.report.status import BASELINE, with_baseline
from hpo.report.terminal import Rows
from hpo.study.reading.study_record import TrialRecord
from hpo.tasks.kind import known_kind

SPLITS = ("test", "validation", "train")  # order of the page: splits unseen by the search come first
MAX_CONFUSIONS = 20

HEADING = "Right and wrong predictions of the best model"
SIGNS = {"missed": "−", "spurious": "+", "both": "="}
"""CSS class -> sign. A piece with several signs has the class `mixed`."""
_LEGEND = [("missed", "−", "true only"), ("spurious", "+", "predicted only"), ("both", "=", "both")]
_MARK = Markup('<mark class="{}"><b>{}</b>{}</mark>')


@dataclass(frozen=True)
class Detailed:
    trial_number: int
    split: str
    document: Mapping[str, Any]

    @property
    def tasks(self) -> Mapping[str, Mapping[str, Any]]:
        tasks: Mapping[str, Mapping[str, Any]] = self.document["tasks"]
        return tasks

    @property
    def warnings(self) -> list[str]:
        return [f"{name}: {text}" for name, task in self.tasks.items() for text in task["warnings"] or ()]

    @property
    def title(self) -> str:
        return f"Trial {self.trial_number} on {self.split}: {self.num_rows}"

    @property
    def num_rows(self) -> str:
        return plural(self.document["num_examples"], "row")

    @property
    def thresholds(self) -> str:
        split = self.document["decided_on"]
        if not split:
            return ""
        flattering = ", so the scores here are flattering" if split == self.split else ""
        return f"thresholds were chosen on {split}{flattering}"


def evaluations_of(trial: TrialRecord) -> list[Detailed]:
    splits = sorted(trial.detailed, key=lambda split: ((*SPLITS, split).index(split), split))
    return [Detailed(trial.number, split, trial.detailed[split]) for split in splits]


def intervals(one: Detailed) -> dict[str, dict[str, Any]]:
    """Return `task`, `metric`, `value`, `low`, `high`, `baseline` of the score and of `<task>/<metric>`."""
    score, baseline = one.document["score"], one.document["baseline"]
    rows = {"score": {"task": "", "metric": "score", **score}} if score else {}
    for name, task in one.tasks.items():
        for metric, interval in task["metrics"].items():
            rows[f"{name}/{metric}"] = {"task": name, "metric": metric, **interval}
    return {name: row | {"baseline": baseline.get(name)} for name, row in rows.items()}


def objectives(one: Detailed, metrics: Sequence[str]) -> dict[str, str]:
    """Return the values of a study's objectives with their intervals; else the score, or each task's
    metric.
    """
    rows = intervals(one)
    shown = [name for name in metrics if name in rows] or [name for name in rows if name == "score"]
    shown = shown or [*{row["task"]: name for name, row in reversed(rows.items())}.values()][::-1]
    return {name: with_baseline(_interval(rows[name]), rows[name]["baseline"]) for name in shown}


def headline(one: Detailed, metrics: Sequence[str]) -> str:
    """`test, 500 rows: score 0.821 [0.790, 0.848]`."""
    values = ", ".join(map(" ".join, objectives(one, metrics).items()))
    return f"{one.split}, {one.num_rows}: {values}"


def metrics_table(one: Detailed) -> Rows:
    level = one.document["level"]
    interval = f"value [{format_percent(level) if is_number(level) else 'interval'}]"
    return [
        {
            "task": row["task"] or "all tasks",
            "metric": row["metric"],
            interval: _interval(row),
            BASELINE: format_number(row["baseline"]),
        }
        for row in intervals(one).values()
    ]


def classes_table(task: Mapping[str, Any]) -> Rows:
    """A row for each class of a task, the most frequent first, then by F1."""
    classes = sorted(
        task["classes"] or (),
        key=lambda one: (-(one["support"] or 0), one["f1"] if is_number(one["f1"]) else 2.0),
    )
    return [
        {
            "class": one["name"],
            **{name: format_number(one[name]) for name in ("precision", "recall", "f1", "support")},
            "predicted": format_number(one["num_predicted"]),
        }
        for one in classes
    ]


def confusions_table(task: Mapping[str, Any]) -> Rows:
    confusion = task["confusion"] or {"labels": [], "counts": []}
    labels, pairs = confusion["labels"], [pair for pair in confusion["counts"] if pair[0] != pair[1]]
    return [
        {"true": labels[true], "predicted": labels[predicted], "rows": format_number(count)}
        for true, predicted, count in sorted(pairs, key=lambda pair: -pair[2])[:MAX_CONFUSIONS]
    ]


def task_metrics_table(telemetry: Mapping[str, Any]) -> Rows:
    baseline = telemetry.get("baseline") or {}
    return [
        {
            "task": task,
            "metric": metric,
            "value": format_number(value),
            BASELINE: format_number(baseline.get(f"{task}/{metric}")),
        }
        for task, values in (telemetry.get("metrics") or {}).items()
        for metric, value in values.items()
    ]


def source_metrics_table(telemetry: Mapping[str, Any]) -> Rows:
    """The metrics of each source of the data, if a task has several."""
    return [
        {"task": task, "source": source, "metric": metric, "value": format_number(value)}
        for source, tasks in (telemetry.get("source_metrics") or {}).items()
        for task, metrics in tasks.items()
        for metric, value in metrics.items()
    ]


def _interval(row: Mapping[str, Any]) -> str:
    return format_interval(row["value"], row["low"], row["high"])


def evaluation(one: Detailed) -> dict[str, Any]:
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
            f"({format_number(document['num_resamples'])} resamples, fewer for metrics of ranks) "
            "show the chance in the choice of rows, not of seeds. `best constant`: the best value "
            "with one prediction for all rows."
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
    """Return a text as escaped HTML with marks for its spans [name, start, end], with names if `named`.

    The text is cut wherever a span begins or ends, so each piece lies in a span as a whole or not at all.
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
    true, found = _labels(truth), _labels(predicted)
    looks = [("missed", name) for name in true if name not in found]
    looks += [("spurious", name) for name in found if name not in true]
    looks += [("both", name) for name in true if name in found]
    marks = [_MARK.format(look, SIGNS[look], f" {name}") for look, name in looks]
    return Markup(" ").join(marks) if marks else Markup("none")


def _labels(value: Any) -> list[str]:
    return [] if value is None else list(map(str, value)) if isinstance(value, list) else [str(value)]
