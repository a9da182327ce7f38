"""Python programs in processes of their own, forked from one that has imported what takes them seconds."""

import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import torch

from support.worker_process import CONTEXT, start_process


class ForkedProgram:
    """`python ARGUMENTS` in `folder`, in a session of its own; what tests use of a `subprocess.Popen`."""

    def __init__(self, folder: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        out, err = CONTEXT.Pipe(duplex=False), CONTEXT.Pipe(duplex=False)
        given = (str(folder), list(arguments), dict(environment), out[1], err[1])
        self._process = start_process(_be_program, *given)
        self.pid = self._process.pid
        self.stdout, self.stderr = (_reader(*pipe) for pipe in (out, err))

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; what it has written since it was last read."""
        with ThreadPoolExecutor(2) as readers, self.stdout, self.stderr:
            out, err = (readers.submit(stream.read) for stream in (self.stdout, self.stderr))
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            return out.result(timeout), err.result(timeout)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def start_program(
    folder: Path, arguments: Sequence[str], environment: Mapping[str, str]
) -> ForkedProgram | subprocess.Popen[str]:
    """Start `python ARGUMENTS`. With a GPU it is not forked: CUDA cannot be used after a fork."""
    start = new_program if torch.cuda.is_available() else ForkedProgram
    return start(folder, arguments, environment)


def new_program(
    folder: Path, arguments: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _reader(readable: Any, writable: Any) -> TextIOWrapper:
    writable.close()
    with readable:
        return os.fdopen(os.dup(readable.fileno()))


def _be_program(folder: str, arguments: list[str], environment: dict[str, str], out: Any, err: Any) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, pipe in ((1, out), (2, err)):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")
