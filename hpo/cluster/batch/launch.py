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
    """The part of a job that is the same for each study."""

    setup: bytes | None = None
    """A bash script that runs first."""
    python: str | None = None
    """The interpreter; None: that of this process or, in a container, `python3`."""
    apptainer: str | None = None
    """The image of a container, for `apptainer exec`."""
    pyxis: str | None = None
    """The image of a container, for `srun --container-image`."""
    mount: Sequence[str] | None = None
    """More places that the container needs."""

    def __post_init__(self) -> None:
        if self.apptainer and self.pyxis:
            raise InputError("A job runs in one container, but got --apptainer and --pyxis. Leave one out.")
        if self.mount and not (self.apptainer or self.pyxis):
            raise InputError("--mount needs a container. Add --apptainer IMAGE or --pyxis IMAGE.")

    def lines(self, worker: Sequence[str], folder: Path, places: Iterable[Path]) -> list[str]:
        """Lines of a bash script that end as the worker.

        Args:
            worker: the arguments of the interpreter.
            folder: of the files of the submission; the set-up script is its `setup.sh`.
            places: the files and folders that the worker reads or writes.
        """
        lines = []
        if self.setup is not None:
            file = shlex.quote(str(folder / "setup.sh"))
            lines += [_CHECKED, f"hpo_folder=$PWD; set -e; . {file}"]
            lines += ['set +euo pipefail; trap - EXIT; cd "$hpo_folder"']
        if not (self.apptainer or self.pyxis):
            start = ["sh", "-c", _START % "", self.python or sys.executable, *worker]
            return [*lines, f"exec {shlex.join(start)}"]
        start = ["sh", "-c", _START % " in the container", self.python or "python3", *worker]
        return [
            *lines,
            f'export {REQUESTS}={shlex.quote(str(folder))}/requests-"$SLURM_JOB_ID"; rm -f "${REQUESTS}"',
            f"(exec {self._container(places)} {shlex.join(start)}) & worker=$!",
            _PASS_SIGNALS_ON,
        ]

    def _container(self, places: Iterable[Path]) -> str:
        """The command of the container, for the shell, without the command that runs in it."""
        mounts = _outermost(
            [*map(_existing, places), *(Path(place).absolute() for place in self.mount or ())]
        )
        if self.apptainer:
            bound = [argument for place in mounts for argument in ("--bind", place)]
            return f'apptainer exec --nv {shlex.join(bound)} --pwd "$PWD" {shlex.quote(self.apptainer)}'
        bound = [f"--container-image={self.pyxis}"]
        bound += ["--container-mounts=" + ",".join(f"{place}:{place}" for place in mounts)]
        # Since Slurm 22.05 a step has the cores of its job only if they are given again.
        cores = '${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}'
        return f'srun --ntasks=1 {cores} {shlex.join(bound)} --container-workdir="$PWD"'


def _existing(place: Path) -> Path:
    """The place, or the nearest folder that is there."""
    return place if os.access(place, os.F_OK) else _existing(place.parent)


def _outermost(places: Sequence[Path]) -> list[str]:
    """The places without those inside another, and without the root folder."""
    unique = dict.fromkeys(place for place in places if place != Path("/"))
    if wrong := [place for place in unique if set(str(place)) & {",", ":"}]:
        raise InputError(
            f"A place that a container mounts must have no `,` or `:` in its path, but got {wrong[0]}."
        )
    return [str(place) for place in unique if not unique.keys() & {*place.parents}]
