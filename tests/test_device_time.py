"""The share of the device, from planted counters: the load of the real machine does not matter."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_nvml import FakeNvml, NVMLError
from support.tiny import GPU

from hpo import device_time
from hpo.device_time import DeviceTime, busy_text

ME, CHILD, WORKER = os.getpid(), 7_000_001, 7_000_002
SECONDS = 10.0


class Machine:
    """`/proc` and `/sys` of a machine with two CPUs for this process, and one for others."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, cpus: int = 2) -> None:
        self.root, self.now = root, 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        monkeypatch.setattr(device_time, "time", clock)
        monkeypatch.setattr(device_time, "ROOT", root)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(cpus)})
        self.write("proc/self/cgroup", "0::/\n")
        self.count({})

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def count(
        self, threads: dict[int, list[tuple[float, float]]], stolen: float = 0.0, **pauses: int
    ) -> None:
        """Write counters. `threads` are seconds {process: [(ran, waited) of each thread]}."""
        steal = [*enumerate([stolen, 0.0]), (99, 1e6 * self.now)]  # the last is no CPU of ours
        rows = [f"cpu{n} 1 1 1 1 1 1 1 {round(one * os.sysconf('SC_CLK_TCK'))} 0 0" for n, one in steal]
        self.write("proc/stat", "\n".join(["cpu 1 1 1 1 1 1 1 99 0 0", *rows, "intr 1", ""]))
        for process in (ME, CHILD, WORKER):
            for number, (ran, waited) in enumerate([*threads.get(process, []), *[(0.0, 0.0)] * 8][:8]):
                task = f"proc/{process}/task/{process + number}"
                self.write(f"{task}/schedstat", f"{5 + round(ran * 1e9)} {7 + round(waited * 1e9)} 3\n")
                self.write(f"{task}/children", f"{CHILD} " if process == ME else "")
        self.write("sys/fs/cgroup/cpu.stat", f"usage_usec 1\nthrottled_usec {pauses.get('v2', 0) * 10**6}\n")
        self.write("sys/fs/cgroup/cpu/cpu.stat", f"nr 1\nthrottled_time {pauses.get('v1', 0) * 10**9}\n")

    def facts(self, *others: int, **counts: Any) -> dict[str, Any] | None:
        """The facts after ten seconds. `others` are other workers on the device."""
        self.count({})
        measured = DeviceTime(other_workers=lambda: others)
        self.now += SECONDS
        self.count(**counts)
        measured.measure()
        return measured.facts()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


ALONE, HALF = (9.9, 0.1), (5.0, 5.0)


@pytest.mark.parametrize(
    ("share", "others", "counts"),
    [
        pytest.param(1.0, (), {"threads": {ME: [ALONE, (9.8, 0.2)]}}, id="quiet"),
        pytest.param(1.0, (), {"threads": {ME: [(0.2, 0.1)]}}, id="waits for a disk"),
        pytest.param(1.0, (WORKER,), {"threads": {ME: [ALONE], WORKER: [ALONE]}}, id="two workers"),
        pytest.param(
            1.0, (WORKER,), {"threads": {ME: [HALF] * 2, WORKER: [HALF] * 2}}, id="two with two threads"
        ),
        pytest.param(
            1.0, (WORKER,), {"threads": {ME: [(6.6, 3.4)], WORKER: [(6.7, 3.3)] * 2}}, id="two of two sizes"
        ),
        pytest.param(1.0, (), {"threads": {ME: [(2.5, 7.5)] * 8}}, id="more threads than CPUs"),
        pytest.param(1.0, (), {"threads": {ME: [(6.7, 3.3)], CHILD: [(6.7, 3.3)] * 2}}, id="loaders of data"),
        pytest.param(1.0, (), {"threads": {ME: [HALF]}, "v2": 5}, id="limit of the container"),
        pytest.param(1.0, (), {"threads": {ME: [HALF]}, "v1": 5}, id="limit of the container, version 1"),
        pytest.param(0.67, (), {"threads": {ME: [(6.7, 3.3)] * 2}}, id="one busy loop, two threads"),
        pytest.param(0.5, (), {"threads": {ME: [HALF]}}, id="two busy loops, one thread"),
        pytest.param(
            0.5, (WORKER,), {"threads": {ME: [HALF], WORKER: [HALF]}}, id="two workers, two busy loops"
        ),
        pytest.param(
            0.67, (WORKER,), {"threads": {ME: [(3.3, 6.7)] * 2, WORKER: [(3.4, 6.6)] * 2}}, id="two, one loop"
        ),
        pytest.param(0.8, (), {"threads": {ME: [(8.0, 0.0)]}, "stolen": 2.0}, id="steal"),
    ],
)
def test_share_of_the_cpus(machine: Machine, share: float, others: tuple[int, ...], counts: Any) -> None:
    facts = machine.facts(*others, **counts)
    assert facts is not None
    assert facts["share"] == pytest.approx(share, abs=0.03)
    assert facts["busy"] == (share < 0.9) == bool(busy_text(facts))
    assert facts["programs"] + facts["stolen"] == pytest.approx(1 - facts["share"])


def test_half_a_core_is_a_loss_on_a_machine_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, monkeypatch, cpus=8)
    quiet, busy = (machine.facts(threads={ME: [(10 - lost, lost)] * 8}) for lost in (0.5, 0.7))
    assert quiet
    assert busy
    assert (quiet["busy"], busy["busy"], busy["share"] > 0.9) == (False, True, True)


def test_intervals_add_up_and_short_ones_wait_for_more(machine: Machine) -> None:
    measured = DeviceTime()
    for second, waited in ((1.0, 1.0), (10.0, 10.0), (11.5, 11.5), (20.0, 10.0)):
        machine.now = 100.0 + second
        machine.count({ME: [(second - min(waited, 5.0), min(waited, 5.0))]})
        measured.measure()
        assert measured.totals.get("seconds", 0.0) == (0.0 if second < 2 else 10.0 if second < 20 else 20.0)
    facts = measured.facts()
    assert facts is not None
    assert facts["share"] == pytest.approx(0.75)


@pytest.mark.parametrize("missing", ["proc/stat", "schedstat", "zeros"])
def test_missing_counters_mean_unknown(machine: Machine, missing: str) -> None:
    """A kernel without these counts has no file, or zeros."""
    for file in machine.root.glob("proc/*/task/*/schedstat"):
        file.write_text("0 0 0\n") if missing == "zeros" else file.unlink()
    if missing == "proc/stat":
        (machine.root / missing).unlink()
    measured = DeviceTime()
    machine.now += SECONDS
    measured.measure()
    assert measured.facts() is None
    assert busy_text(None) == ""


def test_causes_are_named(machine: Machine) -> None:
    text = "busy: hpo got 30% of it, other programs took 50% and the hypervisor took 20%"
    assert busy_text(machine.facts(threads={ME: [HALF]}, stolen=2.0)) == text


@pytest.mark.parametrize(
    ("used", "share"),
    [
        ({ME: 40, 9: 55, WORKER: 5}, 0.45),
        ({ME: 90, WORKER: 10, CHILD: 10}, 1.0),
        ({4711: 99}, None),  # a container has its own numbers of processes
        (None, None),
    ],
    ids=["beside a program", "beside workers", "in a container", "without samples"],
)
def test_share_of_a_gpu(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, used: dict[int, int] | None, share: float | None
) -> None:
    def samples(_handle: object, since: int) -> list[Any]:
        assert since == 100_000_000, "microseconds since the beginning of the interval"
        if used is None:
            raise NVMLError("Not Found")
        return [SimpleNamespace(pid=pid, smUtil=value) for pid, value in used.items()] * 3

    nvml = FakeNvml({"GPU-0": lambda: 0})
    monkeypatch.setattr(nvml, "nvmlDeviceGetProcessUtilization", samples, raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    measured = DeviceTime(GPU, lambda: [WORKER])
    machine.now += SECONDS
    machine.count({ME: [ALONE]})
    measured.measure()
    facts = measured.facts()
    assert (facts and facts["share"]) == (share and pytest.approx(share, abs=0.02))


def test_own_process_is_counted_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counters of Linux have the expected form, whatever the load."""
    monkeypatch.setattr(device_time, "ROOT", Path("/"))
    monkeypatch.setattr(device_time, "MIN_SECONDS", 0.0)
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this kernel does not count the waits of threads")
    measured = DeviceTime()
    sum(range(10**5))
    measured.measure()
    facts = measured.facts()
    assert facts is not None
    assert 0 <= facts["share"] <= 1


def test_process_may_end_while_it_is_read(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    list_folder = os.scandir

    def scandir(path: Any) -> Any:
        if f"{WORKER}/task" in str(path):
            raise ProcessLookupError
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", scandir)
    facts = machine.facts(WORKER, threads={ME: [ALONE]})
    assert facts is not None
    assert not facts["busy"]
