from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import sqlalchemy as sa

from hpo.errors import StorageError
from hpo.study.store import database
from hpo.study.store.database import parse_url, redact, storage_url
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
    ("url", "redacted"),
    [
        ("postgresql://me:secret@host:5432/db", "postgresql://me:***@host:5432/db"),
        ("postgresql://me:se:c@ret@host/db", "postgresql://me:***@host/db"),
        (
            "postgresql://me@host/db?password=secret&sslmode=require",
            "postgresql://me@host/db?password=***&sslmode=require",
        ),
        ("sqlite:///runs/hpo.db", "sqlite:///runs/hpo.db"),
        ("nonsense", "nonsense"),
    ],
)
def test_password_is_hidden(url: str, redacted: str) -> None:
    assert redact(url) == redacted


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
