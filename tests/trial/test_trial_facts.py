"""Precision and FLOPs in a trial's record, and a trial's model on its way to the device."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support.every_kind import WINDOWS, every_kind_executor
from support.observed_products import wide_in_training
from support.tiny import CPU, altered_executor
from support.tiny_encoders import BERT, make_model
from support.tiny_loop import config_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpo.device import DeviceInfo, Utilization
from hpo.precision.amp import MixedPrecision
from hpo.precision.table import PRECISIONS, AmpConfig
from hpo.training.budget import TrainState
from hpo.training.throughput import ThroughputMeter, TrainingClock
from hpo.trial.compat import checked_on
from hpo.trial.telemetry import training_facts, training_flops


def test_trial_records_a_layer_in_another_precision(tmp_path: Path) -> None:
    def plant(model: Any) -> None:
        dense = model.encoder.encoder.layer[0].output.dense
        dense.forward = lambda inputs: wide_in_training(dense, inputs, dense.weight)

    training = {"max_steps": 2, "batch_size": 4, "max_length": 32}
    executor = altered_executor(tmp_path, plant, training=training)
    result = executor.run({"fp_precision": "bf16", "learning_rate": 1e-4}, None, "")
    assert result.outcome == "complete", result.reason
    found, check = result.telemetry["precision"], result.telemetry["compatibility"]
    assert (found["agrees"], found["effective"], check["verdict"]) == (False, "bf16", "degraded")
    for reason in (found["reason"], check["disagreement"]):
        assert "encoder.encoder.layer.0.output.dense.weight (float32)." in reason
    products = found["observed"]["linear_products"]
    assert (products.pop("bfloat16") > 5, sum(products.values())) == (True, 1)
    assert check["checked_on"] == checked_on(CPU), "the sampler goes by it"
    assert isinstance(result.telemetry["environment"], dict)


class Moved(TorchDispatchMode):
    """Keeps every new tensor on the device `meta`."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        tensors = (one for one in tree_leaves(output) if isinstance(one, Tensor))
        self.tensors += [one for one in tensors if one.device.type == "meta"]
        return output


@pytest.mark.parametrize("base", ["fp32", "bf16", "int8", "nf4"])
def test_frozen_layers_reach_the_device_in_their_stored_format(tmp_path: Path, base: str) -> None:
    training = {**WINDOWS, "max_steps": 1, "batch_size": 2, "adapter": "lora", "base_precision": base}
    encoder = {**BERT, "type_vocab_size": 7}  # no head has as many outputs as there are types
    changes: dict[str, Any] = {"training": training, "amp": {"allow_emulated": True}, "search_space": {}}
    executor = every_kind_executor(tmp_path, model={"encoder": encoder}, **changes)
    config = config_of(executor)
    modules = executor.loader.build_encoder(config).modules()
    frozen = {one.weight.shape for one in modules if isinstance(one, nn.Linear | nn.Embedding)}
    executor.loader.device = SimpleNamespace(type="meta", torch_device="meta")
    with Moved() as moved:
        model = executor.loader.build_model(config)
    held = [*model.parameters(), *model.buffers()]
    assert {weight.device.type for weight in held} == {"meta"}
    in_fp32 = [one for one in moved.tensors if one.dtype == torch.float32 and one.shape in frozen]
    assert bool(in_fp32) == (base == "fp32")
    assert sum(one.nbytes for one in moved.tensors) <= 1.01 * sum(one.nbytes for one in held)


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
