"""What a task is: its kind, its classes, its metrics, and the layout of its logits and targets.

A data set names its tasks in `tasks.json`; every task has one of six kinds, and the kind alone decides
the layout of logits and targets, the losses (`hpo.training.losses`) and the metrics:

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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from hpo.config.data_config import TaskConfig, task_configs
from hpo.config.study_file import Problem, problems_of, show
from hpo.errors import DataError, did_you_mean

IGNORE_INDEX = -100

# The first metric of a kind is its primary one.
METRICS = {
    "single_label": ("f1_macro", "f1_micro", "accuracy"),
    "multi_label": ("f1_macro", "f1_micro", "exact_match"),
    "token_classification": ("span_f1", "span_overlap_f1", "f1_macro"),
    "span_extraction": ("span_f1", "span_overlap_f1", "exact_match"),
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


def parse_tasks(content: Any, where: str) -> tuple[Task, ...]:
    """The tasks of a `tasks.json`, in its order; see `read_task_configs` and `make_tasks`."""
    return make_tasks(read_task_configs(content, where), where)


def read_task_configs(content: Any, where: str) -> dict[str, TaskConfig]:
    """Check the content of a `tasks.json`: `{"tasks": {name: {"kind": ...}}}`, or the inner mapping alone.

    Raises DataError with all problems, a line each; `where` names the file in it.
    """
    tasks = content.get("tasks", content) if isinstance(content, Mapping) else content
    if not isinstance(tasks, Mapping):
        raise DataError(f"{where}: must be a mapping of tasks, but got {show(tasks)}.")
    try:
        return task_configs(tasks)
    except ValidationError as error:
        problems = problems_of(error)
        raise DataError("\n".join(_line(where, problem) for problem in problems)) from None


def make_tasks(configs: Mapping[str, TaskConfig], where: str) -> tuple[Task, ...]:
    """The tasks whose classes are known by now. Raises DataError for too few, or evidence that fits none."""
    tasks: dict[str, Task] = {}
    problems: list[Problem] = []
    for name, config in configs.items():
        labels = (config.classes if config.has_classes else config.span_names) or ()
        at_least = {"single_label": 2, "multi_label": 1, "span_per_label": 1}.get(config.kind, 0)
        if len(labels) < at_least:
            at = (name, "classes" if config.has_classes else "span_names")
            problems.append(Problem(at, f"must hold at least {at_least}, but got {show(list(labels))}."))
        labels = () if config.kind == "regression" else labels
        evidence_for = config.evidence_for if config.kind == "span_per_label" else None
        overlap, segment = config.spans_may_overlap, config.inside_segment
        tasks[name] = Task(name, config.kind, labels, evidence_for, overlap, segment)
    for task in tasks.values():
        if task.evidence_for is not None:
            problems += _evidence_problems(task, tasks)
    if problems:
        raise DataError("\n".join(_line(where, problem) for problem in problems))
    return tuple(tasks.values())


def _evidence_problems(task: Task, tasks: Mapping[str, Task]) -> list[Problem]:
    assert task.evidence_for is not None
    at = (task.name, "evidence_for")
    labelled = tasks.get(task.evidence_for)
    if labelled is None:
        hint = did_you_mean(task.evidence_for, [name for name in tasks if name != task.name])
        return [Problem(at, f"there is no task {show(task.evidence_for)}.{hint}")]
    if labelled.kind not in ("single_label", "multi_label"):
        message = f"must name a single_label or multi_label task, but `{labelled.name}` is {labelled.kind}."
        return [Problem(at, message)]
    at = (task.name, "span_names")
    return [
        Problem(at, f"{show(name)} is no class of `{labelled.name}`.{did_you_mean(name, labelled.labels)}")
        for name in task.labels
        if name not in labelled.labels
    ]


def _line(where: str, problem: Problem) -> str:
    task = f" task `{problem.where[0]}`:" if problem.where else ""
    key = "".join(f" {part}:" for part in problem.where[1:])
    return f"{where}:{task}{key} {problem.message}"


def tags_each_name(task: Task) -> bool:
    """Whether each span name has tags of its own, so that spans of different names may overlap."""
    return task.kind == "token_classification" and task.spans_may_overlap
