"""A worker is killed with SIGKILL at every place where it writes; the next one must go on without a loss."""

from __future__ import annotations

import os
import signal
from collections import Counter
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import sqlalchemy as sa
from optuna.trial import TrialState
from worker_process import PLACES, check_done, finish, notes, outcome_of, start, study, wait_for

from hpo.study.deaths import MAX_DEATHS, record_death
from hpo.study.schema import slots
from hpo.study.storage import open_storage


@pytest.mark.parametrize("place", PLACES)
def test_killed_worker_is_continued(storage_url: str, tmp_path: Path, place: str) -> None:
    config, log = study(4), tmp_path / "log"
    killed = start(storage_url, config, log, kill=place, kill_at=2)
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    before = notes(log)
    with open_storage(storage_url) as storage:
        counts = storage.slot_counts(config.name)
        assert counts["done"] < config.n_trials, "the kill came too late to test anything"

        finish(start(storage_url, config, log))
        check_done(storage, config, log)
        # Only the trial in flight may have been run twice.
        runs = [line["number"] for line in notes(log)]
        assert len(runs) - len(set(runs)) <= 1
        assert {line["number"] for line in before} <= set(runs)


def test_all_workers_killed_ten_times_in_one_trial(storage_url: str, tmp_path: Path) -> None:
    """Neither trial is to blame, though none gets further between two deaths."""
    config, log = study(3), tmp_path / "log"
    for round_number in range(1, 11):
        pair = [start(storage_url, config, log, trial_seconds=600) for _ in range(2)]
        wait_for(lambda num=2 * round_number: len(notes(log)) == num)
        for process in pair:
            os.kill(process.pid, signal.SIGKILL)
        for process in pair:
            process.join(60)
    finish(start(storage_url, config, log))
    with open_storage(storage_url) as storage:
        check_done(storage, config, log)
    assert [line["number"] for line in notes(log)].count(0) == 11


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_configuration_that_kills_its_process_ends_as_crashed(
    storage_url: str, tmp_path: Path, number: signal.Signals
) -> None:
    config, log = study(6), tmp_path / "log"
    with open_storage(storage_url) as storage:
        opened = storage.create_or_resume_study(config)
        while storage.slot_counts("tiny")["done"] < config.n_trials:
            pair = [start(storage_url, config, log, crash=number) for _ in range(2)]
            alive = {process.sentinel: process for process in pair}
            while alive:  # one may wait for what the other, dead, has
                ended = [alive.pop(sentinel) for sentinel in wait(list(alive), 60)]
                assert ended, "they wait for each other"
                for process in ended:
                    process.join()
                    record_death(storage, process.pid, process.exitcode)
        runs = Counter(line["number"] for line in notes(log))
        crashed = [trial for trial in opened.trials if trial.params["fp_precision"] == "fp16"]
        assert crashed
        for trial in crashed:
            assert (trial.state, trial.constraints) == (TrialState.PRUNED, {"feasible": 1.0})
            assert trial.user_attrs["outcome"] == "crashed"
            reason = "its process died 2 times after step 10, without progress"
            assert reason in trial.user_attrs["outcome_reason"]
            assert runs[trial.number] >= 2, "one death is none"
        for trial in opened.trials:
            if trial not in crashed:
                assert trial.user_attrs["outcome"] == outcome_of(trial.params)


@pytest.mark.slow
def test_workers_killed_at_random_places(storage_url: str, tmp_path: Path) -> None:
    """Four workers at a time, of which one after the other is killed; in the end the count is exact."""
    config, log = study(40), tmp_path / "log"
    processes = []
    for index, place in enumerate(PLACES * 2):
        processes = [process for process in processes if process.is_alive()]
        processes.append(start(storage_url, config, log, kill=place, kill_at=1 + index % 3))
        if len(processes) == 4:
            processes[0].join(60)
    for process in processes:
        process.join(60)
    finish(start(storage_url, config, log))
    with open_storage(storage_url) as storage:
        # Two may have been killed in one trial while others lived on.
        query = sa.select(slots.c.trial_number).where(slots.c.deaths == MAX_DEATHS)
        with storage.engine.connect() as connection:
            crashed = connection.execute(query).scalars().all()
        check_done(storage, config, log, crashed)
