"""Workers are killed with SIGKILL at every place where they write, and again and again; nothing is lost."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import Counter
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from optuna.trial import TrialState
from support.worker_process import (
    PLACES,
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
from hpo.study.reading.overview import list_studies
from hpo.study.reading.reader import read_study
from hpo.study.store.schema import claims
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study


@pytest.mark.parametrize(
    ("kind", "place"),
    [("sqlite", place) for place in PLACES]
    + [
        pytest.param("postgres", place, marks=pytest.mark.postgres)
        for place in ("trial made", "half suggested", "half of the outcome", "trial ended")
    ],
)
def test_killed_worker_is_continued(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, place: str
) -> None:
    storage_url, config, log = request.getfixturevalue(f"{kind}_url"), study(4), tmp_path / "log"
    run_until_killed(work, storage_url, config, log, kill=place, kill_at=2)
    before = notes(log)
    with open_storage(storage_url) as storage:
        counts = storage.trial_counts(config.name)
        assert counts["done"] < config.n_trials, "the kill came too late to test anything"

        finish(start(storage_url, config, log))
        check_done(storage, config, log)
        # Only the trial in flight may have been run twice.
        runs = [line["number"] for line in notes(log)]
        assert len(runs) - len(set(runs)) <= 1
        assert {line["number"] for line in before} <= set(runs)


def test_configuration_that_kills_its_process_ends_as_crashed(sqlite_url: str, tmp_path: Path) -> None:
    config, log = study(6), tmp_path / "log"
    with open_storage(sqlite_url) as storage:
        opened = create_or_resume_study(storage, config)
        while storage.trial_counts("tiny")["done"] < config.n_trials:
            pair = [start(sqlite_url, config, log, crash=signal.SIGSEGV) for _ in range(2)]
            alive = {process.sentinel: process for process in pair}
            while alive:  # one may wait for what the other, dead, has
                ended = [alive.pop(sentinel) for sentinel in wait(list(alive), 60)]
                assert ended, "they wait for each other"
                for process in ended:
                    process.join()
        runs = Counter(line["number"] for line in notes(log))
        crashed = [trial for trial in opened.trials if trial.params["fp_precision"] == "fp16"]
        assert crashed
        for trial in crashed:
            assert (trial.state, trial.constraints) == (TrialState.PRUNED, {"feasible": 1.0})
            assert trial.user_attrs["outcome"] == "crashed"
            reason = "its process died 3 times after step 10, without progress"
            assert reason in trial.user_attrs["outcome_reason"]
            assert runs[trial.number] >= MAX_DEATHS
        for trial in opened.trials:
            if trial not in crashed:
                assert trial.user_attrs["outcome"] == outcome_of(trial.params)


TRIAL_SECONDS = 0.6
"""24 of them keep four workers busy while `NUM_KILLS` are killed."""
NUM_KILLS = 12

GRID = {
    "fp_precision": {"type": "categorical", "choices": ["fp32", "bf16", "fp16"]},
    "batch_size": {"type": "categorical", "choices": [1, 2, 3, 4, 5, 6, 7, 8]},
}


def check_exact(storage: Storage, config: StudyConfig, log: Path, num_killed_after_end: int = 0) -> None:
    """Every trial is done once; one that was killed often in one place may have ended as `crashed`.

    No trial is trained twice to its end, but those whose worker was killed between the end and its record.
    """
    with storage.engine.connect() as connection:
        query = sa.select(claims.c.trial_number).where(claims.c.deaths >= MAX_DEATHS)
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


@pytest.mark.parametrize("n_trials", [3, 20])
def test_eight_workers_that_begin_at_once_begin_exactly_n_trials(
    storage_url: str, tmp_path: Path, n_trials: int
) -> None:
    config, log = study(n_trials, search_space=GRID), tmp_path / "log"
    finish(*(start(storage_url, config, log, trial_seconds=0.05) for _ in range(8)), seconds=240)
    with open_storage(storage_url) as storage:
        check_exact(storage, config, log)
        assert len(read_study(storage, config.name).trials) == n_trials


@pytest.mark.parametrize("place", ["half of the outcome", "retry made", "trial ended"])
def test_a_failed_attempt_and_the_next_one_are_one_of_n_trials_also_after_a_kill(
    storage_url: str, tmp_path: Path, place: str
) -> None:
    """The worker is killed as it stores the failure of the first attempt."""
    space = {"fp_precision": ["bf16"], "batch_size": [32]}
    space = {name: {"type": "categorical", "choices": choices} for name, choices in space.items()}
    config, log = study(2, search_space=space, max_retries=1), tmp_path / "log"
    run_until_killed(work, storage_url, config, log, kill=place, kill_at=1)
    work(storage_url, config, log)
    with open_storage(storage_url) as storage:
        check_done(storage, config, log)
        trials = read_study(storage, config.name).trials
        assert [trial.attributes.get("retry_of") for trial in trials] == [None, 0, None, 2]
        assert {trial.outcome for trial in trials} == {"failed"}


@pytest.mark.postgres
def test_16_workers_start_at_once_on_an_empty_database(postgres_url: str, tmp_path: Path) -> None:
    config, log = study(32), tmp_path / "log"
    finish(*(start(postgres_url, config, log, trial_seconds=0.1) for _ in range(16)), seconds=240)
    with open_storage(postgres_url) as storage:
        check_exact(storage, config, log)
        assert len(read_study(storage, config.name).workers) == 16


def test_workers_of_two_studies_keep_to_their_own_also_after_kills(storage_url: str, tmp_path: Path) -> None:
    configs = [study(6, name=name, pruner={"name": "none"}) for name in ("first", "second")]
    logs = {config.name: tmp_path / config.name for config in configs}
    with open_storage(storage_url) as storage:
        for config in configs:
            create_or_resume_study(storage, config)
        killed = [
            start(storage_url, config, logs[config.name], kill="training", kill_at=2) for config in configs
        ]
        for process in killed:
            process.join(120)
        assert [process.exitcode for process in killed] == [-signal.SIGKILL] * 2
        others = {
            config.name: [start(storage_url, config, logs[config.name]) for _ in range(2)]
            for config in configs
        }
        finish(*(process for processes in others.values() for process in processes))
        for config, dead in zip(configs, killed, strict=True):
            check_done(storage, config, logs[config.name])
            own = {dead.pid, *(process.pid for process in others[config.name])}
            assert {line["pid"] for line in notes(logs[config.name])} <= own
        assert [(found.name, found.state, found.workers) for found in list_studies(storage)] == [
            ("first", "done", 0),
            ("second", "done", 0),
        ]
