import shutil
from pathlib import Path

import pytest
from support.command_line import hpo_command, ok
from support.tiny import write_study


@pytest.fixture(scope="session")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the tiny study was run in fp32 to its end; not to be changed."""
    folder = tmp_path_factory.mktemp("ran")
    study = write_study(folder, checkpoint={"top_k": 1}, amp={"preset": "basic"})
    ok(hpo_command(folder, "run", str(study)))
    return folder


@pytest.fixture
def folder(ran: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(ran, tmp_path / "copy"))
