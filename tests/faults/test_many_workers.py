"""Workers that are killed one after the other at random moments, and workers by the dozen."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from worker_process import evaluate, finish, note, notes, result, start_process, study, wait_for

from hpo.config.search_space import suggest
from hpo.config.study_config import StudyConfig
from hpo.study.claims.lease import MAX_DEATHS
from hpo.study.claims.leases import Lease
from hpo.study.reading.reader import read_study
from hpo.study.running.worker import WorkerOptions, run_worker
from hpo.study.store.schema import slots
from hpo.study.store.storage import open_storage

TRIAL_SECONDS = 1.2
"""24 of them keep four workers busy while 25 are killed."""

GRID = {
    "fp_precision": {"type": "categorical", "choices": ["fp32", "bf16", "fp16"]},
    "batch_size": {"type": "categorical", "choices": [1, 2, 3, 4, 5, 6, 7, 8]},
}


def value_of(params: Mapping[str, Any]) -> float:
    """What a trial with these parameters comes to, whoever runs it."""
    return (len(params["fp_precision"]) + params["batch_size"]) / 100


def labour(url: str, config: StudyConfig, log: Path, trial_seconds: float) -> None:
    """Be a worker whose trials take their time; each notes its begin and its end."""
    with open_storage(url) as storage:
        storage.lease_seconds = 3.0

        def execute(trial: optuna.trial.Trial, lease: Lease) -> Any:
            params = suggest(config.search_space, trial)
            lease.store_params()
            note(log, began=trial.number, pid=os.getpid())
            evaluate(storage, trial, step=10, value=0.25)
            deadline = time.monotonic() + trial_seconds
            while time.monotonic() < deadline:
                lease.check()
                time.sleep(0.01)
            note(log, ended=trial.number, pid=os.getpid())
            return result("complete", values=(value_of(params),), telemetry={"pid": os.getpid()})

        run_worker(config, storage, execute, WorkerOptions(poll_seconds=0.05))


def begin(url: str, config: StudyConfig, log: Path, trial_seconds: float) -> Any:
    return start_process(labour, url, config, log, trial_seconds)


def check_exact(url: str, config: StudyConfig, log: Path, num_killed_after_end: int = 0) -> None:
    """Every slot is done once; a trial that was killed often in one place may have ended as `crashed`.

    No trial is trained twice to its end, but those whose worker was killed between the end and its record.
    """
    with open_storage(url) as storage:
        record = read_study(storage, config.name)
        with storage.engine.connect() as connection:
            query = sa.select(slots.c.trial_number).where(slots.c.deaths >= MAX_DEATHS)
            crashed = set(connection.execute(query).scalars())
    assert record.slots == {"open": 0, "running": 0, "done": config.n_trials}
    assert [trial.number for trial in record.trials] == list(range(config.n_trials))
    assert {trial.number for trial in record.trials if trial.outcome == "crashed"} == crashed
    assert {trial.outcome for trial in record.trials if trial.number not in crashed} == {"complete"}
    for trial in record.trials:
        assert trial.number in crashed or trial.values == (value_of(trial.params),)
    ended = Counter(line["ended"] for line in notes(log) if "ended" in line)
    assert ended.keys() - crashed == set(range(config.n_trials)) - crashed
    assert sum(count - 1 for count in ended.values()) <= num_killed_after_end


def test_one_of_four_workers_is_killed_25_times(storage_url: str, tmp_path: Path) -> None:
    """Each point of the grid has one finished trial, with the value of an undisturbed run."""
    config, log = study(24, sampler={"name": "grid"}, search_space=GRID), tmp_path / "log"
    moments = random.Random(0)
    workers = [begin(storage_url, config, log, TRIAL_SECONDS) for _ in range(4)]
    killed = []
    wait_for(lambda: len(notes(log)) >= 4)
    for _ in range(25):
        time.sleep(moments.uniform(0.0, TRIAL_SECONDS / 2))
        victim = moments.choice(workers)
        os.kill(victim.pid, signal.SIGKILL)
        victim.join(60)
        killed.append((victim.pid, victim.exitcode))
        workers[workers.index(victim)] = begin(storage_url, config, log, TRIAL_SECONDS)
    assert [exit_code for _, exit_code in killed] == [-signal.SIGKILL] * 25
    finish(*workers)
    last = {line["pid"]: "ended" in line for line in notes(log)}
    check_exact(storage_url, config, log, sum(last.get(pid, False) for pid, _ in killed))
    with open_storage(storage_url) as storage:
        tried = [tuple(trial.params.values()) for trial in read_study(storage, config.name).trials]
    points = itertools.product(*(dimension["choices"] for dimension in GRID.values()))
    assert sorted(tried) == sorted(points)


@pytest.mark.postgres
def test_32_workers_start_at_once_on_an_empty_database(postgres_url: str, tmp_path: Path) -> None:
    config, log = study(64), tmp_path / "log"
    workers = [begin(postgres_url, config, log, 0.1) for _ in range(32)]
    for worker in workers:
        worker.join(240)
    assert [worker.exitcode for worker in workers] == [0] * 32
    check_exact(postgres_url, config, log)
    with open_storage(postgres_url) as storage:
        members = read_study(storage, config.name).workers
    assert sorted(worker.number for worker in members) == list(range(32))
