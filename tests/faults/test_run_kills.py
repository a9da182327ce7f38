"""`python -m hpo run` is killed or stopped, or its study is deleted; the next run loses nothing."""

import os
import signal
import time
import warnings
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
import sqlalchemy as sa
from support.command_line import (
    Finished,
    finish,
    hpo_command,
    kill,
    ok,
    saved_steps,
    start_hpo,
    stored,
    wait_until,
)
from support.tiny import write_long_study, write_study
from support.waiting import wait_for

from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import StudyRecord, TrialRecord
from hpo.study.store import optuna_internals as optunas
from hpo.study.store.database import parse_url
from hpo.study.store.process import process_start
from hpo.study.store.storage import open_storage

NUM_STEPS = 60


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a study of long trials."""
    write_long_study(tmp_path, 0.1, per_trial=4, max_steps=NUM_STEPS)
    return tmp_path


def resume(folder: Path) -> str:
    """Run the study to its end, with fewer checkpoints."""
    write_long_study(folder, 30, per_trial=4, max_steps=NUM_STEPS)
    return ok(hpo_command(folder, "run", "tiny.yaml")).out


def check_whole(record: StudyRecord, n_trials: int = 2) -> None:
    """Check that each trial is complete, with all its steps and evaluations."""
    assert record.counts == {"open": 0, "running": 0, "done": n_trials}
    assert [trial.number for trial in record.trials] == list(range(n_trials))
    for trial in record.trials:
        assert (trial.state, trial.outcome) == ("COMPLETE", "complete")
        assert trial.telemetry["num_steps"] == NUM_STEPS
        assert [row.step for row in trial.evaluations] == [15, 30, 45, 60]


def check_continued(before: TrialRecord, after: TrialRecord) -> None:
    assert before.state == "RUNNING"
    assert (after.number, after.params, after.started) == (before.number, before.params, before.started)
    assert 0 < after.telemetry["resumed_from_step"] < NUM_STEPS
    for old, new in zip(before.evaluations, after.evaluations, strict=False):
        assert new.metrics.keys() == old.metrics.keys()
        for name, metric in old.metrics.items():
            # A repeated evaluation in another process may differ in the last bits.
            assert new.metrics[name] == pytest.approx(metric, rel=1e-5)


def test_kill_in_the_middle_of_a_trial(folder: Path) -> None:
    process = start_hpo(folder, "run", "tiny.yaml")
    wait_until(lambda: len(saved_steps(folder, trial=1)) == 2, process)
    kill(process)
    before = stored(folder)
    assert before.counts == {"open": 1, "running": 0, "done": 1}, "killed too late to test anything"
    assert before.trials[1].outcome == "preempted"
    status = ok(hpo_command(folder, "status", "tiny.yaml")).out
    assert "1 of 2 trials ended, 0 running, 1 not started" in status
    assert "1 interrupted trial: the next worker continues there." in status
    newest = saved_steps(folder, trial=1)[-1]

    assert "Study tiny (resumed): 1 of 2 trials ended" in resume(folder)
    after = stored(folder)
    check_whole(after)
    assert after.trials[0] == before.trials[0], "a finished trial is not touched again"
    assert "resumed_from_step" not in after.trials[0].telemetry
    check_continued(before.trials[1], after.trials[1])
    assert after.trials[1].telemetry["resumed_from_step"] == newest
    assert after.trials[0].params != after.trials[1].params


def test_kill_of_the_parent_of_two_workers(folder: Path) -> None:
    """The workers notice the death of their parent, write their checkpoints and leave."""
    process = start_hpo(folder, "run", "tiny.yaml", "--workers", "2")
    wait_until(lambda: bool(saved_steps(folder, 0) and saved_steps(folder, 1)), process)
    starts = {worker.pid: process_start(worker.pid) for worker in stored(folder).workers}
    kill(process)
    wait_for(lambda: all(process_start(pid) != start for pid, start in starts.items() if start))
    before = stored(folder)
    assert before.counts["running"] == 0, "each worker released its trial"
    assert "preempted" in [trial.outcome for trial in before.trials]

    resume(folder)
    after = stored(folder)
    check_whole(after)
    for old, new in zip(before.trials, after.trials, strict=True):
        if old.state == "COMPLETE":
            assert replace(new, detailed={}) == old, "only the best gets its detailed evaluation"
        else:
            check_continued(old, new)


MANY_STEPS = 200


def check_released(folder: Path, left: Finished, n_trials: int = 1) -> None:
    """Check that the begun trials of a stopped run are open, without a worker."""
    assert left.exit_code == 130, left
    record = stored(folder)
    assert record.counts == {"open": n_trials, "running": 0, "done": 0}
    assert {trial.outcome for trial in record.trials} == {"preempted"}
    assert not any(worker.alive for worker in record.workers)


@pytest.mark.parametrize(
    "numbers",
    [
        [signal.SIGINT],
        [signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM],  # a launcher with a warning
    ],
    ids=lambda numbers: "-".join(number.name for number in numbers),
)
def test_signal_during_training(tmp_path: Path, numbers: list[signal.Signals]) -> None:
    """The trial writes a checkpoint at once, and continues from it."""
    write_long_study(tmp_path, 0.1, n_trials=1, max_steps=MANY_STEPS)
    process = start_hpo(tmp_path, "run", "tiny.yaml")
    wait_until(lambda: bool(saved_steps(tmp_path)), process)
    for number in numbers:
        process.send_signal(number)
    left = finish(process)
    check_released(tmp_path, left)
    # The order of concurrent signals is not defined.
    assert any(f"Told to stop: {number.name}.\n" in left.err for number in numbers)
    assert ("Ctrl-C again ends at once" in left.err) == (numbers == [signal.SIGINT])
    step = saved_steps(tmp_path)[-1]

    write_long_study(tmp_path, 600, n_trials=1, max_steps=MANY_STEPS)
    ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    (trial,) = stored(tmp_path).trials
    assert trial.outcome == "complete"
    assert trial.telemetry["num_steps"] == MANY_STEPS
    assert trial.telemetry["resumed_from_step"] == step, "no step is trained twice"


def delete_with_optuna(url: str) -> None:
    with warnings.catch_warnings(action="ignore"):
        storage = optuna.storages.RDBStorage(str(parse_url(url).render_as_string(hide_password=False)))
    optuna.delete_study(study_name="tiny", storage=storage)
    storage.engine.dispose()


def test_study_deleted_under_its_worker_can_start_again(tmp_path: Path, storage_url: str) -> None:
    options = ("--storage", storage_url)
    write_long_study(tmp_path, 0.1, n_trials=3, per_trial=4, max_seconds=6)
    ok(hpo_command(tmp_path, "init", "tiny.yaml", *options))
    running = start_hpo(tmp_path, "worker", "tiny", "--json", *options)
    wait_until(lambda: bool(saved_steps(tmp_path)), running)
    delete_with_optuna(storage_url)
    ended = finish(running)
    assert ended.exit_code == 0, ended
    assert ended.json["ended"] == "closed", ended
    assert "Traceback" not in ended.err
    with open_storage(storage_url) as storage, storage.engine.connect() as connection:
        for table in optunas.tables:
            if table.foreign_keys or table is optunas.studies:
                count = sa.select(sa.func.count()).select_from(table)
                assert connection.execute(count).scalar_one() == 0, table.name

    write_study(tmp_path)
    ok(hpo_command(tmp_path, "run", "tiny.yaml", *options))
    with open_storage(storage_url) as storage:
        trials = read_study(storage, "tiny").trials
    assert [(trial.number, trial.state) for trial in trials] == [(0, "COMPLETE"), (1, "COMPLETE")]
    found = hpo_command(tmp_path, "doctor", "--json", *options).json["findings"]
    assert [finding["check"] for finding in found] == ["checkpoints"], "the folder of the deleted study"


def test_new_study_adopts_no_orphaned_trials(tmp_path: Path) -> None:
    """Rows of a process that wrote to trials of a concurrently deleted study."""
    write_study(tmp_path)
    ok(hpo_command(tmp_path, "init", "tiny.yaml"))
    url = f"sqlite:///{tmp_path}/runs/hpo.db"
    delete_with_optuna(url)
    tables = (optunas.user_attributes, optunas.system_attributes)
    with open_storage(url) as storage, storage.engine.begin() as connection:
        trial = {"study_id": 1, "number": 0, "state": optuna.trial.TrialState.RUNNING}
        connection.execute(sa.insert(optunas.trials).values(trial))
        for trial_id, table in enumerate(tables, 1):
            connection.execute(sa.insert(table).values(trial_id=trial_id, key="left", value_json="1"))
    ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    assert [trial.state for trial in stored(tmp_path).trials] == ["COMPLETE", "COMPLETE"]
    with open_storage(url) as storage, storage.engine.connect() as connection:
        keys = [key for table in tables for key in connection.execute(sa.select(table.c.key)).scalars()]
    assert keys
    assert "left" not in keys


def test_checkpoint_before_the_end_of_a_job(tmp_path: Path) -> None:
    write_long_study(tmp_path, 600, n_trials=1, max_steps=10**7)
    ok(hpo_command(tmp_path, "init", "tiny.yaml"))
    end = int(time.time()) + 25
    left = finish(start_hpo(tmp_path, "worker", "tiny.yaml", SLURM_JOB_END_TIME=str(end)))
    check_released(tmp_path, left)
    assert "Told to stop: its job ends at 20" in left.err
    (checkpoint,) = tmp_path.glob("runs/tiny/checkpoints-*/trial-00000/step-*")
    assert checkpoint.stat().st_mtime < end
    assert saved_steps(tmp_path)[0] > 0


def test_supervisor_restarts_a_killed_worker_and_forwards_signals(tmp_path: Path) -> None:
    write_long_study(tmp_path, 0.1, max_steps=10**7)
    ok(hpo_command(tmp_path, "init", "tiny.yaml"))
    process = start_hpo(tmp_path, "worker", "tiny", "--workers", "2")
    wait_until(lambda: bool(saved_steps(tmp_path, 0) and saved_steps(tmp_path, 1)), process)
    killed = next(worker for worker in stored(tmp_path).workers if worker.trial_number == 0)
    reached = saved_steps(tmp_path, 0)[-1]
    os.kill(killed.pid, signal.SIGKILL)

    def is_restarted() -> bool:
        living = {worker.trial_number for worker in stored(tmp_path).workers if worker.alive}
        return saved_steps(tmp_path, 0)[-1:] > [reached] and living >= {0, 1}

    wait_until(is_restarted, process)
    process.send_signal(signal.SIGUSR1)
    left = finish(process)
    check_released(tmp_path, left, n_trials=2)
    assert "was killed by SIGKILL; it is started again (1 of at most 10 times an hour)" in left.err
    assert len(stored(tmp_path).workers) == 3
