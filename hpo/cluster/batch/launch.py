"""Start of a worker in a Slurm job: a set-up script, a Python, a container.

Without a container the worker replaces the shell of the job and receives its signals. A container has no
Slurm commands. So the shell stays outside, forwards the signals, and afterwards runs the worker's request to
run the job again. A container sees only mounted folders.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpo.errors import InputError

REQUESTS = "HPO_SLURM_REQUESTS"
"""Environment variable: file for the Slurm commands of a worker in a container."""

# Python starts with USR1 ignored: until it installs its handler, the signal would kill it.
_START = (
    'trap "" USR1; python=$(command -v "$0") && [ -f "$python" ] && [ -x "$python" ] || '
    '{ echo "hpo: --python must name a program%s on $SLURMD_NODENAME, but \\`$0\\` is no program." '
    '>&2; exit 2; }; exec "$0" "$@"'
)
_CHECKED = (
    'trap \'echo "hpo: the set-up script must succeed, but it ended with exit code $?. No worker starts." '
    ">&2; exit 1' EXIT"
)
_FORWARD_SIGNALS = """\
trap 'kill -USR1 "$worker"' USR1
trap 'kill -TERM "$worker"' TERM
while wait "$worker"; kill -0 "$worker" 2>/dev/null; do :; done
wait "$worker"
code=$?
[ ! -f "$HPO_SLURM_REQUESTS" ] || sh "$HPO_SLURM_REQUESTS"
exit $code"""


@dataclass(frozen=True)
class Launch:
    """The part of a job script without a study."""

    setup: bytes | None = None
    """Text of a bash script to source first."""
    python: str | None = None
    """Python interpreter. None: this process's own, or `python3` of the container."""
    apptainer: str | None = None
    """Container image for `apptainer exec`."""
    pyxis: str | None = None
    """Container image for `srun --container-image`."""
    mount: Sequence[str] = ()
    """Additional files and folders for the container."""

    def __post_init__(self) -> None:
        if self.apptainer and self.pyxis:
            raise InputError("A job runs in one container, but got --apptainer and --pyxis. Leave one out.")
        if self.mount and not (self.apptainer or self.pyxis):
            raise InputError("--mount needs a container. Add --apptainer IMAGE or --pyxis IMAGE.")

    def lines(self, worker: Sequence[str], folder: Path, paths: Iterable[Path]) -> list[str]:
        """Return the lines of a bash script that end in the worker.

        Args:
            worker: arguments of the interpreter.
            folder: folder of the submission, with the set-up script as `setup.sh`.
            paths: files and folders that the worker reads or writes.
        """
        lines = []
        if self.setup is not None:
            lines += [_CHECKED, f"hpo_folder=$PWD; set -e; . {shlex.quote(str(folder / 'setup.sh'))}"]
            lines += ['set +euo pipefail; trap - EXIT; cd "$hpo_folder"']
        if not (self.apptainer or self.pyxis):
            start = ["sh", "-c", _START % "", self.python or sys.executable, *worker]
            return [*lines, f"exec {shlex.join(start)}"]
        start = ["sh", "-c", _START % " in the container", self.python or "python3", *worker]
        return [
            *lines,
            f'export {REQUESTS}={shlex.quote(str(folder))}/requests-"$SLURM_JOB_ID"; rm -f "${REQUESTS}"',
            f"(exec {self._container(paths)} {shlex.join(start)}) & worker=$!",
            _FORWARD_SIGNALS,
        ]

    def _container(self, paths: Iterable[Path]) -> str:
        """Return the shell command of the container, without arguments."""
        mounts = _outermost([*map(_existing, paths), *(Path(path).absolute() for path in self.mount)])
        if self.apptainer:
            bound = [argument for path in mounts for argument in ("--bind", path)]
            return f'apptainer exec --nv {shlex.join(bound)} --pwd "$PWD" {shlex.quote(self.apptainer)}'
        bound = [f"--container-image={self.pyxis}"]
        bound += ["--container-mounts=" + ",".join(f"{path}:{path}" for path in mounts)]
        # Since Slurm 22.05 a step must request the cores of its job again.
        cores = '${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}'
        return f'srun --ntasks=1 {cores} {shlex.join(bound)} --container-workdir="$PWD"'


def _existing(path: Path) -> Path:
    """Return the path or its nearest existing parent."""
    return path if os.access(path, os.F_OK) else _existing(path.parent)


def _outermost(paths: Sequence[Path]) -> list[str]:
    """Drop the root folder and all paths inside another path."""
    unique = dict.fromkeys(path for path in paths if path != Path("/"))
    if wrong := [path for path in unique if set(str(path)) & {",", ":"}]:
        raise InputError(f"The path of a mounted folder must have no `,` or `:`, but got {wrong[0]}.")
    return [str(path) for path in unique if not unique.keys() & {*path.parents}]
