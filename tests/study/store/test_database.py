from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import quote

import pytest
import sqlalchemy as sa
from psycopg.conninfo import make_conninfo

from hpo.errors import StorageError
from hpo.study.store import database
from hpo.study.store.database import parse_url, storage_url, without_password
from hpo.study.store.storage import open_storage


def test_storage_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPO_STORAGE", raising=False)
    assert storage_url() == "sqlite:///runs/hpo.db"
    monkeypatch.setenv("HPO_STORAGE", "sqlite:///a.db")
    assert storage_url() == "sqlite:///a.db"
    assert storage_url("sqlite:///b.db") == "sqlite:///b.db"


def test_url_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, url = tmp_path / "url", "postgresql+psycopg://me:se cret@host/db?sslmode=require"
    file.write_text(f"{url}\n")
    for mode in (0o600, 0o400):
        file.chmod(mode)
        assert storage_url(f"@{file}") == url
    monkeypatch.setenv("HPO_STORAGE", f"@{file}")
    assert storage_url() == url
    monkeypatch.chdir(tmp_path)
    assert storage_url("@url") == url


@pytest.mark.parametrize("mode", [0o604, 0o620])
def test_a_file_with_a_password_is_its_owners_alone(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "url"
    file.write_text("postgresql://me:secret@host/db")
    file.chmod(mode)
    with pytest.raises(StorageError, match=f"its mode is {mode:04o}. Run `chmod 600 {file}`"):
        storage_url(f"@{file}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_group_may_read_what_is_roots(tmp_path: Path) -> None:
    """So Kubernetes hands out secrets, and PostgreSQL reads its key."""
    file = tmp_path / "url"
    file.write_text("sqlite:///a.db")
    file.chmod(0o440)
    assert storage_url(f"@{file}") == "sqlite:///a.db"
    os.chown(file, 65534, 65534)
    with pytest.raises(StorageError, match="only its owner may read it, but its mode is 0440"):
        storage_url(f"@{file}")


@pytest.mark.parametrize("text", ["", "secret", "secret\nsqlite:///a.db"])
def test_a_file_without_a_url_is_not_shown(tmp_path: Path, text: str) -> None:
    file = tmp_path / "url"
    file.touch(mode=0o600)
    file.write_text(text)
    with pytest.raises(StorageError, match=r"must hold the URL of the storage .* in one line") as raised:
        storage_url(f"@{file}")
    assert "secret" not in str(raised.value)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "bytes").touch(mode=0o600)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name, why in (("absent", "No such file"), ("bytes", "it is no text"), (".", "Is a directory")):
        with pytest.raises(StorageError, match=re.escape(why)):
            storage_url(f"@{tmp_path / name}")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:se@cret@host/db",
        "postgresql://me:se@cr/et@host/db",
        "postgresql://me:se@cret@host/db?sslmode=require",
    ],
)
def test_no_part_of_a_password_that_is_not_escaped_is_shown(url: str) -> None:
    with pytest.raises(StorageError, match=r"`@` in its password written as `%40`") as raised:
        parse_url(url)
    assert not any(part in str(raised.value) for part in ("se@", "cret", "cr/et", "cr?et", "ret@"))


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg", "postgresql+psycopg2"])
def test_postgres_urls_get_the_driver_that_is_installed(scheme: str) -> None:
    assert parse_url(f"{scheme}://me:a%40b@host/db").drivername == "postgresql+psycopg"


def test_sqlite_waits_and_logs_ahead(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_SECONDS", 7.0)
    with open_storage(sqlite_url) as storage, storage.engine.connect() as connection:
        pragma = {
            name: connection.execute(sa.text(f"PRAGMA {name}")).scalar()
            for name in ("journal_mode", "synchronous", "busy_timeout")
        }
    assert pragma == {"journal_mode": "wal", "synchronous": 1, "busy_timeout": 7000}


SLASHES = "A relative path needs three slashes, an absolute one four"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite://runs/x.db", f"{SLASHES}: `sqlite:///runs/x.db`"),
        ("sqlite://x.db", f"{SLASHES}: `sqlite:///x.db`"),
        ("sqlite:/x.db", f"{SLASHES}: `sqlite:////x.db`"),
        ("sqlite:x.db", f"{SLASHES}: `sqlite:///x.db`"),
        ("sqlite:/runs/x.db", f"{SLASHES}: `sqlite:////runs/x.db`"),
        ("runs/x.db", "Did you mean `sqlite:///runs/x.db`?"),
        ("/abs/x.db", "Did you mean `sqlite:////abs/x.db`?"),
        ("x.sqlite3", "Did you mean `sqlite:///x.sqlite3`?"),
        ("sqlite://", "must name a file"),
        ("sqlite:///", "must name a file"),
        ("sqlite:////", "must name a file, but `/` is a folder"),
        ("sqlite:///.", "must name a file, but `.` is a folder"),
        ("sqlite:///absent/", "must name a file, but `absent/` is a folder"),
        ("sqlite:///:memory:", "A study in memory would be lost"),
        ("sqlite:///x.db?cache=shared", "`cache` must be left out"),
        (
            "sqlite:///x.db?timeout=30",
            "`timeout` must be left out: hpo sets the options of SQLite itself.",
        ),
        ("sqlite:///file:x.db?uri=true&timeout=30", "`timeout` must be left out"),
        ("sqlite3:///x.db", "names `sqlite3`. Did you mean `sqlite`?"),
        ("SQLite:///x.db", "names `SQLite`. Did you mean `sqlite`?"),
        ("sqlite+aiosqlite:///x.db", "without the driver `aiosqlite`: write `sqlite://`"),
        ("mysql://", "names `mysql`"),
        ("http://host/x.db", "names `http`"),
        ("postgresql+pg8000://me:secret@host/db", "without the driver `pg8000`: write `postgresql://`"),
        ("postgresql://host/?password=secret", "must name a database: postgresql://host/NAME"),
        ("postgres://", "must name a database: postgres:///NAME"),
        ("postgresql://me:secret@host:port/db", "the port must be a number from 1 to 65535"),
        ("postgresql://me:secret@host:/db", "the port must be a number from 1 to 65535"),
        ("postgresql://me:secret@host:99999/db", "the port must be a number from 1 to 65535"),
        ("postgresql://me:secret@host:0/db", "the port must be a number from 1 to 65535"),
        ("postgresql:/me:secret@host/db", "must be a URL such as"),
        ("postgresql://me:secret%00@host/db", "must have no control character"),
        (f"postgresql://me:{'secret' * 99}%00@host/db", "must have no control character"),
        ("postgresql://host/db?password=a\tsecret", "must have no control character"),
        (" postgresql://host/db?password=a secret", "must have no space around it"),
        ("sqlite:///a%00b\x00.db", "must have no control character"),
        (" sqlite:///x.db", "must have no space around it"),
        ("sqlite:///x.db\n", "must have no space around it"),
        ("postgresql://me:secret@host/a\tb", "must have no control character"),
        ("postgresql://me:secret@ho st/db", "the host must have no space"),
        ("sqlite:///x.db,sqlite:///y.db", "must be one URL"),
        *(
            (f"postgresql://host/db?{query}", "each space of a password behind its `?` written as `%20`")
            for query in (
                "password=my secret",
                "sslmode=require&password=my secret",
                "sslpassword=my secret",
                "options=-c search_path=x&password=my secret&a=b",
                "PASSWORD=my secret",
            )
        ),
        ("me:secret@host/db", "must be a URL such as"),
    ],
)
def test_an_unusable_url_is_refused_in_one_line(url: str, message: str) -> None:
    with pytest.raises(StorageError) as raised:
        parse_url(url)
    text = str(raised.value)
    assert message in text
    assert "secret" not in text
    assert "\n" not in text
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(
    "url",
    [
        *("sqlite:///runs/x.db", "sqlite:////abs/x.db", "sqlite:///with space.db", "sqlite:///50%.db"),
        *("sqlite+pysqlite:///x.db", "sqlite:///file:x.db?uri=true", "sqlite:///sqlite:x.db"),
        *("postgres://host/db", "postgresql:///db", "postgresql://me:a%40b@host:5432/db"),
        *(
            "postgresql://host/db?options=-c search_path=x",
            "postgresql://me:pw@h/db?password=x&options=-c a=b",
        ),
        *("postgresql://me:%zz%@[::1]:65535/db?sslmode=require", "postgresql:///?dbname=db&host=/run"),
    ],
)
def test_usable_urls(url: str) -> None:
    assert parse_url(url).get_backend_name() in ("sqlite", "postgresql")


@pytest.mark.parametrize("url", ["postgresql://me:pw@host", "postgresql://me:pw@host/", "postgres://me@host"])
def test_the_database_has_the_name_of_the_user(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """libpq has the same rule."""
    for name in ("PGDATABASE", "PGSERVICE"):
        monkeypatch.delenv(name, raising=False)
    assert parse_url(url).database == "me"
    monkeypatch.setenv("PGDATABASE", "other")
    assert not parse_url(url).database


def test_libpq_may_name_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGDATABASE", "db")
    assert parse_url("postgresql://host").host == "host"


REFUSED = (
    'connection to server at "127.0.0.1", port 1 failed: FATAL: database "hpo" does not exist for postgres'
)


@pytest.mark.parametrize(
    "password",
    [*"pe1. ", "hpo", "postgres", "127.0.0.1", "connection", "server", "failed", "port", "", "%", "***"],
)
def test_words_of_a_message_are_not_masked(password: str) -> None:
    url = sa.URL.create("postgresql", "postgres", password, "127.0.0.1", 1, "hpo")
    text = without_password(url.render_as_string(hide_password=False), REFUSED)
    assert text == REFUSED


@pytest.mark.parametrize("password", ["s", "hpo", "se'c", "a b", "correct-horse-1", "p%{w} @d", "k=v&x"])
@pytest.mark.parametrize(
    "said",
    [
        "cannot open {url}",
        'invalid dsn: "host=h password={conninfo} user=me"',
        "bad option in host=h sslpassword = {conninfo} user=me",
        "postgresql://h/db?password={encoded}&x=1 is refused",
    ],
)
def test_a_password_is_never_printed(password: str, said: str) -> None:
    encoded = quote(password, safe="")
    url = f"postgresql://me:{encoded}@host/db"
    conninfo = make_conninfo(password=password).removeprefix("password=")
    text = without_password(url, said.format(url=url, conninfo=conninfo, encoded=encoded))
    shown = said.format(url="postgresql://me:***@host/db", conninfo="***", encoded="***")
    assert text == shown


@pytest.mark.parametrize("form", ["correct-horse/1", "correct-horse%2F1"])
def test_a_long_password_is_masked_wherever_it_is(form: str) -> None:
    text = without_password("postgresql://me:correct-horse%2F1@host/db", f'something new "{form}"')
    assert text == 'something new "***"'
