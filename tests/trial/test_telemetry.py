"""Model FLOPs utilisation in the record of a trial."""

from dataclasses import replace
from unittest import mock

import pytest
from support.tiny import CPU
from support.tiny_encoders import make_model

from hpo.device import DeviceInfo, Utilization
from hpo.precision.amp import MixedPrecision
from hpo.precision.table import PRECISIONS, AmpConfig
from hpo.training.budget import TrainState
from hpo.training.throughput import ThroughputMeter, TrainingClock
from hpo.trial.telemetry import training_facts, training_flops

H100 = DeviceInfo(type="cuda", name="NVIDIA H100 80GB HBM3", compute_capability=(9, 0), uuid="GPU-5ef")


@pytest.mark.parametrize(
    ("device", "precision", "frozen", "peak"),  # dense FLOP/s of the data sheets
    [
        ({"name": "NVIDIA H200"}, "bf16-true", "fp32", 989e12),
        ({}, "tf32", "fp32", 494e12),
        ({"name": "NVIDIA A100-SXM4-80GB"}, "fp32", "fp32", 19.5e12),
        ({"name": "NVIDIA H100 PCIe"}, "bf16", "fp32", None),
        ({"uuid": "MIG-5ef"}, "bf16", "fp32", None),
        ({"gcn_arch": "gfx942"}, "bf16", "fp32", None),
        ({}, "fp8", "fp32", None),  # most products may be bf16
        ({}, "bf16", "nf4", None),  # decoding is not counted
    ],
)
def test_utilization(device: dict[str, str], precision: str, frozen: str, peak: float | None) -> None:
    """Five steps of one second; each of four windows of ten tokens."""
    meter = ThroughputMeter(CPU)
    with mock.patch("time.perf_counter", side_effect=map(float, range(10))):
        meter.start()
        for _ in range(5):
            meter.step(4, 4, 40, 40)
    model, amp = make_model(), MixedPrecision(replace(PRECISIONS[precision], frozen=frozen), AmpConfig(), CPU)
    amp.device = replace(H100, **device)
    clock = TrainingClock(TrainState(), meter)
    found = training_facts(model, amp, clock, Utilization(CPU, 1), (), num_ranks=2)["model_flops_utilization"]
    flops = training_flops(model, 200, 20)
    assert flops
    assert found == (None if peak is None else pytest.approx(flops / 5 / (2 * peak)))
