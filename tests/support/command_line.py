"""The command line as the tests call it: in this process where that is enough, else in one of its own."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import sqlalchemy as sa
from typer.main import get_command

import hpo
from hpo.cli.commands import app, main
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import StudyRecord
from hpo.study.store.schema import studies
from hpo.study.store.storage import open_storage
from support.forked_program import ForkedProgram, new_program, start_program
from support.waiting import wait_for

ROOT = Path(hpo.__file__).parents[1]
SUPPORT = ROOT / "tests" / "support"
FAULTY_HPO = str(SUPPORT / "faulty_hpo.py")
PYTHON_PATH = os.pathsep.join(
    filter(None, [str(ROOT), str(SUPPORT.parent), os.environ.get("PYTHONPATH", "")])
)
"""PYTHONPATH of started processes: this checkout, its tests, and what was there before."""
COMMANDS: dict[str, Any] = {
    " ".join([name, *inner]): found
    for name, command in get_command(app).commands.items()
    for inner, found in (
        [([one], of) for one, of in getattr(command, "commands", {}).items()] or [([], command)]
    )
}
"""Each command by its words: `run`, `database start`."""
AnyProcess = ForkedProgram | subprocess.Popen[str]


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    exit_code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def hpo_command(folder: Path, *arguments: str, width: int = 100) -> Finished:
    """Run `hpo` in `folder`. An exception that would end in a traceback is raised."""
    out, err = io.StringIO(), io.StringIO()
    # The path is for the processes of `--workers`.
    environment = {"COLUMNS": str(width), "HPO_STORAGE": "", "PYTHONPATH": PYTHON_PATH}
    with (
        chdir(folder),
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "argv", ["hpo", *map(str, arguments)]),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
            exit_code = 0
        except SystemExit as end:
            exit_code = int(end.code or 0)
    return Finished(exit_code, out.getvalue(), err.getvalue())


def stored(folder: Path, name: str = "tiny") -> StudyRecord:
    """A study in the default database of a folder."""
    with open_storage(f"sqlite:///{folder}/runs/hpo.db") as storage:
        return read_study(storage, name)


def change_definition(folder: Path, **changes: Any) -> None:
    """Change keys of the stored study, like a stranger with access to its database."""
    with open_storage(f"sqlite:///{folder}/runs/hpo.db") as storage, storage.engine.begin() as connection:
        definition = json.loads(connection.execute(sa.select(studies)).one().definition) | changes
        connection.execute(sa.update(studies).values(definition=json.dumps(definition)))


def saved_steps(folder: Path, trial: int = 0) -> list[int]:
    """The steps of the checkpoints there that a trial of the tiny study can go on from."""
    paths = folder.glob(f"runs/tiny/checkpoints-*/trial-{trial:05d}/step-*")
    return sorted(int(path.name.removeprefix("step-")) for path in paths)


def ok(finished: Finished) -> Finished:
    assert finished.exit_code == 0, finished.err + finished.out
    return finished


def refused(finished: Finished, *messages: str) -> Finished:
    """Check that the command ended with code 2, said these words, and printed no result."""
    assert (finished.exit_code, finished.out) == (2, ""), finished
    for message in messages:
        assert message in finished.err
    return finished


def start_hpo(
    folder: Path, *arguments: str, program: Sequence[str] = ("-m", "hpo"), **environment: str
) -> AnyProcess:
    """Start `python -m hpo` in `folder`, or another Python program in its place."""
    return start_program(folder, [*program, *map(str, arguments)], _environment(environment))


def start_python(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start `python ARGUMENTS` as such: for what is read from the environment when a package is imported."""
    return new_program(folder, arguments, _environment(environment))


def _environment(given: dict[str, str]) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1", "HPO_STORAGE": "", **given}


def finish(process: AnyProcess, seconds: float = 120) -> Finished:
    out, err = process.communicate(timeout=seconds)
    return Finished(process.returncode, out, err)


def wait_until(condition: Callable[[], bool], process: AnyProcess, seconds: float = 120) -> None:
    """Wait for what `process` should bring about; fail if it ends before."""

    def check() -> None:
        assert process.poll() is None, finish(process)

    wait_for(condition, seconds, check)


def kill(process: AnyProcess) -> None:
    process.kill()
    assert finish(process).exit_code == -signal.SIGKILL
