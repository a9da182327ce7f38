"""Deletion of a study with plain Optuna (the dashboard does it) while workers run its trials."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
import sqlalchemy as sa
from support.command_line import finish, hpo_command, ok, saved_steps, start_hpo, stored, wait_until
from support.tiny import write_long_study, write_study

from hpo.study.reading.reader import read_study
from hpo.study.store import optuna_internals as optunas
from hpo.study.store.database import connect, parse_url
from hpo.study.store.storage import open_storage


@pytest.fixture
def database(tmp_path: Path) -> Iterator[sa.Engine]:
    (tmp_path / "runs").mkdir()
    engine = connect(f"sqlite:///{tmp_path}/runs/hpo.db")
    yield engine
    engine.dispose()


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


def leave_orphans(database: sa.Engine) -> None:
    """Leave rows like a process that wrote to trials of a concurrently deleted study."""
    with database.begin() as connection:
        first = connection.execute(sa.select(sa.func.max(optunas.studies.c.study_id))).scalar() or 0
        trial = {"study_id": first + 1, "number": 0, "state": optuna.trial.TrialState.RUNNING}
        made = connection.execute(
            sa.insert(optunas.trials).values(trial).returning(optunas.trials.c.trial_id)
        )
        trial_id = made.scalar_one()
        for table, of in ((optunas.user_attributes, trial_id), (optunas.system_attributes, trial_id + 1)):
            connection.execute(sa.insert(table).values(trial_id=of, key="left", value_json="1"))


def test_new_study_adopts_no_orphaned_trials(tmp_path: Path, database: sa.Engine) -> None:
    write_study(tmp_path)
    ok(hpo_command(tmp_path, "init", "tiny.yaml"))
    delete_with_optuna(str(database.url))
    leave_orphans(database)
    ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    trials = stored(tmp_path).trials
    assert [trial.state for trial in trials] == ["COMPLETE", "COMPLETE"]
    with database.connect() as connection:
        keys = [
            key
            for table in (optunas.user_attributes, optunas.system_attributes)
            for key in connection.execute(sa.select(table.c.key)).scalars()
        ]
    assert keys
    assert "left" not in keys
