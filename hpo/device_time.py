"""The share of its device that hpo got beside other programs.

Linux counts the seconds in which each thread ran, and those in which it was ready but waited for a CPU
(`schedstat`). A thread of hpo waits for other programs, for other threads of hpo, or at the CPU limit of its
container. The workers on a device are counted together, and want no more than their CPUs and this limit. So
others took the CPU time that they wanted and did not get. Work on idle CPUs takes nothing, nor do more
threads of hpo than CPUs. Where a file is missing (macOS, gVisor), the share is unknown.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from hpo.device import DeviceInfo, available_cores, limits_of_cgroups

ROOT = Path("/")  # the folder of `/proc` and `/sys`
MIN_SECONDS = 2.0  # shortest interval: steal is counted in hundredths of a second, by samples
LEAST_LOST, MOST_CORES = 0.1, 5
"""A busy device lost this share, of so many cores at most: threads wait for the slowest of them."""
REMEDY = "Close other programs, or leave CPUs to them: set OMP_NUM_THREADS, or run fewer workers."


class Reading(NamedTuple):
    """Counters in seconds."""

    time: float
    stolen: float  # by the hypervisor, of the CPUs that this process may use
    paused: float  # by the CPU limit of the container
    threads: Mapping[Path, tuple[float, float]]  # seconds in which each thread of hpo ran and waited


def read(processes: Iterable[int]) -> Reading | None:
    """Read the counters of this machine and these processes. None: it has none."""
    if not (ROOT / "proc/stat").exists():
        return None
    tick, cpus = os.sysconf("SC_CLK_TCK"), {f"cpu{number}" for number in os.sched_getaffinity(0)}
    lines = map(str.split, _text(ROOT / "proc/stat").splitlines())
    stolen = sum(int(line[8]) for line in lines if line[0] in cpus) / tick
    limits = [*limits_of_cgroups(ROOT, "cpu.stat"), _text(ROOT / "sys/fs/cgroup/cpu/cpu.stat")]
    units = {"throttled_usec": 1e6, "throttled_time": 1e9}  # of versions 2 and 1 of cgroups
    paused = sum(int(n) / units[name] for name, n in pairwise(" ".join(limits).split()) if name in units)
    # Of each thread: ran, waited, number of turns.
    counts = {file: [*map(int, _text(file).split())] for file in _of_threads(processes, "schedstat")}
    threads = {file: (row[0] / 1e9, row[1] / 1e9) for file, row in counts.items() if any(row)}
    return Reading(time.monotonic(), stolen, paused, threads)


def _text(file: Path) -> str:
    with suppress(OSError):  # the thread has ended, or the kernel has no such file
        return file.read_text()
    return ""


def _of_threads(processes: Iterable[int], name: str) -> Iterator[Path]:
    for pid in processes:
        with suppress(OSError):  # the process has ended
            yield from (ROOT / f"proc/{pid}/task").glob(f"*/{name}")


def _with_children(processes: Collection[int]) -> set[int]:
    children = {int(child) for file in _of_threads(processes, "children") for child in _text(file).split()}
    return {*processes, *(_with_children(children) if children else ())}


def loss(before: Reading, after: Reading) -> dict[str, float]:
    """Return the `wanted` CPU seconds between two readings, and those that others took. {}: unknown."""
    both = before.threads.keys() & after.threads.keys()
    if not both:
        return {}
    ran, waited = (sum(after.threads[one][n] - before.threads[one][n] for one in both) for n in (0, 1))
    seconds, stolen = after.time - before.time, after.stolen - before.stolen
    waited = max(0.0, waited - (after.paused - before.paused))
    wanted = min(ran + waited, available_cores(ROOT) * seconds)
    return {
        "seconds": seconds,
        "wanted": max(seconds, wanted),  # a process that waits for a disk loses a share of the whole time
        "programs": max(0.0, wanted - ran),
        "stolen": min(max(0.0, stolen), wanted),
    }


class DeviceTime:
    """The share of its device that hpo got: this process and `other_workers`, with their children."""

    def __init__(
        self, device: DeviceInfo | None = None, other_workers: Callable[[], Collection[int]] = tuple
    ) -> None:
        self._device, self._other_workers = device, other_workers
        self._before = read(self._processes())
        self.totals: Mapping[str, float] = {}  # sums of `loss` over the intervals

    def _processes(self) -> set[int]:
        ranks = [os.getppid()] if "LOCAL_RANK" in os.environ else []  # of torchrun
        return _with_children({os.getpid(), *ranks, *self._other_workers()})

    def measure(self) -> None:
        """End an interval, unless it is shorter than `MIN_SECONDS`."""
        before = self._before
        if not before or time.monotonic() - before.time < MIN_SECONDS:
            return
        self._before = after = read(processes := self._processes())
        sums = loss(before, after) if after else {}
        if sums and self._device and self._device.type == "cuda":
            on_gpu = _others_on_gpu(self._device.uuid, sums["seconds"], processes)
            sums = {} if on_gpu is None else sums | {"programs": sums["programs"] + on_gpu * sums["wanted"]}
        self.totals = Counter(self.totals) + Counter(sums)

    def facts(self) -> dict[str, Any] | None:
        """Return the shares of the wanted time that hpo got and others took. None: unknown."""
        if not (total := self.totals):
            return None
        shares = {name: total.get(name, 0.0) / total["wanted"] for name in ("programs", "stolen")}
        lost = sum(shares.values())
        is_busy = lost >= LEAST_LOST * min(1.0, MOST_CORES * total["seconds"] / total["wanted"])
        return shares | {"share": max(0.0, 1 - lost), "busy": is_busy}


def busy_text(facts: Mapping[str, Any] | None) -> str:
    """Return a clause on the facts of a busy device; empty if it was not, or if nothing is known."""
    if not facts or not facts["busy"]:
        return ""
    causes = {"other programs": facts["programs"], "the hypervisor": facts["stolen"]}
    took = " and ".join(f"{name} took {share:.0%}" for name, share in causes.items() if share >= 0.005)
    return f"busy: hpo got {facts['share']:.0%} of it, {took}"


def _others_on_gpu(uuid: str, seconds: float, ours: Collection[int]) -> float | None:
    """Return the share of time with kernels of other programs. None: NVML does not tell."""
    with suppress(Exception):  # NVML is missing or does not support this GPU, with its own class of errors
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
        samples = pynvml.nvmlDeviceGetProcessUtilization(handle, int((time.time() - seconds) * 1e6))
        others = sum(one.smUtil for one in samples if one.pid not in ours)
        # In a container with process ids of its own, this process is not among them.
        return float(min(1.0, others / 100 / sum(one.pid == os.getpid() for one in samples)))
    return None
