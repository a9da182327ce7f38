"""Joules per example: the steps that are counted, and where there is no number."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.fake_nvml import FakeNvml, NVMLError_GpuIsLost
from support.tiny import GPU

from hpo.device import EnergyCounter
from hpo.training.energy import MIN_STRETCH_SECONDS
from hpo.training.throughput import ThroughputMeter


class Event:
    """A CUDA event that is recorded when the work before it is done: at once."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.seconds = 0.0

    def record(self) -> None:
        import time

        self.seconds = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.seconds - self.seconds)


class Machine:
    """A GPU that takes 100 W while it trains and 30 W otherwise; the time moves on as it is told."""

    def __init__(self, now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.millijoules, self.num_syncs, self.error = now, 5_000.0, 0, False
        monkeypatch.setitem(__import__("sys").modules, "pynvml", FakeNvml({"GPU-0": self.read}))
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)

    def read(self) -> int:
        if self.error:
            raise NVMLError_GpuIsLost("GPU is lost")
        return int(self.millijoules)

    def synchronize(self, index: int) -> None:
        assert index == GPU.index
        self.num_syncs += 1

    def spend(self, seconds: float, watts: float) -> None:
        self.now[0] += seconds
        self.millijoules += 1000 * watts * seconds

    def train(self, meter: ThroughputMeter, num_steps: int, watts: float = 100.0) -> None:
        """Make steps of four examples; each takes a second."""
        for _ in range(num_steps):
            self.spend(1.0, watts)
            meter.step(4, 4, 40, 50)


@pytest.fixture
def machine(now: list[float], monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(now, monkeypatch)


def started(counter: EnergyCounter | None, **settings: Any) -> ThroughputMeter:
    meter = ThroughputMeter(GPU, counter=counter, **settings)
    meter.start()
    return meter


@pytest.fixture
def meter(machine: Machine) -> ThroughputMeter:
    del machine
    return started(EnergyCounter(GPU))


@pytest.fixture
def warm(machine: Machine) -> ThroughputMeter:
    """A meter without a warm-up."""
    del machine
    return started(EnergyCounter(GPU), warmup_steps=0)


def joules(meter: ThroughputMeter) -> float | None:
    return meter.summary()["train_joules_per_example"]


def test_energy_is_of_the_steps_after_the_warm_up(machine: Machine, meter: ThroughputMeter) -> None:
    machine.train(meter, 3, watts=500.0)  # the warm-up
    machine.train(meter, 8)
    assert joules(meter) is None, "the stretch has not ended"
    meter.stop()
    machine.spend(60.0, 30.0)  # an evaluation
    meter.start()
    machine.train(meter, 4, watts=200.0)
    meter.stop()
    machine.spend(60.0, 30.0)
    assert joules(meter) == pytest.approx((8 * 100 + 4 * 200) / (12 * 4))
    assert meter.summary()["train_examples_per_second"] == pytest.approx(4.0)


def test_a_warm_up_in_a_stretch_of_its_own_is_not_counted(machine: Machine, meter: ThroughputMeter) -> None:
    machine.train(meter, 2, watts=500.0)
    meter.stop()
    assert joules(meter) is None


def test_no_step_waits_for_the_device(machine: Machine, meter: ThroughputMeter) -> None:
    machine.train(meter, 3)
    before = machine.num_syncs
    machine.train(meter, 500)
    assert machine.num_syncs == before
    meter.stop()
    assert machine.num_syncs == before + 1


@pytest.mark.parametrize(("num_steps", "expected"), [(1, None), (2, 25.0)])
def test_a_stretch_below_the_counter_s_resolution_is_left_out(
    machine: Machine, warm: ThroughputMeter, num_steps: int, expected: float | None
) -> None:
    assert MIN_STRETCH_SECONDS == 2.0
    machine.train(warm, num_steps)
    warm.stop()
    assert joules(warm) == expected


def test_an_interrupted_stretch_is_left_out(machine: Machine, warm: ThroughputMeter) -> None:
    machine.train(warm, 5)
    machine.spend(30.0, 250.0)  # something was compiled
    warm.start()
    machine.train(warm, 5, watts=40.0)
    warm.stop()
    assert joules(warm) == 10.0
    machine.spend(60.0, 400.0)
    warm.stop()
    assert joules(warm) == 10.0, "a stop without a start counts nothing"


def test_energy_survives_a_checkpoint(machine: Machine, meter: ThroughputMeter) -> None:
    machine.train(meter, 3 + 5)
    meter.stop()
    state = json.loads(json.dumps(meter.state_dict()))
    machine.spend(1e4, 60.0)  # until another process goes on
    resumed = ThroughputMeter(GPU, counter=EnergyCounter(GPU))
    resumed.load_state_dict(state)
    assert joules(resumed) == joules(meter) == 25.0
    resumed.start()
    machine.train(resumed, 5, watts=300.0)
    resumed.stop()
    assert joules(resumed) == 50.0, "a resumed trial has no second warm-up"


def test_the_warm_up_continues_after_a_checkpoint(machine: Machine, meter: ThroughputMeter) -> None:
    machine.train(meter, 2)
    resumed = ThroughputMeter(GPU, counter=EnergyCounter(GPU))
    resumed.load_state_dict(meter.state_dict())
    resumed.start()
    machine.train(resumed, 1, watts=500.0)
    machine.train(resumed, 4)
    resumed.stop()
    assert joules(resumed) == 25.0


def test_a_failing_counter_gives_no_number(machine: Machine) -> None:
    counter = EnergyCounter(GPU)
    meter = started(counter, warmup_steps=0)
    machine.train(meter, 5)
    machine.error = True
    meter.stop()
    assert joules(meter) is None
    assert counter.missing == "NVML does not report the energy of this Example GPU (GPU is lost)."


@pytest.mark.parametrize("make", [lambda: None, lambda: EnergyCounter(GPU, shared=True)])
def test_without_a_counter_nothing_is_measured(machine: Machine, make: Callable[[], Any]) -> None:
    meter = started(make())
    machine.train(meter, 10)
    meter.stop()
    assert machine.num_syncs == 0
    assert joules(meter) is None
