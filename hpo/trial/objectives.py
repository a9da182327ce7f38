"""What an objective or a limit can name, and its value at an evaluation and at the end of a trial.

score                        the mean of all tasks' primary metrics; an r2 below 0 counts as 0
<task>/<metric>              one metric of one task
train_examples_per_second    or another of `limits.MEASURED_METRICS`: what the trial costs
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from hpo.code import errors_of_code
from hpo.config.limits import MEASURED_METRICS, ObjectiveConfig
from hpo.config.study_config import StudyConfig
from hpo.data.dataset import DataSet
from hpo.errors import InputError, did_you_mean
from hpo.tasks.example import Example
from hpo.tasks.kind import KINDS, Task, kind_of
from hpo.training.metrics import primary_mean

REPORTED = "reported"
"""In place of a task, for what a study's own training loop reports without one."""


def check_metric(metric: str, tasks: Sequence[Task], key: str = "objective.metric") -> None:
    """Raise InputError unless an objective or a limit, as `key` of the study file does, can name it."""
    of_tasks = [f"{task.name}/{name}" for task in tasks for name in task.metrics]
    known = ["score", *of_tasks, *MEASURED_METRICS]
    if metric not in known:
        raise InputError(f"{key}: no task of this study has {metric!r}.{did_you_mean(metric, known)}")


def check_metrics(study: StudyConfig, data: DataSet) -> None:
    """Raise InputError unless each metric that an objective or a limit names has a value on validation.

    A trial is judged there. A metric of the study's own code may depend on the predictions, so only its name
    is checked.
    """
    metrics = [objective.metric for objective in study.objective]
    for metric in metrics:
        check_metric(metric, data.tasks)
    for metric in study.constraints:
        check_metric(metric, data.tasks, "constraints")
    for task in data.tasks:
        for metric in (*metrics, *study.constraints):
            name = task.primary_metric if metric == "score" else metric.removeprefix(f"{task.name}/")
            if name in KINDS[task.kind].metrics:
                _check_value(name, task, data.splits["validation"], metric)


def _check_value(name: str, task: Task, split: Sequence[Example], metric: str) -> None:
    """Raise InputError if the split has one row of the task, and `name` needs two, as r2 does."""
    rows, kind = list(islice((row for row in split if task.name in row.annotated), 2)), kind_of(task)
    if len(rows) > 1:
        return
    with errors_of_code(), np.errstate(all="ignore"):
        known = kind.whole_scores(len(rows), *kind.row_values([kind.truth(row) for row in rows], rows))
    if name not in known:
        raise InputError(
            f"the metric `{metric}` needs a value of {task.name}/{name} on the validation split, "
            f"which has none with {len(rows)} labelled row. Label more rows there, or name another objective."
        )


def objective_value(
    metric: str,
    metrics: Mapping[str, Mapping[str, float]],
    tasks: Sequence[Task],
    measured: Mapping[str, float | None],
) -> float:
    """The value of a metric: `score` is the mean of the tasks' primary metrics.

    None in `measured`, and so NaN, is what no step has given yet. Raises InputError if the evaluation did not
    give the metric, which `undefined_metric` tells.
    """
    value: float | None
    if metric in MEASURED_METRICS:
        seen = measured[metric]
        return math.nan if seen is None else seen
    if metric == "score" and tasks:
        value = primary_mean(tasks, metrics)
    else:
        task_name, name = task_and_name(metric)
        value = metrics.get(task_name, {}).get(name)
    if value is None or not math.isfinite(value):
        raise InputError(f"the metric {metric} has no value on the validation split.")
    return float(value)


def undefined_metric(metric: str, metrics: Mapping[str, Mapping[str, float]], tasks: Sequence[Task]) -> str:
    """The metric of a task that has no value in an evaluation, though an objective or a limit needs it.

    Empty if there is none.
    """
    if metric in MEASURED_METRICS:
        return ""
    of_score = [(task.name, task.primary_metric) for task in tasks]
    needed = of_score if metric == "score" and tasks else [task_and_name(metric)]
    missing = (one for one in needed if one[1] not in metrics.get(one[0], {}))
    return next((metric if task == REPORTED else f"{task}/{name}" for task, name in missing), "")


def task_and_name(metric: str) -> tuple[str, str]:
    """Return the task and the name of a metric; a metric of a study's own training loop may have no task."""
    task, _, name = metric.rpartition("/")
    return task or REPORTED, name


def final_values(
    objectives: Sequence[ObjectiveConfig], best: Sequence[float], telemetry: Mapping[str, Any]
) -> tuple[float, ...]:
    """Metrics of the best evaluation; what was measured, of the whole trial."""
    measured = _measured(telemetry)
    return tuple(
        measured.get(objective.metric, value) if objective.metric in MEASURED_METRICS else value
        for objective, value in zip(objectives, best, strict=True)
    )


def limited_values(
    names: Iterable[str], telemetry: Mapping[str, Any], tasks: Sequence[Task]
) -> dict[str, float | None]:
    """The metrics `names` of a trial that has ended as `final_values`, wherever it has; None: not known."""
    measured, metrics = _measured(telemetry), telemetry.get("metrics")
    values: dict[str, float | None] = {name: measured.get(name) for name in names}
    for name in values:
        if name not in MEASURED_METRICS and metrics and not undefined_metric(name, metrics, tasks):
            values[name] = objective_value(name, metrics, tasks, measured)
    return values


def _measured(telemetry: Mapping[str, Any]) -> dict[str, Any]:
    peak = {"peak_memory_bytes": telemetry.get("peak_memory_bytes")}
    return {**telemetry.get("throughput", {}), **peak}


def is_better(objective: ObjectiveConfig, new: Sequence[float], old: Sequence[float] | None) -> bool:
    """Whether an evaluation's values are the best so far: by the first objective, which is given.

    Of equals the later one is the better, which has seen more data. A measured objective (memory, throughput)
    says nothing of a model: the last evaluation is the best.
    """
    if old is None or objective.metric in MEASURED_METRICS:
        return True
    sign = 1 if objective.direction == "maximize" else -1
    return sign * new[0] >= sign * old[0]


def quality_objective(objectives: Sequence[ObjectiveConfig]) -> ObjectiveConfig:
    """The first that says something of the model as it is trained; the score, to be maximized, where all are
    measured."""
    return next((one for one in objectives if one.metric not in MEASURED_METRICS), ObjectiveConfig())


def decision_metrics(objectives: Sequence[str]) -> dict[str, str]:
    """{task: metric} of the objectives that name one: what the task's thresholds are chosen for."""
    of_tasks = (one for one in reversed(objectives) if "/" in one)
    named = (objective.partition("/") for objective in of_tasks)
    return {task: metric for task, _, metric in named}
