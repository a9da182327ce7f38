"""Model FLOPs utilisation in the record of a trial."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.tiny import CPU
from support.tiny_encoders import make_model

from hpo.device import DeviceInfo, Utilization
from hpo.models.multitask import MultitaskModel
from hpo.precision.amp import MixedPrecision
from hpo.precision.table import PRECISIONS, AmpConfig
from hpo.training.budget import TrainState
from hpo.training.throughput import ThroughputMeter, TrainingClock
from hpo.trial.telemetry import training_facts, training_flops

PEAKS = {  # dense FLOP/s of the data sheets
    "NVIDIA H200": {"fp32": 67e12, "tf32": 494e12, "bf16": 989e12, "fp16": 989e12, "bf16-true": 989e12},
    "NVIDIA H100 80GB HBM3": {"fp32": 67e12, "tf32": 494e12, "bf16": 989e12},
    "NVIDIA A100-SXM4-80GB": {"fp32": 19.5e12, "tf32": 156e12, "fp16": 312e12},
    "NVIDIA A100-SXM4-40GB": {"bf16": 312e12},
}
H100 = DeviceInfo(type="cuda", name="NVIDIA H100 80GB HBM3", compute_capability=(9, 0), uuid="GPU-5ef")


@pytest.fixture(scope="module")
def model() -> MultitaskModel:
    return make_model()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> ThroughputMeter:
    """Five steps of one second; each of four windows of ten tokens."""
    seconds: Iterator[int] = iter(range(10))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(seconds)))
    meter = ThroughputMeter(CPU)
    meter.start()
    for _ in range(5):
        meter.step(4, 4, 40, 40)
    monkeypatch.undo()
    return meter


def utilization_of(
    model: MultitaskModel, device: DeviceInfo, precision: str, meter: ThroughputMeter, frozen: str = "fp32"
) -> Any:
    amp = MixedPrecision(replace(PRECISIONS[precision], frozen=frozen), AmpConfig(), CPU)
    amp.device = device
    clock = TrainingClock(TrainState(), meter)
    facts = training_facts(model, amp, clock, Utilization(CPU, 1), (), num_ranks=2)
    return facts["model_flops_utilization"]


@pytest.mark.parametrize(("name", "precision"), [(name, one) for name, of in PEAKS.items() for one in of])
def test_utilization_uses_the_peak_of_the_products(
    model: MultitaskModel, steps: ThroughputMeter, name: str, precision: str
) -> None:
    flops = training_flops(model, 200, 20)
    assert flops
    expected = flops / 5 / (2 * PEAKS[name][precision])
    assert utilization_of(model, replace(H100, name=name), precision, steps) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changes", "precision", "frozen"),
    [
        ({"name": "NVIDIA H100 PCIe"}, "bf16", "fp32"),
        ({"name": "NVIDIA A100-SXM4-40GB MIG 1g.5gb"}, "bf16", "fp32"),
        ({"uuid": "MIG-5ef"}, "bf16", "fp32"),
        ({"gcn_arch": "gfx942"}, "bf16", "fp32"),
        ({}, "fp8", "fp32"),  # most products of an fp8 trial may be bf16
        ({}, "bf16", "nf4"),  # decoding is not counted, and half of the numbers are not seen
        ({}, "bf16", "int8"),
    ],
)
def test_unknown_peak_has_no_utilization(
    model: MultitaskModel, steps: ThroughputMeter, changes: dict[str, str], precision: str, frozen: str
) -> None:
    assert utilization_of(model, replace(H100, **changes), precision, steps, frozen) is None
