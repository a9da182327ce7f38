"""Comparisons whose scores are planted: on records in memory, or by real workers in a database.

No trial trains. A score is the r2 of a regression, whose rows can have any mean.
"""

import itertools
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
from hpo.config.study_config import StudyConfig
from hpo.device import DeviceInfo
from hpo.study.reading.detailed_evaluations import store_row_statistics
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import StudyRecord, TrialRecord
from hpo.study.running.stopping import Stop
from hpo.study.running.worker import WorkerOptions
from hpo.study.sampling.device_sampler import WorkerDevice
from hpo.study.sampling.points import grid_points
from hpo.study.store.storage import Storage
from hpo.study.store.studies import create_or_resume_study
from hpo.tasks.kind import Task
from hpo.training.metrics import RowStatistics
from support.worker_process import lease_of, result, run_trials, study

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


def plan_of(seeds: int) -> ComparisonConfig:
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
        max_seeds=seeds,
        margin=0.5,
    )


def facts(
    params: Mapping[str, Any], points: float, *, effective: Mapping[str, str] = {}, kept: str = ""
) -> dict[str, Any]:
    """Return the headline and telemetry of a trial with so many points.

    `effective` are precisions in place of those that were asked for; `kept` is such an `optimizer_state`.
    """
    precision = params.get("fp_precision", "fp32")
    noise = random.Random(f"{precision} {params.get('seed')}").uniform(0.999, 1)
    metrics = {task.name: {"r2": points / 100, "mae": -points} for task in TWO_TASKS}
    telemetry: dict[str, Any] = {
        "metrics": metrics,
        "test_metrics": metrics,
        "device": {"name": DEVICE, "shared": False},
    }
    if state := params.get("optimizer_state"):
        state = kept or state
        telemetry["optimizer_state"] = {"effective": state, "bytes": 10**6 * BITS[state] // 32}
    headline = {
        "fp_precision_effective": effective.get(precision, precision),
        "train_examples_per_second": SPEED.get(precision, 50.0) * noise,
        "peak_memory_bytes": 10**6,
    }
    return {"headline": headline, "telemetry": telemetry}


def values_of(config: StudyConfig, points: float) -> tuple[float, ...]:
    return tuple(OF_POINTS.get(one.metric, lambda points: points / 100)(points) for one in config.objective)


def record_of(
    config: StudyConfig,
    points: Sequence[Mapping[str, Any]],
    score: Score,
    lost: str = "nonfinite",
    **how: Any,
) -> StudyRecord:
    """Return the study after trials with these parameters.

    `lost` is the outcome of a trial without a score; `how` are arguments of `facts`.
    """
    trials = []
    for number, params in enumerate(points):
        found = score(dict(params))
        of_trial = facts(params, found or 0.0, **how)
        trials.append(
            TrialRecord(
                number=number,
                state="PRUNED" if found is None else "COMPLETE",
                outcome=lost if found is None else "complete",
                reason="the loss was NaN" if found is None else "",
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


def of_bf16(request: Request) -> Request:
    return replace(request, precisions=request.precisions or ("fp32", "bf16"))


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

    `search` are other scores for the search, and `how` arguments of `record_of`.
    """
    searched = record_of(config, grid_points(config.search_space, 0), search or score)
    plan: ComparisonConfig | None = plan_comparison(searched, config, of_bf16(request), "token")
    while plan:
        comparison = comparison_study(config, plan, has_test=True)
        record = record_of(comparison, plan.points(), score, **how)
        rows = {
            one.number: {task.name: statistics(task, score(one.params) or 0.0) for task in tasks}
            for one in record.trials
            if one.values
        }
        result = judge_runs(Runs(record, comparison, tasks, rows))
        plan = result.next_plan
    return result


def searched(storage: Storage, score: Score) -> StudyConfig:
    """Return a finished study."""
    config = search_config()
    run(storage, config, score)
    return config


def run(storage: Storage, config: StudyConfig, score: Score, *, trials: int = 10**6) -> StudyRecord:
    """Work on the study, for so many trials at most."""
    stop, begun = Stop(), itertools.count(1)

    def end(trial: Any) -> Any:
        if next(begun) == trials:
            stop.set("enough")
        points = score(trial.params)
        if points is None:
            return result("nonfinite", reason="the loss was NaN")
        if config.comparison is not None:
            rows = {task.name: statistics(task, points) for task in TWO_TASKS}
            store_row_statistics(storage, lease_of(storage, trial), (config.name, trial.number), rows)
        return result("complete", values=values_of(config, points), **facts(trial.params, points))

    options, device = WorkerOptions(poll_seconds=0.01), WorkerDevice(kind=HERE.kind)
    run_trials(storage, config, end, options=options, device=device, stop=stop)
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
    asked = of_bf16(request) if request.question == "precisions" else request
    record = read_study(storage, config.name)
    return open_comparison(storage, record, config, asked, device=HERE, has_test=True)


def compared(storage: Storage, config: StudyConfig, score: Score, request: Request) -> Result:
    """Return the result of a comparison by workers."""
    search = read_study(storage, config.name)

    def run_round(comparison: StudyConfig) -> StudyRecord:
        create_or_resume_study(storage, comparison)
        return run(storage, comparison, score)

    return run_rounds(storage, begun(storage, config, request), search, TASKS, run_round)
