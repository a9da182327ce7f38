"""Names of a study that must exist in its data; objectives and limits, the best evaluation, patience.

score                        the mean of all tasks' primary metrics; an r2 below 0 counts as 0
<task>/<metric>              one metric of one task
train_examples_per_second    or another of `limits.MEASURED_METRICS`: a cost of the trial
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from hpo.code import errors_of_code
from hpo.config.limits import MEASURED_METRICS, ObjectiveConfig
from hpo.config.sections import EvaluationConfig
from hpo.config.study_config import StudyConfig
from hpo.config.trial_settings import OF_TASKS
from hpo.data.dataset import DataSet
from hpo.errors import InputError, did_you_mean
from hpo.tasks.kind import Task
from hpo.training.losses import check_loss
from hpo.training.metrics import primary_mean, right_statistics

REPORTED = "reported"
"""The task of metrics that a study's own training loop reports without one."""


def check_names(study: StudyConfig, tasks: Sequence[Task], splits: Collection[str]) -> None:
    """Raise InputError unless the metrics, losses, tasks and the test split that the study names exist."""
    _check_metric_names(study, tasks)
    if study.evaluation.test and "test" not in splits:
        raise InputError(
            f"evaluation.test: the data must have a test split, but they have {', '.join(splits)}."
        )
    space, names = study.search_space, [task.name for task in tasks]
    for loss in (study.training.loss, *getattr(space.get("loss"), "choices", ())):
        check_loss(tasks, loss)
    for prefix, field in OF_TASKS.items():
        searched = {name.removeprefix(prefix) for name in space if name.startswith(prefix)}
        for name in sorted(searched | getattr(study.training, field).keys()):
            if name not in names:
                raise InputError(f"{prefix}{name}: there is no such task.{did_you_mean(name, names)}")


def _check_metric_names(study: StudyConfig, tasks: Sequence[Task]) -> None:
    """Raise InputError unless each metric of an objective or a limit exists."""
    task_metrics = [f"{task.name}/{name}" for task in tasks for name in task.metrics]
    known = ["score", *task_metrics, *MEASURED_METRICS]
    named = [("objective.metric", objective.metric) for objective in study.objective]
    for key, metric in [*named, *(("constraints", metric) for metric in study.constraints)]:
        if metric not in known:
            raise InputError(f"{key}: no task of this study has {metric!r}.{did_you_mean(metric, known)}")


def check_metric_values(study: StudyConfig, data: DataSet) -> None:
    """Raise InputError unless each named metric has a value for right predictions on validation.

    All labelled rows are scored, which takes seconds for large data.
    """
    right = {}
    for task in data.tasks:
        rows = [row for row in data.splits["validation"] if task.name in row.annotated]
        with errors_of_code():
            right[task.name] = right_statistics(task, rows).scores()
    for metric in study.named_metrics:
        if missing := undefined_metric(metric, right, data.tasks):
            raise InputError(
                f"the metric {missing} must have a value where all predictions are right, but on the "
                "validation split it has none. Use another metric, label more rows, or declare the classes."
            )


def objective_value(
    metric: str,
    metrics: Mapping[str, Mapping[str, float]],
    tasks: Sequence[Task],
    measured: Mapping[str, float | None],
) -> float:
    """Return the value of a metric in an evaluation: NaN for one that is not measured yet.

    Raises InputError if the evaluation lacks the metric (`undefined_metric`).
    """
    value: float | None
    if metric in MEASURED_METRICS:
        value = measured[metric]
        return math.nan if value is None else value
    if metric == "score" and tasks:
        value = primary_mean(tasks, metrics)
    else:
        task_name, name = task_and_name(metric)
        value = metrics.get(task_name, {}).get(name)
    if value is None or not math.isfinite(value):
        raise InputError(f"the metric {metric} has no value on the validation split.")
    return float(value)


def undefined_metric(metric: str, metrics: Mapping[str, Mapping[str, float]], tasks: Sequence[Task]) -> str:
    """Return the task's metric behind `metric` that has no value in an evaluation; empty: there is none."""
    if metric in MEASURED_METRICS:
        return ""
    primary_metrics = [(task.name, task.primary_metric) for task in tasks]
    needed = primary_metrics if metric == "score" and tasks else [task_and_name(metric)]
    missing = (one for one in needed if one[1] not in metrics.get(one[0], {}))
    return next((metric if task == REPORTED else f"{task}/{name}" for task, name in missing), "")


def task_and_name(metric: str) -> tuple[str, str]:
    """Return the task and the name of a metric; a metric of a study's own training loop may have no task."""
    task, _, name = metric.rpartition("/")
    return task or REPORTED, name


def final_values(
    objectives: Sequence[ObjectiveConfig], best: Sequence[float], telemetry: Mapping[str, Any]
) -> tuple[float, ...]:
    """Return the objectives of a trial: metrics of the best evaluation, costs of the whole trial."""
    measured = _measured(telemetry)
    return tuple(
        measured.get(objective.metric, value) if objective.metric in MEASURED_METRICS else value
        for objective, value in zip(objectives, best, strict=True)
    )


def limited_values(
    names: Iterable[str], telemetry: Mapping[str, Any], tasks: Sequence[Task]
) -> dict[str, float | None]:
    """Return the metrics `names` of a trial that has ended, as `final_values` does; None: not known."""
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
    """Return true if an evaluation's values are the best so far, by the first objective.

    Of equal values the later one is better: it has seen more data. A measured objective (memory, throughput)
    says nothing about a model: the last evaluation is the best.
    """
    if old is None or objective.metric in MEASURED_METRICS:
        return True
    sign = 1 if objective.direction == "maximize" else -1
    return sign * new[0] >= sign * old[0]


def quality_objective(objectives: Sequence[ObjectiveConfig]) -> ObjectiveConfig:
    """Return the first objective that is not measured; the score if all are measured."""
    return next((one for one in objectives if one.metric not in MEASURED_METRICS), ObjectiveConfig())


def decision_metrics(objectives: Sequence[str]) -> dict[str, str]:
    """Return {task: metric} of the objectives that name a task: its thresholds are chosen for this metric."""
    with_task = (one for one in reversed(objectives) if "/" in one)
    named = (objective.partition("/") for objective in with_task)
    return {task: metric for task, _, metric in named}


def patience_over(values: Sequence[float], objective: ObjectiveConfig, settings: EvaluationConfig) -> str:
    """Return why the patience of a study is over after these evaluations; empty: it is not.

    Only the first objective counts, as for the best weights. An evaluation improves if its value is better
    than that of the last improvement by more than `min_delta`. NaN, the value of an undefined metric, is no
    improvement. It does not count before the first value.
    """
    sign = 1 if objective.direction == "maximize" else -1
    best, count = -math.inf, 0
    for value in values:
        if sign * value > best + settings.min_delta:
            best, count = sign * value, 0
        elif best > -math.inf:
            count += 1
    if settings.patience is None or count < settings.patience:
        return ""
    by = f" by more than {settings.min_delta:g}" if settings.min_delta else ""
    return f"{objective.metric} has not improved{by} in {count} evaluations (evaluation.patience)"
