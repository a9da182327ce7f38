"""Each thread uses one connection at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.one_connection import one_connection
from support.worker_process import study, work, worker_on

from hpo.study.claims.ending import end_unfinished
from hpo.study.reading.overview import list_studies
from hpo.study.reading.reader import read_study
from hpo.study.store.copy import copy_study
from hpo.study.store.lifecycle import delete_study, set_state
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study


def copy(storage: Storage, folder: Path) -> None:
    with open_storage(f"sqlite:///{folder}/copy.db") as target:
        copy_study(storage, target, "tiny")


def join(storage: Storage, _: Path) -> None:
    with worker_on(storage, study(2)) as worker:
        worker._beat_once()


def cancel(storage: Storage, _: Path) -> None:
    set_state(storage, "tiny", "cancelled")
    end_unfinished(storage, "tiny")


ACTIONS: dict[str, Callable[[Storage, Path], Any]] = {
    "resume": lambda storage, _: create_or_resume_study(storage, study(3)),
    "join": join,
    "run": lambda storage, folder: work(storage.url, study(9), folder / "log"),
    "run with a budget": lambda storage, folder: work(
        storage.url, study(9, name="other", budget={"hours": 1.0}), folder / "log"
    ),
    "read": lambda storage, _: (read_study(storage, "tiny"), list_studies(storage)),
    "cancel": cancel,
    "delete": lambda storage, _: delete_study(storage, "tiny"),
    "copy": copy,
}


@pytest.mark.parametrize("action", ACTIONS)
def test_no_second_connection_inside_a_transaction(storage_url: str, tmp_path: Path, action: str) -> None:
    with one_connection(), open_storage(storage_url) as storage:
        create_or_resume_study(storage, study(2))
        ACTIONS[action](storage, tmp_path)
