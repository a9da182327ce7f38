"""How a job starts its worker: after a set-up script, under an interpreter of the node, in a container.

Without a container the worker replaces the shell of the job and has its signals. A container holds no Slurm.
So the shell stays outside, passes the signals on, and runs afterwards what the worker wrote to a file: the
request to run the job again. Inside, a place exists only if it is mounted.
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
"""Environment variable: the file to which a worker in a container writes its commands for Slurm."""

# USR1 would kill a program that does not listen to it yet.
_START = (
    'trap "" USR1; python=$(command -v "$0") && [ -f "$python" ] && [ -x "$python" ] || '
    '{ echo "hpo: --python must name a program%s on $SLURMD_NODENAME, not \\`$0\\`, which is none." '
    '>&2; exit 2; }; exec "$0" "$@"'
)
_CHECKED = (
    'trap \'echo "hpo: the set-up script must succeed, but it ended with exit code $?. No worker starts." '
    ">&2; exit 1' EXIT"
)
_PASS_SIGNALS_ON = """\
trap 'kill -USR1 "$worker"' USR1
trap 'kill -TERM "$worker"' TERM
while wait "$worker"; kill -0 "$worker" 2>/dev/null; do :; done
wait "$worker"
code=$?
[ ! -f "$HPO_SLURM_REQUESTS" ] || sh "$HPO_SLURM_REQUESTS"
exit $code"""


@dataclass(frozen=True)
class Launch:
    """What of a job is the same for each study."""

    setup: str | None = None
    """Text of a bash script that runs first."""
    python: str | None = None
    """The interpreter; None: that of this process or, in a container, `python3`."""
    apptainer: str | None = None
    """The image of a container, for `apptainer exec`."""
    pyxis: str | None = None
    """The image of a container, for `srun --container-image`."""
    mounts: Sequence[str] = ()
    """More places that the container needs."""

    def __post_init__(self) -> None:
        if self.apptainer and self.pyxis:
            raise InputError("A job runs in one container, but got --apptainer and --pyxis. Leave one out.")
        if self.mounts and not self.image:
            raise InputError("--mount needs a container. Add --apptainer IMAGE or --pyxis IMAGE.")

    @property
    def image(self) -> str | None:
        return self.apptainer or self.pyxis

    def lines(self, worker: Sequence[str], folder: Path, places: Iterable[Path]) -> list[str]:
        """Lines of a bash script that end as the worker.

        Args:
            worker: the arguments of the interpreter.
            folder: the files of the submission.
            places: the files and folders that the worker reads or writes.
        """
        start = ["sh", "-c", _START % (" in the container" if self.image else "")]
        start += [self.python or ("python3" if self.image else sys.executable), *worker]
        if not self.image:
            return [*self._setup(folder), f"exec {shlex.join(start)}"]
        return [
            *self._setup(folder),
            f'export {REQUESTS}={shlex.quote(str(folder))}/requests-"$SLURM_JOB_ID"',
            f'rm -f "${REQUESTS}"',
            f"(exec {self._container(places)} {shlex.join(start)}) & worker=$!",
            _PASS_SIGNALS_ON,
        ]

    def _setup(self, folder: Path) -> list[str]:
        if self.setup is None:
            return []
        file = shlex.quote(str(self.setup_file(folder)))
        return [
            _CHECKED,
            f"hpo_folder=$PWD; set -e; . {file}",
            'set +euo pipefail; trap - EXIT; cd "$hpo_folder"',
        ]

    def setup_file(self, folder: Path) -> Path:
        return folder / "setup.sh"

    def _container(self, places: Iterable[Path]) -> str:
        """The command of the container, for the shell, without the command that runs in it."""
        there = [place for place in map(_existing, places) if place != Path("/")]
        mounts = _outermost([*there, *(Path(place).absolute() for place in self.mounts)])
        if self.apptainer:
            bound = [argument for place in mounts for argument in ("--bind", place)]
            return f'apptainer exec --nv {shlex.join(bound)} --pwd "$PWD" {shlex.quote(self.apptainer)}'
        bound = [f"--container-image={self.pyxis}"]
        bound += ["--container-mounts=" + ",".join(f"{place}:{place}" for place in mounts)]
        # Since Slurm 22.05 a step has the cores of its job only if they are given again.
        cores = '${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}'
        return f'srun --ntasks=1 {cores} {shlex.join(bound)} --container-workdir="$PWD"'


def _outermost(places: Sequence[Path]) -> list[str]:
    """The places without those inside another."""
    for place in places:
        if set(str(place)) & {",", ":"}:
            raise InputError(
                f"A place that a container mounts must have no `,` or `:` in its path, but got {place}."
            )
    return [str(place) for place in dict.fromkeys(places) if not {*places} & {*place.parents}]


def _existing(place: Path) -> Path:
    """The place, or the nearest folder that is there."""
    return place if os.access(place, os.F_OK) else _existing(place.parent)


def ask_slurm_later(command: Sequence[str]) -> bool:
    """Write a command for the shell outside this process's container; return False if there is none."""
    if REQUESTS not in os.environ:
        return False
    Path(os.environ[REQUESTS]).write_text(f"{shlex.join(command)}\n")
    return True
