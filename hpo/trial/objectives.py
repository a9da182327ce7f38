"""What an objective or a limit can name, and its value at an evaluation and at the end of a trial.

score                        the mean of the tasks' primary metrics; an r2 below 0 counts as 0
<task>/<metric>              one metric of one task
train_examples_per_second    or another of `limits.MEASURED_METRICS`: what the trial costs
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hpo.config.limits import MEASURED_METRICS
from hpo.config.objective import ObjectiveConfig
from hpo.config.study_config import StudyConfig
from hpo.data.tasks import Task
from hpo.errors import InputError, Nonfinite, did_you_mean
from hpo.extensions import METRICS
from hpo.training.metrics import primary_mean


def check_metric(metric: str, tasks: Sequence[Task], key: str = "objective.metric") -> None:
    """Raise InputError unless an objective or a limit, as `key` of the study file does, can name it."""
    of_tasks = [f"{task.name}/{name}" for task in tasks for name in task.metrics]
    known = ["score", *of_tasks, *MEASURED_METRICS]
    if metric not in known:
        raise InputError(f"{key}: no task of this study has {metric!r}.{did_you_mean(metric, known)}")


def check_metrics(study: StudyConfig, tasks: Sequence[Task]) -> None:
    """Raise InputError unless the tasks have what the study's objectives and limits name."""
    for objective in study.objective:
        check_metric(objective.metric, tasks)
    for metric in study.constraints:
        check_metric(metric, tasks, "constraints")


def objective_value(
    metric: str,
    metrics: Mapping[str, Mapping[str, float]],
    tasks: Sequence[Task],
    measured: Mapping[str, float | None],
) -> float:
    """The value of a metric: `score` is the mean of the tasks' primary metrics.

    None in `measured`, and so NaN, is what no step has given yet. Raises InputError when the evaluation did
    not give a metric, because no row of the split was labelled, and Nonfinite where one that the study's own
    code brings is not defined.
    """
    value: float | None
    named = [(task.name, task.primary_metric) for task in tasks] if metric == "score" else []
    for task_name, name in [*named, *([metric.split("/")] if "/" in metric else [])]:
        if name in METRICS and metrics[task_name] and name not in metrics[task_name]:
            raise Nonfinite(f"the metric {task_name}/{name} is not defined for these predictions.")
    if metric == "score":
        value = primary_mean(tasks, metrics)
    elif "/" in metric:
        task_name, _, name = metric.partition("/")
        value = metrics[task_name].get(name)
    else:
        seen = measured[metric]
        return math.nan if seen is None else seen
    if value is None or not math.isfinite(value):
        raise InputError(f"the metric {metric} has no value: the validation split has no labels for it.")
    return float(value)


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
        if name not in MEASURED_METRICS and metrics is not None:
            with suppress(Nonfinite):
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
