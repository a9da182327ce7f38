"""Comparisons whose scores are planted: real studies, workers and looks, but no trial trains."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from worker_process import result, study

from hpo.compare.companion import Request, open_comparison
from hpo.compare.results import Result, judge, look_by_look
from hpo.config.search_space import suggest
from hpo.config.study_config import StudyConfig
from hpo.data.tasks import Task
from hpo.study.device_sampler import WorkerDevice
from hpo.study.stopping import Stop
from hpo.study.storage import Storage
from hpo.study.study_record import StudyRecord
from hpo.study.worker import run_worker

TASKS = (Task("topic", "single_label", ("a", "b")),)
TWO_TASKS = (*TASKS, Task("tone", "single_label", ("a", "b")))
"""The second scores like the first."""
DEVICE = "Example CPU"
SLOWER = {"slow CPU": {"bf16": 0.25}}
"""Of a kind of device, by what its speeds are multiplied."""
SPEED = {"fp32": 100.0, "bf16": 200.0, "fp16": 150.0}

OF_POINTS: Mapping[str, Callable[[float], float]] = {
    "peak_memory_bytes": lambda _: 10.0**6,
    "topic/mae": lambda points: -points,
}
"""Objectives whose value is another one than a hundredth of the points."""

Score = Callable[[dict[str, Any]], float | None]
"""Points of a trial by its parameters; None: its loss is not finite."""


def searched(storage: Storage, score: Score, **changes: Any) -> StudyConfig:
    """A study that has run, with enough trials for every configuration."""
    space = {
        "fp_precision": {"type": "categorical", "choices": ["fp32", "bf16"]},
        "learning_rate": {"type": "categorical", "choices": [1e-5, 3e-5, 1e-4]},
        "init_scale": {"type": "categorical", "choices": [1024.0], "when": {"fp_precision": "bf16"}},
    }
    config = study(40, **{"search_space": space, **changes})
    storage.create_or_resume_study(config)
    run(storage, config, score)
    return config


def run(
    storage: Storage,
    config: StudyConfig,
    score: Score,
    *,
    trials: int = 10**6,
    device: str = DEVICE,
    effective: Mapping[str, str] = MappingProxyType({}),
    speed: Callable[[dict[str, Any]], float] = lambda _: 1.0,
) -> StudyRecord:
    """Be a worker of the study, for so many trials at most, on this kind of device.

    `effective` names what runs in place of a precision; `speed` multiplies that of a trial.
    """
    stop, left = Stop(), [trials]

    def execute(trial: Any, _: Any) -> Any:
        params = suggest(config.search_space, trial)
        left[0] -= 1
        if not left[0]:
            stop.set("enough")
        points = score({**params, "device": device} if device != DEVICE else params)
        if points is None:
            return result("nonfinite")
        precision = params["fp_precision"]
        rate = SPEED[precision] * SLOWER.get(device, {}).get(precision, 1.0)
        metrics = {task.name: {"f1_macro": points / 100, "mae": -points} for task in TWO_TASKS}
        return result(
            "complete",
            values=tuple(
                OF_POINTS.get(one.metric, lambda points: points / 100)(points) for one in config.objective
            ),
            headline={
                "fp_precision_effective": effective.get(precision, precision),
                "train_examples_per_second": rate
                * speed(params)
                * random.Random(f"{precision} {params.get('seed')}").uniform(0.999, 1),
                "peak_memory_bytes": 10**6,
            },
            telemetry={
                "metrics": metrics,
                "test_metrics": metrics,
                "device": {"name": device, "shared": False},
            },
        )

    run_worker(config, storage, execute, device=WorkerDevice(kind=device), stop=stop, poll_seconds=0.01)
    return storage.read_study(config.name)


def begun(storage: Storage, config: StudyConfig, request: Request) -> StudyConfig:
    record = storage.read_study(config.name)
    return open_comparison(storage, record, config, request, runnable=("fp32", "bf16"), has_test=True)


def compared(
    storage: Storage,
    config: StudyConfig,
    score: Score,
    request: Request | None = None,
    devices: tuple[str, ...] = (),
    **how: Any,
) -> Result[Any]:
    """What a comparison comes to, run on `DEVICE`, or on other kinds in turn, of which `score` is told.

    `how` is that of `run`.
    """
    search = storage.read_study(config.name)

    def run_look(companion: StudyConfig) -> StudyRecord:
        storage.create_or_resume_study(companion)
        for device in devices:  # each of them begins some blocks
            run(storage, companion, score, trials=companion.num_slots // 4, device=device)
        for device in devices or (DEVICE,):  # and ends them
            record = run(storage, companion, score, device=device, **how)
        return record

    *_, last = look_by_look(
        storage,
        begun(storage, config, request or Request()),
        run_look,
        lambda record, companion: judge(record, companion, search, TASKS),
    )
    return last
