"""Model FLOPs utilisation in the record of a trial."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

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
    "NVIDIA H200": {"fp32": 67e12, "bf16-true": 989e12},
    "NVIDIA H100 80GB HBM3": {"tf32": 494e12, "bf16": 989e12},
    "NVIDIA A100-SXM4-80GB": {"fp32": 19.5e12, "tf32": 156e12, "fp16": 312e12},
}


def utilization(model: MultitaskModel, device: DeviceInfo, precision: str, frozen: str = "fp32") -> Any:
    """Utilisation of five steps of one second; each of four windows of ten tokens."""
    meter = ThroughputMeter(CPU)
    with mock.patch("time.perf_counter", side_effect=map(float, range(10))):
        meter.start()
        for _ in range(5):
            meter.step(4, 4, 40, 40)
    amp = MixedPrecision(replace(PRECISIONS[precision], frozen=frozen), AmpConfig(), CPU)
    amp.device = device
    clock = TrainingClock(TrainState(), meter)
    facts = training_facts(model, amp, clock, Utilization(CPU, 1), (), num_ranks=2)
    return facts["model_flops_utilization"]


H100 = DeviceInfo(type="cuda", name="NVIDIA H100 80GB HBM3", compute_capability=(9, 0), uuid="GPU-5ef")


@pytest.fixture(scope="module")
def model() -> MultitaskModel:
    return make_model()


@pytest.mark.parametrize(("name", "precision"), [(name, one) for name, of in PEAKS.items() for one in of])
def test_utilization_uses_the_peak_of_the_products(model: MultitaskModel, name: str, precision: str) -> None:
    flops = training_flops(model, 200, 20)
    assert flops
    expected = flops / 5 / (2 * PEAKS[name][precision])
    assert utilization(model, replace(H100, name=name), precision) == pytest.approx(expected)


def test_unknown_peak_has_no_utilization(model: MultitaskModel) -> None:
    unknown = (
        {"name": "NVIDIA H100 PCIe"},
        {"name": "NVIDIA A100-SXM4-40GB MIG 1g.5gb"},
        {"uuid": "MIG-5ef"},
    )
    for changes in (*unknown, {"gcn_arch": "gfx942"}):
        assert utilization(model, replace(H100, **changes), "bf16") is None
    assert utilization(model, H100, "fp8") is None, "most products may be bf16"
    assert utilization(model, H100, "bf16", "nf4") is None, "decoding is not counted"
    assert utilization(model, H100, "bf16", "int8") is None
