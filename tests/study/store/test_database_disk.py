from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from support.worker_process import study, worker_on

from hpo.errors import StorageError
from hpo.study.reading.reader import read_study
from hpo.study.store import database
from hpo.study.store.database import network_file_system
from hpo.study.store.process import this_machine
from hpo.study.store.schema import workers
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study

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


def change(storage: Storage, **values: str | float) -> None:
    with storage.engine.begin() as connection:
        connection.execute(sa.update(workers).values(**values))


def test_sqlite_database_has_one_host(storage_url: str) -> None:
    with open_storage(storage_url) as storage, worker_on(storage, study(2)):
        host, boot, _ = this_machine().rsplit("/", 2)
        change(storage, host="container", machine=f"container/{boot}/pid:[1]")
        with worker_on(storage, study(2)):
            pass  # containers of one host share its kernel
        change(storage, host="node2", machine=f"{host}/of-another-boot/pid:[1]", state="live")
        other = worker_on(storage, study(2))
        if storage_url.startswith("sqlite"):
            with (
                pytest.raises(StorageError, match="one host at a time, but workers on node2 have"),
                other,
            ):
                pass
        else:
            with other:
                assert other.number == 2
