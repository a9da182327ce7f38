"""A real Slurm of two nodes on this machine, with programs of its own, for the tests.

Both nodes have this machine's name and address and differ by port. A partition `high` preempts `low`, which
is the default; each node has two GPUs that are character devices like `/dev/null`.
"""

import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from support.waiting import wait_for

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol", "squeue", "scancel")
NODES = ("n1", "n2")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])

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
KillWait=5
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
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        return f"Slurm's and munge's programs are not all installed: no {', '.join(missing)}"
    return "" if os.geteuid() == 0 else "a Slurm whose nodes start jobs must be started as root"


class SlurmCluster:
    """One cluster. Commands find it by the variables in `environment`."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hpo-slurm-"))
        self.folder.chmod(0o711)  # for jobs of root that run servers as another user
        self.config = self.folder / "slurm.conf"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {"SLURM_CONF": str(self.config), "PATH": PATH}
        host = socket.gethostname().split(".")[0]
        probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        ports = [probe.getsockname()[1] for probe in probes]
        for probe in probes:
            probe.close()
        self.config.write_text(_CONFIG.format(folder=self.folder, host=host, ports=ports))
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir()
        for number in range(2):
            os.mknod(self.folder / f"nvidia{number}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/nvidia[0-1]\n")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)

    def start(self) -> None:
        files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munge.pid"}
        files |= {"log-file": "munge.log", "seed-file": "munge.seed"}
        places = (f"--{option}={self.folder / name}" for option, name in files.items())
        self._start("munged", "munged", "--foreground", "--force", *places)
        self.wait(lambda: (self.folder / "munge.sock").exists())
        self._start("slurmctld", "slurmctld", "-D", "-f", str(self.config))
        self.start_missing_nodes()
        self.wait(lambda: len(self.run("sinfo -h -N -p low -t idle -o %N", check=False).split()) == 2)

    def start_missing_nodes(self) -> None:
        for node in NODES:
            if node not in self._processes:
                self._start(node, "slurmd", "-D", "-N", node, "-f", str(self.config))

    def kill_node(self, node: str) -> None:
        """End a node at once, with all that runs on it: `slurmd`, the shepherds of its jobs, the jobs."""
        of_job = {f"SLURMD_NODENAME={node}".encode(), f"SLURM_CONF={self.config}".encode()}
        jobs, shepherds = set(), set()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is nobody's to look at
                if of_job <= {*(process / "environ").read_bytes().split(b"\0")}:
                    jobs.add(int(process.name))
                    shepherds.add(int((process / "stat").read_text().rpartition(")")[2].split()[1]))
        slurmd = self._processes.pop(node)
        slurmd.kill()
        slurmd.wait()
        # The shepherds before the jobs, whose end they would report.
        for pid in (*(shepherds - jobs), *jobs):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def run(self, command: str, *more: str, check: bool = True) -> str:
        """Run a command of Slurm and return what it prints; `more` are arguments with spaces."""
        done = subprocess.run(
            [*command.split(), *more],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, **self.environment},
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
                env={**os.environ, **self.environment},
                start_new_session=True,
            )

    def wait(self, condition: Callable[[], bool], seconds: float = 120) -> None:
        """Wait until `condition` holds; all programs of the cluster must live meanwhile."""

        def check() -> None:
            dead = [name for name, process in self._processes.items() if process.poll() is not None]
            assert not dead, [(name, (self.folder / f"{name}.log").read_text()[-2000:]) for name in dead]

        wait_for(condition, seconds, check)
