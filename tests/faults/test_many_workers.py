"""Workers that are killed one after the other at random moments, and workers by the dozen."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from worker_process import check_done, ended_log, finish, notes, start, study, value_of, wait_for

from hpo.config.study_config import StudyConfig
from hpo.study.claims.lease import MAX_DEATHS
from hpo.study.reading.reader import read_study
from hpo.study.store.schema import slots
from hpo.study.store.storage import Storage, open_storage

TRIAL_SECONDS = 0.6
"""24 of them keep four workers busy while `NUM_KILLS` are killed."""
NUM_KILLS = 12

GRID = {
    "fp_precision": {"type": "categorical", "choices": ["fp32", "bf16", "fp16"]},
    "batch_size": {"type": "categorical", "choices": [1, 2, 3, 4, 5, 6, 7, 8]},
}


def check_exact(storage: Storage, config: StudyConfig, log: Path, num_killed_after_end: int = 0) -> None:
    """Every slot is done once; a trial that was killed often in one place may have ended as `crashed`.

    No trial is trained twice to its end, but those whose worker was killed between the end and its record.
    """
    with storage.engine.connect() as connection:
        query = sa.select(slots.c.trial_number).where(slots.c.deaths >= MAX_DEATHS)
        crashed = set(connection.execute(query).scalars())
    check_done(storage, config, log, crashed)
    record = read_study(storage, config.name)
    numbers = sorted(worker.number for worker in record.workers)
    assert numbers == list(range(len(numbers))), "none is given twice"
    for trial in record.trials:
        assert trial.outcome != "complete" or trial.values == (value_of(trial.params),)
    ended = Counter(line["number"] for line in notes(ended_log(log)))
    assert ended.keys() - crashed == {trial.number for trial in record.trials} - crashed
    assert sum(count - 1 for count in ended.values()) <= num_killed_after_end


def test_one_of_four_workers_is_killed_again_and_again(storage_url: str, tmp_path: Path) -> None:
    """Each point of the grid has one finished trial, with the value of an undisturbed run."""
    config, log = study(24, sampler={"name": "grid"}, search_space=GRID), tmp_path / "log"
    moments = random.Random(0)

    def begin() -> Any:
        return start(storage_url, config, log, trial_seconds=TRIAL_SECONDS)

    workers = [begin() for _ in range(4)]
    killed = []
    wait_for(lambda: len(notes(log)) >= 4)
    for _ in range(NUM_KILLS):
        time.sleep(moments.uniform(0.0, TRIAL_SECONDS / 2))
        victim = moments.choice(workers)
        os.kill(victim.pid, signal.SIGKILL)
        victim.join(60)
        killed.append((victim.pid, victim.exitcode))
        workers[workers.index(victim)] = begin()
    assert [exit_code for _, exit_code in killed] == [-signal.SIGKILL] * NUM_KILLS
    finish(*workers)
    last = {line["pid"]: line["number"] for line in notes(log)}
    ended = {(line["pid"], line["number"]) for line in notes(ended_log(log))}
    num_killed_after_end = sum((pid, last.get(pid)) in ended for pid, _ in killed)
    with open_storage(storage_url) as storage:
        check_exact(storage, config, log, num_killed_after_end)
        tried = [tuple(trial.params.values()) for trial in read_study(storage, config.name).trials]
    points = itertools.product(*(dimension["choices"] for dimension in GRID.values()))
    assert sorted(tried) == sorted(points)


@pytest.mark.postgres
def test_16_workers_start_at_once_on_an_empty_database(postgres_url: str, tmp_path: Path) -> None:
    config, log = study(32), tmp_path / "log"
    finish(*(start(postgres_url, config, log, trial_seconds=0.1) for _ in range(16)), seconds=240)
    with open_storage(postgres_url) as storage:
        check_exact(storage, config, log)
        assert len(read_study(storage, config.name).workers) == 16
