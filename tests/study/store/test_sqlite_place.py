from __future__ import annotations

import itertools
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.worker_process import study, worker_on

from hpo.errors import StorageError
from hpo.study.claims.process import this_machine
from hpo.study.reading.reader import read_study
from hpo.study.store import sqlite_place
from hpo.study.store.schema import workers
from hpo.study.store.sqlite_place import network_file_system
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
38 27 0:48 / /shared rw - 9p hostshare rw,trans=virtio
39 27 0:49 / /virtual rw - virtiofs myfs rw
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
        ("/shared/hpo.db", "9p"),
        ("/virtual/hpo.db", "virtiofs"),
    ],
)
def test_the_file_system_of_a_path_is_that_of_its_nearest_mount(path: str, found: str | None) -> None:
    assert network_file_system(Path(path), MOUNTS) == found


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "hpo.db").symlink_to("/lustre/hpo.db")
    assert network_file_system(tmp_path / "hpo.db", MOUNTS) == "lustre"


def test_no_study_is_opened_for_running_on_a_network_file_system(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_storage(sqlite_url) as storage:
        create_or_resume_study(storage, study(2))
    monkeypatch.setattr(sqlite_place, "network_file_system", lambda _: "nfs4")
    with pytest.raises(StorageError, match=r"network file system \(nfs4\).*`hpo database start`.*`hpo copy"):
        open_storage(sqlite_url)
    with open_storage(sqlite_url, create=False) as storage:  # so that it can be copied
        assert read_study(storage, "tiny").counts["open"] == 2


def change(storage: Storage, **values: str | float) -> None:
    with storage.engine.begin() as connection:
        connection.execute(sa.update(workers).values(**values))


def test_a_sqlite_database_is_of_one_host(storage_url: str) -> None:
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


@pytest.mark.parametrize("beats", [False, True])
def test_a_host_with_another_clock_is_heard_by_its_heartbeats(sqlite_url: str, beats: bool) -> None:
    """The row of a worker of another host is old by this host's clock, whether it is alive or not."""
    with open_storage(sqlite_url) as storage:
        storage.lease_seconds = 2.0
        with worker_on(storage, study(2)) as theirs:
            theirs._leaving.set()
            theirs._thread.join()
            change(storage, host="node2", machine="node2/of-another-boot/pid:[1]")
            clock = itertools.count(1.0)

            def beat() -> None:
                while not left.wait(0.2):
                    change(storage, last_seen=next(clock))

            change(storage, last_seen=0.0)
            left, thread = threading.Event(), threading.Thread(target=beat)
            if beats:
                thread.start()
            refused = pytest.raises(StorageError, match="workers on node2 have this one open")
            with refused if beats else nullcontext(), worker_on(storage, study(2)) as ours:
                assert ours.number == 1
            left.set()
            if beats:
                thread.join()
