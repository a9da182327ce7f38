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


def test_folder_waits_for_a_checkpoint_of_another_machine(tmp_path: Path) -> None:
    """A network file system shows an older state for a while."""
    folder = FolderCheckpoints(lease(120))
    [name] = folder.names("step", "key")
    assert folder.names("best", "key") == []
    path = tmp_path / name
    waiting = threading.Thread(target=folder.fetch, args=[path, "key"])
    waiting.start()
    path.mkdir()
    (path / "state.pt").touch()
    waiting.join(60)
    assert not waiting.is_alive()


def test_folder_names_a_missing_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FolderCheckpoints, "wait_seconds", 0.0)
    with pytest.raises(CheckpointError, match=r"step-00000120 was written by .* Do the workers share"):
        FolderCheckpoints(lease(120)).fetch(tmp_path / "trial" / "step-00000120", "key")
