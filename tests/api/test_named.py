"""A study describes itself in one line, whatever its database is."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa
import yaml
from support.tiny import write_study
from support.worker_process import begin, result, study, worker_on

import hpo
from hpo.study.store import database, storage
from hpo.study.store.storage import open_storage

TWO = [{"metric": "criteria/f1_micro"}, {"metric": "peak_memory_bytes", "direction": "minimize"}]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HPO_STORAGE", raising=False)
    return tmp_path


def test_a_study_without_a_database_describes_its_file(folder: Path) -> None:
    path = write_study(folder, objective=TWO)
    shown = (
        "Study('tiny', storage='sqlite:///runs/hpo.db', "
        "objective='maximize criteria/f1_micro, minimize peak_memory_bytes', trials='none of 2 yet')"
    )
    assert repr(hpo.Study(path)) == shown
    assert repr(hpo.Study(yaml.safe_load(path.read_text()))) == shown
    assert not (folder / "runs" / "hpo.db").exists(), "a description makes nothing"
    assert repr(hpo.Study("other")) == (
        "Study('other', storage='sqlite:///runs/hpo.db', trials='none yet')"
    ), "there is no file of this name either"


def test_a_stored_study_describes_its_progress(folder: Path) -> None:
    url = f"sqlite:///{folder}/my runs #1.db"
    with open_storage(url) as opened, worker_on(opened, study(3)) as worker:
        worker.record_outcome(begin(worker)[0], result("complete", values=(0.75,)))
    before = (folder / "my runs #1.db").read_bytes()
    assert repr(hpo.Study("tiny", storage=url)) == (
        f"Study('tiny', storage='{url}', objective='maximize score', trials='1 of 3 trials ended')"
    )
    assert "trials='none yet'" in repr(hpo.Study("other", storage=url))
    assert (folder / "my runs #1.db").read_bytes() == before


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ada:p:w@d@db.example/x", "postgresql://ada:***@db.example/x"),
        ("postgresql://db.example/x?user=a&password=secret", "postgresql://db.example/x?user=a&password=***"),
        ("@/no/such/file", "@/no/such/file"),
        ("mysql://a:b@c/d", "mysql://a:***@c/d"),
        ("nonsense", "nonsense"),
    ],
)
def test_a_description_opens_no_network_and_shows_no_password(
    folder: Path, url: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((storage, "Storage"), (database, "connect"), (sa, "create_engine")):
        monkeypatch.delattr(module, name)
    described = repr(hpo.Study(write_study(folder), storage=url))
    assert described == f"Study('tiny', storage='{shown}', objective='maximize score', trials='not read')"


@pytest.mark.parametrize("content", [b"", b"no database" * 99, None], ids=["empty", "damaged", "locked"])
def test_a_description_of_an_unusable_file_neither_fails_nor_waits(
    folder: Path, content: bytes | None
) -> None:
    file = folder / "hpo.db"
    file.write_bytes(content or b"")
    locking = sqlite3.connect(file)
    if content is None:
        locking.executescript("CREATE TABLE other (x INT); BEGIN EXCLUSIVE")
    described = repr(hpo.Study(write_study(folder), storage=f"sqlite:///{file}"))
    assert described.endswith("objective='maximize score', trials='not read')")
    locking.close()


def test_an_invalid_study_file_is_described_by_its_name(folder: Path) -> None:
    (folder / "studies").mkdir()
    write_study(folder / "studies", n_trials=0)
    assert repr(hpo.Study("tiny")) == "Study('tiny', storage='sqlite:///runs/hpo.db', trials='none yet')"
