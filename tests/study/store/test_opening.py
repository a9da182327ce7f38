"""The tables of a new database, other versions of them, and the file system of a SQLite file."""

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from support.worker_process import run_until_killed, study, worker_on

from hpo.errors import NoDatabaseError, StorageError
from hpo.study.claims.workers import refuse_other_hosts
from hpo.study.reading.reader import read_study
from hpo.study.store import database, schema
from hpo.study.store.database import network_file_system
from hpo.study.store.process import this_machine
from hpo.study.store.schema import workers
from hpo.study.store.storage import open_storage
from hpo.study.store.studies import create_or_resume_study


@pytest.mark.parametrize(
    ("statement", "version"),
    [
        ("UPDATE hpo_version SET version_num = 'v999'", "v999"),
        ("DELETE FROM hpo_version", "an unknown version"),
        ("DROP TABLE hpo_version", "an unknown version"),
    ],
)
def test_tables_of_another_version_are_refused(storage_url: str, statement: str, version: str) -> None:
    with open_storage(storage_url) as storage:
        create_or_resume_study(storage, study(n_trials=3))
        storage.write(lambda it: it.execute(sa.text(statement)))
    message = (
        f"must be of version {schema.VERSION}, but they are of {version}. .*"
        "Name a new database, or use the hpo that made this one"
    )
    with pytest.raises(StorageError, match=message) as refused:
        open_storage(storage_url)
    assert "secret" not in str(refused.value)
    optuna_storage = optuna.storages.RDBStorage(storage_url.replace("postgresql://", "postgresql+psycopg://"))
    assert optuna.load_study(study_name="tiny", storage=optuna_storage).trials == []
    optuna_storage.engine.dispose()


def make_and_die(url: str, statement: str) -> None:
    """Open the database, and die after the first such statement."""

    def die(_connection: Any, _cursor: Any, executed: str, *_: Any) -> None:
        if " ".join(executed.split()).startswith(statement):
            os.kill(os.getpid(), signal.SIGKILL)

    sa.event.listen(sa.Engine, "after_cursor_execute", die)
    open_storage(url).close()


@pytest.mark.parametrize("statement", ["CREATE TABLE hpo_claims", "INSERT INTO hpo_version"])
def test_kill_during_the_creation_leaves_no_tables(storage_url: str, statement: str) -> None:
    run_until_killed(make_and_die, storage_url, statement)
    with pytest.raises(NoDatabaseError, match="holds no study yet"):
        open_storage(storage_url, create=False)
    with open_storage(storage_url) as storage:
        create_or_resume_study(storage, study(n_trials=3))
        assert storage.trial_counts("tiny") == {"open": 3, "running": 0, "done": 0}


MOUNTS = r"""27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 27 0:40 / /home rw,relatime shared:1 - nfs4 server:/home rw
31 30 0:41 / /home/me/local rw - xfs /dev/sdb rw
32 27 0:42 / /with\040blank rw - cifs //server/share rw
33 27 0:43 / /lustre rw - lustre server:/fs rw
34 27 0:44 / /ssh rw - fuse.sshfs me@server:/ rw
35 27 0:45 / /layers rw - fuse.fuse-overlayfs fuse-overlayfs rw
36 27 0:46 / /auto rw - autofs systemd-1 rw
37 27 0:47 / /auto rw - nfs server:/auto rw
"""


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/home/me/runs/hpo.db", "nfs4"),
        ("/home/me/local/hpo.db", None),
        ("/home/me/locally/hpo.db", "nfs4"),
        ("/homes/hpo.db", None),  # on /
        ("/with blank/hpo.db", "cifs"),
        ("/lustre/hpo.db", "lustre"),
        ("/ssh/hpo.db", "fuse.sshfs"),
        ("/layers/hpo.db", None),
        ("/auto/hpo.db", "nfs"),
    ],
)
def test_nearest_mount_has_the_file_system(path: str, found: str | None) -> None:
    assert network_file_system(Path(path), MOUNTS) == found


def test_network_file_system_is_refused(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_storage(sqlite_url) as storage:
        create_or_resume_study(storage, study(2))
    monkeypatch.setattr(database, "network_file_system", lambda _: "nfs4")
    with pytest.raises(StorageError, match=r"network file system \(nfs4\).*`hpo database start`.*`hpo copy"):
        open_storage(sqlite_url)
    with open_storage(sqlite_url, create=False) as storage:  # `hpo copy` needs this
        assert read_study(storage, "tiny").counts["open"] == 2


def test_sqlite_database_has_one_host(storage_url: str) -> None:
    with open_storage(storage_url) as storage, worker_on(storage, study(2)):
        host, boot, _ = this_machine().rsplit("/", 2)
        all_workers, other = sa.update(workers), worker_on(storage, study(2))
        changed = all_workers.values(host="container", machine=f"container/{boot}/pid:[1]")
        storage.write(lambda it: it.execute(changed))
        refuse_other_hosts(storage)  # containers of one host share its kernel
        changed = all_workers.values(host="node2", machine=f"{host}/of-another-boot/pid:[1]")
        storage.write(lambda it: it.execute(changed))
        is_sqlite = storage_url.startswith("sqlite")
        message = "one host at a time, but workers on node2 have"
        with pytest.raises(StorageError, match=message) if is_sqlite else nullcontext(), other:
            assert other.number == 1
