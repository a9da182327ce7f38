"""Unusable databases: one clear message for each, without a password."""

import re
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.postgres import PASSWORD, USER, PostgresServer
from support.worker_process import study

from hpo.cluster.postgres.postgres_server import certificate
from hpo.errors import HpoError, OutageError, RunError, StorageError
from hpo.study.store.schema import compat
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study


def refusal(url: str) -> HpoError:
    """Open the storage, expect an error and check its form."""
    with pytest.raises(HpoError) as raised:
        open_storage(url).close()
    message = str(raised.value)
    assert "secret" not in message
    assert PASSWORD not in message
    assert "Traceback" not in message
    assert "\n" not in message
    assert len(message) < 700
    return raised.value


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite:////no/such/folder/hpo.db", "folder `/no/such/folder` of sqlite:.* must exist"),
        ("postgresql://me:secret@host.invalid/db", "the host cannot be found"),
        ("postgresql://me:secret@127.0.0.1:1/db", "no database answers there"),
    ],
)
def test_url(url: str, message: str) -> None:
    error = refusal(url)
    assert error.exit_code == 2
    assert re.search(message, str(error))


def test_not_a_database(tmp_path: Path) -> None:
    path = tmp_path / "hpo.db"
    open_storage(f"sqlite:///{path}").close()
    path.write_bytes(path.read_bytes()[:5000])
    before = path.read_bytes()
    assert "it must be a SQLite database" in str(refusal(f"sqlite:///{path}"))
    assert path.read_bytes() == before


def test_read_only(sqlite_url: str, tmp_path: Path) -> None:
    """By an option of SQLite, because root may write everywhere."""
    with open_storage(sqlite_url) as storage:
        create_or_resume_study(storage, study(2))
    before = (tmp_path / "hpo.db").read_bytes()
    with open_storage(sqlite_url) as storage:
        pragma = sa.text("PRAGMA query_only = 1")
        sa.event.listen(storage.engine, "begin", lambda connection: connection.execute(pragma))
        with pytest.raises(StorageError, match="must be writable"):
            create_or_resume_study(storage, study(3))
    assert (tmp_path / "hpo.db").read_bytes() == before


def test_disk_full(sqlite_url: str) -> None:
    with open_storage(sqlite_url) as storage:
        with storage.engine.connect() as connection:
            pages = connection.execute(sa.text("PRAGMA page_count")).scalar_one()
        limit = sa.text(f"PRAGMA max_page_count={pages}")
        sa.event.listen(storage.engine, "begin", lambda connection: connection.execute(limit))
        with pytest.raises(RunError, match=r"its disk is full\. Make room") as raised:
            storage.put_compat("key", {"long": "x" * 200_000})
        assert raised.value.exit_code == 1
    with open_storage(sqlite_url) as storage:
        assert storage.get_compat("key") is None


@pytest.mark.postgres
def test_refusals_of_a_server(postgres_server: PostgresServer, postgres_url: str) -> None:
    name = postgres_url.rpartition("/")[2]
    with postgres_server.connect(name) as connection:
        connection.execute("DROP ROLE IF EXISTS guest")
        connection.execute("CREATE ROLE guest LOGIN PASSWORD 'guest secret'")
    no_password = postgres_url.replace(postgres_server.url(name).split("@")[0], f"postgresql://{USER}")
    guest = postgres_server.url(name, user="guest", password="guest secret")
    refused = "the server refuses this user and password"
    expected = (
        (postgres_server.url(name, password="secret"), refused),
        (no_password, refused),
        (postgres_server.url("nowhere"), "the server has no such database"),
        (f"{postgres_url}?options=-c%20default_transaction_read_only%3Don", "must be writable"),
        (guest, "must be allowed to create tables"),
        *(
            (f"{postgres_url}?{option}", "must fit")
            for option in ("connect_timeout=abc", "port=abc", "options=x")
        ),
        (f"{postgres_url}?options=-c%20work_mem%3Dabc", "must fit"),
        (f"{postgres_url}?options=-c%20nothing%3D1", "must fit"),
    )
    for url, message in expected:
        assert message in str(refusal(url))
    open_storage(postgres_url).close()
    assert "must be allowed to create tables" in str(refusal(guest)), "with tables of another user"


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("sslmode=disable", "must fit.*no encryption"),
        ("sslmode=verify-full&sslrootcert={other}", "must fit.*certificate verify failed"),
        ("sslmode=require&colour=red", "must fit.*colour"),
    ],
)
def test_refused_tls_connections(
    tls_server: PostgresServer, tmp_path: Path, options: str, message: str
) -> None:
    other = certificate(tmp_path, ["127.0.0.1"], {})
    with tls_server.database() as url:
        assert re.search(message, str(refusal(f"{url}?{options.format(other=other)}")))


def insert_compat(storage: Storage, key: str) -> None:
    with storage.engine.begin() as connection:
        connection.execute(sa.insert(compat).values(key=key, result="{}", created=storage.now))


@pytest.mark.postgres
def test_failover_is_an_outage(postgres_server: PostgresServer, postgres_url: str) -> None:
    """The server of the connection accepts no writes any more; another one does."""
    name = postgres_url.rpartition("/")[2]
    with open_storage(postgres_url) as storage, postgres_server.connect("postgres") as server:
        storage.put_compat("key", {"a": 1})
        server.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        storage.close()
        with pytest.raises(OutageError, match="read-only transaction"):
            storage.attempt(lambda: insert_compat(storage, "b"))
        server.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
        assert storage.put_compat("b", {"b": 2}) == {"b": 2}, "on a new connection"
