from __future__ import annotations

import pytest
import sqlalchemy as sa

from hpo.study import database
from hpo.study.database import parse_url, redact, storage_url
from hpo.study.storage import open_storage


def test_storage_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPO_STORAGE", raising=False)
    assert storage_url() == "sqlite:///runs/hpo.db"
    monkeypatch.setenv("HPO_STORAGE", "sqlite:///a.db")
    assert storage_url() == "sqlite:///a.db"
    assert storage_url("sqlite:///b.db") == "sqlite:///b.db"


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
