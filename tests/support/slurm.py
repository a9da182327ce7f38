"""A real Slurm of two nodes on this machine, with programs of its own, for the tests.

Both nodes have this machine's name and address and differ by port. A partition `high` preempts `low`, which
is the default; each node has two GPUs that are character devices like `/dev/null`.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol", "squeue", "scancel")
NODES = ("n1", "n2")

_CONFIG = """\
ClusterName=hpo
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait={kill_wait}
SlurmdTimeout=6
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000 Gres=gpu:2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000 Gres=gpu:2
PartitionName=low Nodes=ALL Default=YES PriorityTier=1
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str:
    """Why this machine cannot run a Slurm of its own; empty: it can."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        return f"Slurm's and munge's programs are not all installed: no {', '.join(missing)}"
    return "" if os.geteuid() == 0 else "a Slurm whose nodes start jobs must be started as root"


class SlurmCluster:
    """One cluster. Commands find it by SLURM_CONF, which `environment` sets for a block."""

    def __init__(self, kill_wait: int = 5) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hpo-slurm-"))
        self.folder.chmod(0o711)  # for jobs of root that run servers as another user
        self.config = self.folder / "slurm.conf"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {
            "SLURM_CONF": str(self.config),
            "PATH": os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"]),
        }
        host = socket.gethostname().split(".")[0]
        settings = {"folder": self.folder, "host": host, "ports": _free_ports(3), "kill_wait": kill_wait}
        self.config.write_text(_CONFIG.format(**settings))
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir()
        devices = [self.folder / f"nvidia{number}" for number in range(2)]
        for device in devices:
            os.mknod(device, 0o666 | 0o020000, os.makedev(1, 3))
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/nvidia[0-1]\n")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)

    @contextmanager
    def environment(self) -> Iterator[None]:
        """What a process must have in its environment to use this cluster."""
        with mock.patch.dict(os.environ, self._environment):
            yield

    def start(self) -> None:
        files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munge.pid"}
        files |= {"log-file": "munge.log", "seed-file": "munge.seed"}
        places = (f"--{option}={self.folder / name}" for option, name in files.items())
        self._start("munged", "munged", "--foreground", "--force", *places)
        self.wait(lambda: (self.folder / "munge.sock").exists())
        self._start("slurmctld", "slurmctld", "-D", "-f", str(self.config))
        for node in NODES:
            self.start_node(node)
        self.wait(lambda: len(self.run("sinfo -h -N -p low -t idle -o %N", check=False).split()) == 2)

    def start_node(self, node: str) -> None:
        self._start(node, "slurmd", "-D", "-N", node, "-f", str(self.config))

    def start_missing_nodes(self) -> None:
        for node in NODES:
            if node not in self._processes:
                self.start_node(node)

    def kill_slurmd(self, node: str) -> None:
        """End the node for Slurm alone: what runs on it goes on, and nobody tells of its end."""
        slurmd = self._processes.pop(node)
        slurmd.kill()
        slurmd.wait()

    def kill_node(self, node: str) -> None:
        """End a node at once, with all that runs on it: `slurmd`, the shepherds of its jobs, the jobs."""
        jobs = [
            process
            for process in Path("/proc").iterdir()
            if process.name.isdigit() and self._is_in_job_on(node, process)
        ]
        shepherds = {_parent(job) for job in jobs} - {int(job.name) for job in jobs} - {None}
        self.kill_slurmd(node)
        # The shepherds before the jobs, whose end they would report.
        for pid in (*shepherds, *(int(job.name) for job in jobs)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _is_in_job_on(self, node: str, process: Path) -> bool:
        try:
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is nobody's to look at
            return False
        return {f"SLURMD_NODENAME={node}".encode(), f"SLURM_CONF={self.config}".encode()} <= {*environment}

    def run(self, command: str, *more: str, check: bool = True) -> str:
        """Run a command of Slurm and return what it prints; `more` are arguments with spaces."""
        done = subprocess.run(
            [*command.split(), *more],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, **self._environment},
        )
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout

    def states(self, job: str) -> dict[str, str]:
        """The state of each task of a job array."""
        listed = self.run(f"squeue --job={job} --array --noheader --states=all", "--format=%i %T")
        return dict(line.split() for line in listed.splitlines())

    def stop(self) -> None:
        if "slurmctld" in self._processes:
            self.run(f"scancel --user={os.getuid()}", check=False)
        for process in reversed(self._processes.values()):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    def _start(self, name: str, program: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environment},
                start_new_session=True,
            )

    def wait(self, condition: Callable[[], bool], seconds: float = 120) -> None:
        """Wait until `condition` holds; all programs of the cluster must live meanwhile."""
        deadline = time.monotonic() + seconds
        while not condition():
            dead = [name for name, process in self._processes.items() if process.poll() is not None]
            assert not dead, [(name, (self.folder / f"{name}.log").read_text()[-2000:]) for name in dead]
            assert time.monotonic() < deadline, self.run("squeue -t all", check=False)
            time.sleep(0.05)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for probe in sockets:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in sockets]
    for probe in sockets:
        probe.close()
    return ports


def _parent(process: Path) -> int | None:
    """Its parent's id; None: it has ended meanwhile."""
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None
