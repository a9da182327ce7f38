import os
from pathlib import Path
from urllib.parse import quote

import pytest
import sqlalchemy as sa
from psycopg.conninfo import make_conninfo

from hpo.errors import StorageError
from hpo.study.store import connection as bounds
from hpo.study.store.database import parse_url, storage_url, without_password
from hpo.study.store.storage import open_storage


def test_storage_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPO_STORAGE", raising=False)
    assert storage_url() == "sqlite:///runs/hpo.db"
    monkeypatch.setenv("HPO_STORAGE", " sqlite:///a.db\n")
    assert storage_url() == "sqlite:///a.db"
    assert storage_url("sqlite:///b.db") == "sqlite:///b.db"
    file, url = tmp_path / "url", "postgresql+psycopg://me:se cret@host/db?sslmode=require"
    file.write_text(f"{url}\n")
    file.chmod(0o600)
    monkeypatch.setenv("HPO_STORAGE", f"@{file}")
    assert storage_url() == url


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_group_may_read_files_of_root(tmp_path: Path) -> None:
    """Kubernetes hands out secrets like this. A file with a password is private otherwise."""
    file = tmp_path / "url"
    file.write_text("sqlite:///a.db")
    file.chmod(0o440)
    assert storage_url(f"@{file}") == "sqlite:///a.db"
    os.chown(file, 65534, 65534)
    with pytest.raises(StorageError, match="only its owner may read it, but its mode is 0440"):
        storage_url(f"@{file}")


@pytest.mark.parametrize("text", ["", "secret", "secret\nsqlite:///a.db"])
def test_file_without_a_url_is_not_shown(tmp_path: Path, text: str) -> None:
    file = tmp_path / "url"
    file.touch(mode=0o600)
    file.write_text(text)
    with pytest.raises(StorageError, match="must hold one line: the URL of a file") as raised:
        storage_url(f"@{file}")
    assert "secret" not in str(raised.value)


def test_options_of_sqlite(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "BUSY_SECONDS", 7.0)
    with open_storage(sqlite_url) as storage, storage.engine.connect() as connection:
        pragma = {
            name: connection.execute(sa.text(f"PRAGMA {name}")).scalar()
            for name in ("journal_mode", "synchronous", "busy_timeout")
        }
    assert pragma == {"journal_mode": "wal", "synchronous": 1, "busy_timeout": 7000}


UNUSABLE = """sqlite://x.db sqlite:x.db sqlite:/x.db sqlite:///x.db,sqlite:///y.db sqlite:///x.db?timeout=3
sqlite:///a%00b.db sqlite:///a.db,postgresql://u:secretpw1@h/db hpo.db runs/x /abs/x.sqlite3 me:secret@host/db
sqlite:// sqlite:/// sqlite://// sqlite:///. sqlite:///absent/ sqlite:///:memory: sqlite3:///x.db mysql://
sqlite+aiosqlite:///x.db postgresql:/me:secret@h/d postgresql+pg8000://me:secret@host/db
postgresql://me:secret@host:port/db postgresql://me:secret%00@host/db postgresql://me:secret@secret@host/db"""


@pytest.mark.parametrize(
    "url",
    [
        *UNUSABLE.split(),
        "sqlite:///x.db\n",
        f"postgresql://me:{'secret' * 99}%00@host/db",
        " postgresql://host/db?password=a secret",
        "postgresql://host/db?PASSWORD=my secret&a=b",
        "postgresql://host/db?password=a\tsecret",
    ],
)
def test_unusable_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(StorageError, match=r"must be the URL of a file|`@` in a password as `%40`") as raised:
        parse_url(url)
    text = str(raised.value)
    assert "secret" not in text
    assert "\n" not in text
    assert len(text) < 400
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("password", ["hpo", "se'c", "correct-horse-1", "p%{w} @d", "k=v&x"])
@pytest.mark.parametrize(
    "said",
    [
        "cannot open {url}",
        'invalid dsn: "host=h password={conninfo} user=me"',
        "postgresql://h/db?password={encoded}&x=1 is refused",
    ],
)
def test_password_is_never_printed(password: str, said: str) -> None:
    encoded = quote(password, safe="")
    url = f"postgresql://me:{encoded}@host/db"
    conninfo = make_conninfo(password=password).removeprefix("password=")
    text = without_password(url, said.format(url=url, conninfo=conninfo, encoded=encoded))
    shown = said.format(url="postgresql://me:***@host/db", conninfo="***", encoded="***")
    assert text == shown
