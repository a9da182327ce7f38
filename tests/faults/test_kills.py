"""Workers are killed with SIGKILL wherever they write, and repeatedly; nothing is lost."""

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
from optuna.trial import TrialState
from support.worker_process import (
    KILL_POINTS,
    check_done,
    ended_log,
    finish,
    notes,
    outcome_of,
    run_until_killed,
    start,
    study,
    value_of,
    wait_for,
    work,
)

from hpo.config.study_config import StudyConfig
from hpo.study.claims.lease import MAX_DEATHS
from hpo.study.reading.reader import read_study
from hpo.study.store.schema import claims
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study


@pytest.mark.parametrize(
    ("kind", "point"),
    [("sqlite", point) for point in KILL_POINTS]
    + [
        pytest.param("postgres", point, marks=pytest.mark.postgres)
        for point in ("trial made", "half suggested", "half of the outcome", "trial ended")
    ],
)
def test_killed_worker_is_continued(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, point: str
) -> None:
    storage_url, config, log = request.getfixturevalue(f"{kind}_url"), study(4), tmp_path / "log"
    run_until_killed(work, storage_url, config, log, kill=point, kill_at=2)
    before = notes(log)
    with open_storage(storage_url) as storage:
        counts = storage.trial_counts(config.name)
        assert counts["done"] < config.n_trials, "the kill came too late to test anything"

        finish(start(storage_url, config, log))
        check_done(storage, config, log)
        # Only the trial of the killed worker may have run twice.
        runs = [line["number"] for line in notes(log)]
        assert len(runs) - len(set(runs)) <= 1
        assert {line["number"] for line in before} <= set(runs)


def test_deadly_configuration_ends_as_crashed(sqlite_url: str, tmp_path: Path) -> None:
    config, log = study(6), tmp_path / "log"
    with open_storage(sqlite_url) as storage:
        opened = create_or_resume_study(storage, config)
        while storage.trial_counts("tiny")["done"] < config.n_trials:
            for process in [start(sqlite_url, config, log, crash=signal.SIGSEGV) for _ in range(2)]:
                process.join(60)
                assert process.exitcode is not None, "they wait for each other"
        runs = Counter(line["number"] for line in notes(log))
        crashed = [trial for trial in opened.trials if trial.params["fp_precision"] == "fp16"]
        assert crashed
        for trial in crashed:
            assert (trial.state, trial.constraints) == (TrialState.PRUNED, {"feasible": 1.0})
            assert trial.user_attrs["outcome"] == "crashed"
            assert "died 3 times after step 10, without progress" in trial.user_attrs["outcome_reason"]
            assert runs[trial.number] >= MAX_DEATHS
        for trial in opened.trials:
            assert trial in crashed or trial.user_attrs["outcome"] == outcome_of(trial.params)


TRIAL_SECONDS = 0.6
"""24 trials keep four workers busy during `NUM_KILLS` kills."""
NUM_KILLS = 12

GRID = {
    "fp_precision": {"type": "categorical", "choices": ["fp32", "bf16", "fp16"]},
    "batch_size": {"type": "categorical", "choices": [1, 2, 3, 4, 5, 6, 7, 8]},
}


def check_exact(storage: Storage, config: StudyConfig, log: Path, num_killed_after_end: int = 0) -> None:
    """Check that every trial ended once. A trial killed often at one point may have `crashed`.

    Only trials whose worker was killed between their end and its record train twice to the end.
    """
    with storage.engine.connect() as connection:
        query = sa.select(claims.c.trial_number).where(claims.c.deaths >= MAX_DEATHS)
        crashed = set(connection.execute(query).scalars())
    check_done(storage, config, log, crashed)
    record = read_study(storage, config.name)
    numbers = sorted(worker.number for worker in record.workers)
    assert numbers == list(range(len(numbers))), "numbers are unique"
    for trial in record.trials:
        assert trial.outcome != "complete" or trial.values == (value_of(trial.params),)
    ended = Counter(line["number"] for line in notes(ended_log(log)))
    assert ended.keys() - crashed == {trial.number for trial in record.trials} - crashed
    assert sum(count - 1 for count in ended.values()) <= num_killed_after_end


def test_workers_are_killed_repeatedly(storage_url: str, tmp_path: Path) -> None:
    """Each point of the grid has one finished trial, with its usual value."""
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


def test_concurrent_workers_begin_exactly_n_trials(storage_url: str, tmp_path: Path) -> None:
    config, log = study(3, search_space=GRID), tmp_path / "log"
    finish(*(start(storage_url, config, log, trial_seconds=0.05) for _ in range(8)), seconds=240)
    with open_storage(storage_url) as storage:
        check_exact(storage, config, log)
        record = read_study(storage, config.name)
    assert (len(record.trials), len(record.workers)) == (3, 8)


@pytest.mark.parametrize("point", ["half of the outcome", "retry made", "trial ended"])
def test_kill_during_a_retry(storage_url: str, tmp_path: Path, point: str) -> None:
    """The failed attempt and its retry are one of the `n_trials`."""
    space = {"fp_precision": ["bf16"], "batch_size": [32]}
    space = {name: {"type": "categorical", "choices": choices} for name, choices in space.items()}
    config, log = study(2, search_space=space, max_retries=1), tmp_path / "log"
    run_until_killed(work, storage_url, config, log, kill=point, kill_at=1)
    work(storage_url, config, log)
    with open_storage(storage_url) as storage:
        check_done(storage, config, log)
        trials = read_study(storage, config.name).trials
        assert [trial.attributes.get("retry_of") for trial in trials] == [None, 0, None, 2]
        assert {trial.outcome for trial in trials} == {"failed"}
