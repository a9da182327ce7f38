"""A worker is killed with SIGKILL at every place where it writes; the next one must go on without a loss."""

from __future__ import annotations

import signal
from collections import Counter
from multiprocessing.connection import wait
from pathlib import Path

import pytest
from optuna.trial import TrialState
from worker_process import PLACES, check_done, finish, notes, outcome_of, start, study

from hpo.study.claims.lease import MAX_DEATHS
from hpo.study.store.storage import open_storage
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


def test_configuration_that_kills_its_process_ends_as_crashed(sqlite_url: str, tmp_path: Path) -> None:
    config, log = study(6), tmp_path / "log"
    with open_storage(sqlite_url) as storage:
        opened = create_or_resume_study(storage, config)
        while storage.slot_counts("tiny")["done"] < config.n_trials:
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
