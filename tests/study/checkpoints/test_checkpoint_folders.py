from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpo.errors import CheckpointError
from hpo.study.checkpoints.checkpoint_folders import FolderCheckpoints


def lease(saved_step: int) -> Any:
    return SimpleNamespace(saved_step=saved_step)


def test_folder_waits_for_the_checkpoint_that_was_written_elsewhere(tmp_path: Path) -> None:
    """As with a network file system that shows an older state for a while."""
    folder = FolderCheckpoints(lease(120))
    [name] = folder.names("step", "key")
    assert folder.names("best", "key") == []
    path = tmp_path / name
    looking = threading.Thread(target=folder.fetch, args=[path, "key"])
    looking.start()
    path.mkdir()
    (path / "state.pt").touch()
    looking.join(60)
    assert not looking.is_alive()


def test_folder_says_what_it_cannot_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FolderCheckpoints, "wait_seconds", 0.0)
    with pytest.raises(CheckpointError, match=r"step-00000120 was written by .* Do the workers share"):
        FolderCheckpoints(lease(120)).fetch(tmp_path / "trial" / "step-00000120", "key")


def test_folder_notes_the_newest(tmp_path: Path) -> None:
    of_trial = lease(0)
    folder = FolderCheckpoints(of_trial)
    assert folder.names("step", "key") == [], "nobody has written one"
    folder.sync([tmp_path / name for name in ("best-00000200", "step-00000090", "step-00000100")], "key")
    assert of_trial.saved_step == 100
