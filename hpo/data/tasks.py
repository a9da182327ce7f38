"""The tasks of a data set, from a `tasks.json` or the study file."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from hpo.config.data_config import TaskConfig, task_configs
from hpo.config.study_file import Problem, one_of, problems_of, show
from hpo.errors import DataError, did_you_mean
from hpo.extensions import metrics_of
from hpo.tasks.kind import KINDS, SHARES, Task, is_error


def parse_tasks(content: Any, where: str) -> tuple[Task, ...]:
    """Return the tasks of a `tasks.json`, in its order."""
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
    """Return the tasks. Raises DataError for too few classes, or evidence without a fitting task."""
    tasks: dict[str, Task] = {}
    problems: list[Problem] = []
    for name, config in configs.items():
        kind = KINDS[config.kind]
        labels = (config.classes if kind.has_classes else config.span_names) or ()
        if len(labels) < kind.min_labels:
            at = (name, "classes" if kind.has_classes else "span_names")
            message = f"must hold at least {kind.min_labels}, but got {show(list(labels))}."
            problems.append(Problem(at, message))
        labels = () if kind.is_number else labels
        evidence_for = config.evidence_for if kind.needed_key == "evidence_for" else None
        given = evidence_for, config.spans_may_overlap, config.inside_segment
        primary = config.primary_metric
        metrics = (*kind.metrics, *metrics_of(config.kind))
        known = [metric for metric in metrics if metric in SHARES or not is_error(metric)]
        if primary is not None and primary not in known:
            problems.append(Problem((name, "primary_metric"), one_of(known, primary)))
        tasks[name] = Task(name, config.kind, labels, *given, primary=primary, target=config.target)
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
    if not KINDS[labelled.kind].has_classes:
        kinds = " or ".join(name for name, kind in KINDS.items() if kind.has_classes)
        message = f"must name a {kinds} task, but `{labelled.name}` is {labelled.kind}."
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
