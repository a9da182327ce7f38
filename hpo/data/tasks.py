"""What a task is: its kind, its classes, its metrics, and the layout of its logits and targets.

A data set names its tasks in `tasks.json`; every task has one of six kinds, and the kind alone decides
the layout of logits and targets, the loss and the metrics:

    kind                  logits        target                      missing  an item is
    single_label          [B, C]        int64 [B]                   -100     a row
    multi_label           [B, C]        float32 [B, C] in {0, 1}    -1       a row
    regression            [B, 1]        float32 [B], raw units      NaN      a row
    token_classification  [B, L, 2N+1]  int64 [B, L]                -100     a token
      spans may overlap   [B, L, 3N]    int64 [B, L, N]             -100     a token
    span_extraction       [B, L, 2]     int64 [B, 2], inclusive     -100     a row
    span_per_label        [B, L, C]     float32 [B, L, C] in {0, 1} -1       a token and class

"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from hpo.config.data_config import TASK_KINDS
from hpo.errors import DataError, did_you_mean

IGNORE_INDEX = -100


# The first metric of a kind is its primary one.
METRICS = {
    "single_label": ("f1_macro", "f1_micro", "accuracy"),
    "multi_label": ("f1_macro", "f1_micro", "exact_match"),
    "token_classification": ("span_f1", "span_overlap_f1", "f1_macro"),
    "span_extraction": (
        "span_f1",
        "span_overlap_f1",
        "exact_match",
        "span_overlap_f1_answerable",
        "exact_match_answerable",
    ),
    "span_per_label": ("span_f1", "span_overlap_f1", "f1_macro"),
    "regression": ("r2", "mae", "rmse"),
}


@dataclass(frozen=True)
class Task:
    """One task of a data set.

    `labels` are the classes, or the span names for the kinds whose truth is spans; empty for regression.
    `target_mean` and `target_std` are those of the train split; a regression head predicts
    `(target - target_mean) / target_std`, so that its loss is of the size of the others.
    """

    name: str
    kind: str
    labels: tuple[str, ...] = ()
    evidence_for: str | None = None
    spans_may_overlap: bool = False
    inside_segment: str | None = None
    target_mean: float = 0.0
    target_std: float = 1.0

    @property
    def level(self) -> str:
        """`sequence` (one vector of logits a window) or `token` (one a token)."""
        return "sequence" if self.kind in ("single_label", "multi_label", "regression") else "token"

    @property
    def num_outputs(self) -> int:
        """Size of the logits' last dimension; for the layouts see the module's table.

        token_classification: O, B-1, I-1, B-2, ... jointly, or (O, B, I) for each name when spans may
        overlap. span_extraction: start and end.
        """
        num_labels = len(self.labels)
        if self.kind == "token_classification":
            return 3 * num_labels if self.spans_may_overlap else 2 * num_labels + 1
        return {"span_extraction": 2, "regression": 1}.get(self.kind, num_labels)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that `hpo.training.metrics.score` gives, the primary one first."""
        return METRICS[self.kind]

    @property
    def primary_metric(self) -> str:
        """The metric that enters the objective `score`."""
        return METRICS[self.kind][0]


# What each kind must say and may say. Other keys describe the data for people and are passed over, unless
# they look like one of these misspelt.
_REQUIRED_KEYS = {
    "single_label": ("classes",),
    "multi_label": ("classes",),
    "token_classification": ("span_names",),
    "span_extraction": ("span_names",),
    "span_per_label": ("span_names", "evidence_for"),
    "regression": (),
}
_OPTIONAL_KEYS = ("spans_may_overlap", "inside_segment", "max_spans")
_KNOWN_KEYS = ("kind", "classes", "span_names", "evidence_for", *_OPTIONAL_KEYS)


def parse_tasks(tasks_json: Mapping[str, Any], where: str) -> tuple[Task, ...]:
    """Return the tasks of a `tasks.json`, in its order.

    `tasks_json` is the file's content, `{"tasks": {name: {"kind": ...}}}`, or the inner mapping alone;
    `where` names it in messages. Raises DataError at the first thing that does not hold.
    """
    if not isinstance(tasks_json, Mapping):
        raise DataError(f"{where}: must be a mapping of tasks, but got {_shown(tasks_json)}.")
    specs = tasks_json.get("tasks", tasks_json)
    if not isinstance(specs, Mapping) or not specs:
        raise DataError(f"{where}: `tasks` must name at least one task, but got {_shown(specs)}.")
    tasks = tuple(_parse_task(name, spec, f"{where}: task `{name}`") for name, spec in specs.items())
    by_name = {task.name: task for task in tasks}
    for task in tasks:
        if task.evidence_for is not None:
            _check_evidence(task, by_name, f"{where}: task `{task.name}`")
    return tasks


def _parse_task(name: Any, spec: Any, at: str) -> Task:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        raise DataError(f"{at}: a name must be a letter followed by letters, digits, `_` or `-`.")
    if name == "score":
        raise DataError(f"{at}: `score` names the objective over all tasks. Give the task another name.")
    if not isinstance(spec, Mapping):
        raise DataError(f"{at}: must be a mapping with the key `kind`, but got {_shown(spec)}.")
    kind = spec.get("kind")
    if kind not in TASK_KINDS:
        raise DataError(f"{at}: unknown kind {_shown(kind)}.{did_you_mean(str(kind), TASK_KINDS)}")
    for key in spec:
        near = get_close_matches(str(key), _KNOWN_KEYS, n=1, cutoff=0.8)
        if key not in _KNOWN_KEYS and near:
            raise DataError(f"{at}: unknown key `{key}`. Did you mean `{near[0]}`?")
    required = _REQUIRED_KEYS[kind]
    for key in required:
        if key not in spec:
            raise DataError(f"{at}: the kind {kind} needs the key `{key}`.")
    labels = _parse_labels(spec, required[0], at) if required else ()
    if kind == "single_label" and len(labels) < 2:
        raise DataError(f"{at}: `classes` must hold at least two classes, but got {list(labels)}.")
    if kind == "span_extraction" and (len(labels) != 1 or spec.get("max_spans", 1) != 1):
        raise DataError(
            f"{at}: span_extraction finds at most one span of one name, but got span_names={list(labels)}, "
            f"max_spans={spec.get('max_spans', 1)}. Use token_classification for several."
        )
    return Task(
        name=name,
        kind=kind,
        labels=labels,
        evidence_for=_typed(spec, "evidence_for", str, at) if kind == "span_per_label" else None,
        spans_may_overlap=bool(_typed(spec, "spans_may_overlap", bool, at)),
        inside_segment=_typed(spec, "inside_segment", str, at),
    )


def _parse_labels(spec: Mapping[str, Any], key: str, at: str) -> tuple[str, ...]:
    labels = spec[key]
    if not isinstance(labels, Sequence) or isinstance(labels, str) or not labels:
        raise DataError(f"{at}: `{key}` must be a list of names, but got {_shown(labels)}.")
    wrong = [label for label in labels if not isinstance(label, str) or not label]
    if wrong:
        raise DataError(f"{at}: `{key}` must hold non-empty strings, but got {_shown(wrong[0])}. Quote it.")
    twice = sorted({label for label in labels if list(labels).count(label) > 1})
    if twice:
        raise DataError(f"{at}: `{key}` must not repeat a name, but {_shown(twice[0])} occurs twice.")
    return tuple(labels)


def _check_evidence(task: Task, by_name: Mapping[str, Task], at: str) -> None:
    assert task.evidence_for is not None
    labelled = by_name.get(task.evidence_for)
    if labelled is None:
        known = [name for name in by_name if name != task.name]
        hint = did_you_mean(task.evidence_for, known) if known else ""
        raise DataError(f"{at}: `evidence_for` names no task: {_shown(task.evidence_for)}.{hint}")
    if labelled.kind not in ("single_label", "multi_label"):
        raise DataError(
            f"{at}: `evidence_for` must name a single_label or multi_label task, "
            f"but `{labelled.name}` is {labelled.kind}."
        )
    for label in task.labels:
        if label not in labelled.labels:
            raise DataError(
                f"{at}: span name {_shown(label)} is no class of `{labelled.name}`."
                f"{did_you_mean(label, labelled.labels)}"
            )


def _typed(spec: Mapping[str, Any], key: str, kind: type, at: str) -> Any:
    value = spec.get(key)
    if value is not None and not isinstance(value, kind):
        raise DataError(f"{at}: `{key}` must be a {kind.__name__}, but got {_shown(value)}.")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def tags_each_name(task: Task) -> bool:
    return task.kind == "token_classification" and task.spans_may_overlap
