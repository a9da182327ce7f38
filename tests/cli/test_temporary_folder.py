from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import hpo
from hpo.cli.temporary_folder import remove_abandoned_folders, temporary_folder

OWNER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from hpo.cli.temporary_folder import temporary_folder
with temporary_folder(Path(sys.argv[1]), "train-") as folder:
    (folder / "step-00000001").mkdir()
    print(folder.name, flush=True)
    sys.stdin.read()
"""


def test_folder_goes_with_its_block(tmp_path: Path) -> None:
    with temporary_folder(tmp_path, "train-") as folder:
        assert folder.parent == tmp_path
        assert folder.name.startswith("train-")
        (folder / "step-00000001").mkdir()
        remove_abandoned_folders(tmp_path, "train-")
        assert (folder / "step-00000001").is_dir()
    assert not list(tmp_path.iterdir())
    with pytest.raises(KeyError), temporary_folder(tmp_path, "train-"):
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_folder_of_a_killed_process_goes_and_that_of_a_live_one_stays(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path), str(Path(hpo.__file__).parents[1])]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as killed, subprocess.Popen(command, **pipes) as live:  # type: ignore[call-overload]
        names = [process.stdout.readline().strip() for process in (killed, live)]
        killed.kill()
        killed.wait()
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
        remove_abandoned_folders(tmp_path, "train-")
        assert [path.name for path in tmp_path.iterdir()] == names[1:]
        live.communicate("")
    assert live.returncode == 0
    assert not list(tmp_path.iterdir())


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    (tmp_path / "train-data").mkdir()
    (tmp_path / "train-notes.txt").write_text("...")
    remove_abandoned_folders(tmp_path, "train-")
    remove_abandoned_folders(tmp_path / "nowhere", "train-")
    assert {path.name for path in tmp_path.iterdir()} == {"train-data", "train-notes.txt"}


def test_folder_of_another_machine_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train-1").mkdir()
    (tmp_path / "train-1" / "owner.lock").write_text("node7")
    remove_abandoned_folders(tmp_path, "train-")
    assert (tmp_path / "train-1").is_dir()
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    remove_abandoned_folders(tmp_path, "train-")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open every file")
def test_folder_of_another_user_stays(tmp_path: Path) -> None:
    with temporary_folder(tmp_path, "train-") as folder:
        (lock,) = folder.iterdir()
        lock.chmod(0)
        remove_abandoned_folders(tmp_path, "train-")
        assert folder.is_dir()
