"""The first error of each command for a STUDY that is a broken file, a folder or missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command_line import COMMANDS, hpo_command, refused
from support.worker_process import study

from hpo.study.store.storage import open_storage
from hpo.study.store.studies import create_or_resume_study

OPTIONS = {
    "enqueue": ("--param", "learning_rate=1e-4"),
    "track": ("--to", "tensorboard"),
    "diagnose": ("--trial", "0"),
    "delete": ("--yes",),
    "copy": ("--to", "sqlite:///copy.db"),
    "submit": ("--slurm", "--dry-run"),
    "dashboard": ("--port", "0"),
}
WITHOUT_STUDY = ("studies", "new", "predict", "database start", "database stop", "database status")
BROKEN = {
    "syntax": ("name: m5\n  data: [\n", "Error: studies/syntax.yaml:2: this is not valid YAML: "),
    "unknown": ("name: x\nprunner: {}\n", "Error: studies/unknown.yaml:1: data: "),
    "empty": ("", "Error: studies/empty.yaml: the file is empty."),
    "bytes": (b"\xff\xfe\0", "Error: studies/bytes.yaml: the file must be text in UTF-8, but byte 0 "),
}


@pytest.fixture(scope="module", params=["without a database", "with a database"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of broken studies. The database has another study."""
    made = tmp_path_factory.mktemp("made")
    for name in ("studies", "folder", "runs"):
        (made / name).mkdir()
    for name, (content, _) in BROKEN.items():
        text = content if isinstance(content, bytes) else content.encode()
        (made / "studies" / f"{name}.yaml").write_bytes(text)
    if request.param == "with a database":
        with open_storage(f"sqlite:///{made}/runs/hpo.db") as storage:
            create_or_resume_study(storage, study(2, name="other"))
    return made


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {*WITHOUT_STUDY}))
def test_error_names_broken_file_or_missing_study(folder: Path, command: str) -> None:
    has_database = any((folder / "runs").iterdir())
    options = OPTIONS.get(command, ())
    for name, (_, message) in BROKEN.items() if has_database else [("syntax", BROKEN["syntax"])]:
        for word in (name, "studies/syntax.yaml") if name == "syntax" else (name,):
            finished = refused(hpo_command(folder, command, word, *options, width=400))
            assert finished.err.startswith(message), (word, finished.err)
            assert "There is no study" not in finished.err
    for word in ("there", "./folder") if has_database else ("",):
        finished = refused(hpo_command(folder, command, word, *options, width=400))
        assert finished.err.startswith("Error: "), (word, finished.err)
        assert finished.err.count("\n") == 1
        assert word.removeprefix("./") in finished.err or "There is no study database at" in finished.err
