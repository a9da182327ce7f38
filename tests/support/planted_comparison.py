"""Comparisons whose scores are planted: on records in memory, or by real workers in a database.

No trial trains. A score is the r2 of a regression, whose rows can have any mean.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hpo.compare.comparison_study import comparison_study, open_comparison
from hpo.compare.planning import FIRST_SEED, Request, plan_comparison
from hpo.compare.results import Result, judge_runs
from hpo.compare.runs import Runs
from hpo.compare.sequential import run_rounds
from hpo.config.comparison import ComparedConfiguration, ComparisonConfig
from hpo.config.search_space import suggest
from hpo.config.study_config import StudyConfig
from hpo.device import DeviceInfo
from hpo.study.reading.detailed_evaluations import store_row_statistics
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import StudyRecord, TrialRecord
from hpo.study.running.stopping import Stop
from hpo.study.running.worker import WorkerOptions, run_worker
from hpo.study.sampling.device_sampler import WorkerDevice
from hpo.study.sampling.points import grid_points
from hpo.study.store.storage import Storage
from hpo.study.store.studies import create_or_resume_study
from hpo.tasks.kind import Task
from hpo.training.metrics import RowStatistics
from support.worker_process import result, study

TASKS = (Task("topic", "regression"),)
TWO_TASKS = (*TASKS, Task("tone", "regression"))
"""The second scores like the first."""
NUM_ROWS = 4000
DEVICE = "Example CPU"
HERE = DeviceInfo("cpu", DEVICE, cpu_features=frozenset({"avx512_bf16"}))
BITS = {"fp32": 32, "int8": 8}
SPEED = {"fp32": 100.0, "bf16": 200.0, "fp16": 150.0}

OF_POINTS: Mapping[str, Callable[[float], float]] = {
    "peak_memory_bytes": lambda _: 10.0**6,
    "topic/mae": lambda points: -points,
}
"""Objectives whose value is another one than a hundredth of the points."""

BASE = {1e-5: 70.0, 3e-5: 80.0, 1e-4: 75.0}
"""Points by learning rate."""
LUCK = (-1.0, 0.0, 2.0)
"""Points by new seed."""

Score = Callable[[dict[str, Any]], float | None]
"""Points of a trial by its parameters; None: its loss is not finite."""


def lucky_score(params: dict[str, Any]) -> float:
    """bf16 loses a point. New seeds differ in luck, and those of the search had 5 points more."""
    value = BASE[params["learning_rate"]] - (params["fp_precision"] == "bf16")
    return value + (LUCK[(params["seed"] - FIRST_SEED) // 3 % 3] if "seed" in params else 5.0)


def planned(study: StudyConfig) -> ComparisonConfig:
    assert study.comparison is not None
    return study.comparison


def search_config(**changes: Any) -> StudyConfig:
    """A study with a trial for every configuration."""
    space = {
        "fp_precision": {"type": "categorical", "choices": ["fp32", "bf16"]},
        "learning_rate": {"type": "categorical", "choices": [1e-5, 3e-5, 1e-4]},
    }
    return study(6, **{"search_space": space, "sampler": {"name": "grid", "seed": 3}, **changes})


def plan_of(seeds: int, max_seeds: int = 0) -> ComparisonConfig:
    """Return a plan of bf16 against fp32 in one configuration, with so many seeds."""
    return ComparisonConfig(
        study="tiny",
        study_token="token",
        precisions=("fp32", "bf16"),
        configurations=(ComparedConfiguration(trial=0, params={}),),
        top=1,
        first_seed=100,
        seeds=seeds,
        num_seeds={"fp32": seeds, "bf16": seeds},
        max_seeds=max_seeds or seeds,
        margin=0.5,
    )


def facts(params: Mapping[str, Any], points: float, **how: Any) -> dict[str, Any]:
    """Return the headline and telemetry of a trial with so many points."""
    precision = params.get("fp_precision", "fp32")
    rate = SPEED.get(precision, 50.0)
    metrics = {task.name: {"r2": points / 100, "mae": -points} for task in TWO_TASKS}
    return {
        "headline": {
            "fp_precision_effective": how.get("effective", {}).get(precision, precision),
            "train_examples_per_second": rate
            * random.Random(f"{precision} {params.get('seed')}").uniform(0.999, 1),
            "peak_memory_bytes": 10**6,
        },
        "telemetry": {
            "metrics": metrics,
            "test_metrics": metrics,
            "device": {"name": DEVICE, "shared": False},
            **stored(params, **how),
        },
    }


def stored(params: Mapping[str, Any], *, kept: str = "", **_: Any) -> dict[str, Any]:
    """The facts of an `optimizer_state`; `kept` is what it is where that is not what it asked for."""
    if not (requested := params.get("optimizer_state")):
        return {}
    effective = kept or requested
    return {"optimizer_state": {"effective": effective, "bytes": 10**6 * BITS[effective] // 32}}


def values_of(config: StudyConfig, points: float) -> tuple[float, ...]:
    return tuple(OF_POINTS.get(one.metric, lambda points: points / 100)(points) for one in config.objective)


def record_of(
    config: StudyConfig, points: Sequence[Mapping[str, Any]], score: Score, **how: Any
) -> StudyRecord:
    """Return the study after trials with these parameters.

    `how` has the arguments of `facts`, and the outcome of a trial without a score (`lost`).
    """
    trials = []
    for number, params in enumerate(points):
        found = score(dict(params))
        of_trial = facts(params, found or 0.0, **how)
        trials.append(
            TrialRecord(
                number=number,
                state="PRUNED" if found is None else "COMPLETE",
                outcome="complete" if found is not None else how.get("lost", "nonfinite"),
                reason="" if found is not None else "the loss was NaN",
                params=dict(params),
                values=None if found is None else values_of(config, found),
                started=None,
                ended=None,
                seconds=2.0,
                attributes=of_trial["headline"],
                telemetry=of_trial["telemetry"],
            )
        )
    goals = [(one.metric, one.direction) for one in config.objective]
    names, directions = zip(*goals, strict=True)
    return StudyRecord(config.name, names, directions, {}, trials, [], {"done": len(trials)})


def judged(
    config: StudyConfig,
    score: Score,
    request: Request,
    *,
    search: Score | None = None,
    tasks: Sequence[Task] = TASKS,
    **how: Any,
) -> Result:
    """Return the result of a comparison on records in memory.

    Args:
        search: other scores for the search.
        how: arguments of `facts`.
    """
    searched = record_of(config, grid_points(config.search_space, 0), search or score)
    asked = replace(request, precisions=request.precisions or ("fp32", "bf16"))
    plan = plan_comparison(searched, config, asked, "token")
    while True:
        comparison = comparison_study(config, plan, has_test=True)
        record = record_of(comparison, plan.points(), score, **how)
        rows = {
            one.number: {task.name: statistics(task, score(one.params) or 0.0) for task in tasks}
            for one in record.trials
            if one.values
        }
        result = judge_runs(Runs(record, comparison, tasks, rows))
        if result.next_plan is None:
            return result
        plan = result.next_plan


def searched(storage: Storage, score: Score, **changes: Any) -> StudyConfig:
    """Return a finished study."""
    config = search_config(**changes)
    create_or_resume_study(storage, config)
    run(storage, config, score)
    return config


def run(storage: Storage, config: StudyConfig, score: Score, *, trials: int = 10**6) -> StudyRecord:
    """Work on the study, for so many trials at most."""
    stop, left = Stop(), [trials]

    def execute(trial: Any, lease: Any) -> Any:
        params = suggest(config.search_space, trial)
        left[0] -= 1
        if not left[0]:
            stop.set("enough")
        points = score(params)
        if points is None:
            return result("nonfinite", reason="the loss was NaN")
        if config.comparison is not None:
            rows = {task.name: statistics(task, points) for task in TWO_TASKS}
            store_row_statistics(storage, lease, (config.name, trial.number), rows)
        return result("complete", values=values_of(config, points), **facts(params, points))

    run_worker(
        config,
        storage,
        execute,
        WorkerOptions(poll_seconds=0.01),
        device=WorkerDevice(kind=HERE.kind),
        stop=stop,
    )
    return read_study(storage, config.name)


def statistics(task: Task, points: float) -> RowStatistics:
    """Rows that add alike to an r2 of so many points, and to an error of -points."""
    ones = np.ones(NUM_ROWS)
    values = {
        "absolute": -points * ones,
        "squared": (1 - points / 100) * ones,
        "target": ones * (-1) ** np.arange(NUM_ROWS),
        "target_squared": ones,
    }
    return RowStatistics(task, NUM_ROWS, np.arange(NUM_ROWS), {}, values)


def begun(storage: Storage, config: StudyConfig, request: Request) -> StudyConfig:
    record = read_study(storage, config.name)
    if request.question == "precisions" and request.precisions is None:
        request = replace(request, precisions=("fp32", "bf16"))
    return open_comparison(storage, record, config, request, device=HERE, has_test=True)


def compared(storage: Storage, config: StudyConfig, score: Score, request: Request) -> Result:
    """Return the result of a comparison by workers."""
    search = read_study(storage, config.name)

    def run_round(comparison: StudyConfig) -> StudyRecord:
        create_or_resume_study(storage, comparison)
        return run(storage, comparison, score)

    return run_rounds(storage, begun(storage, config, request), search, TASKS, run_round)
