"""The observed precision in a trial's record, and a trial's model on its way to the device."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.every_kind import WINDOWS, every_kind_executor
from support.observed_products import wide_in_training
from support.tiny import CPU, altered_executor
from support.tiny_encoders import BERT
from support.tiny_loop import config_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpo.trial.compat import checked_on


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
    executor.loader.device = SimpleNamespace(type="meta", torch_device="meta")  # type: ignore[assignment]
    with Moved() as moved:
        model = executor.loader.build_model(config)
    held = [*model.parameters(), *model.buffers()]
    assert {weight.device.type for weight in held} == {"meta"}
    in_fp32 = [one for one in moved.tensors if one.dtype == torch.float32 and one.shape in frozen]
    assert bool(in_fp32) == (base == "fp32")
    assert sum(one.nbytes for one in moved.tensors) <= 1.01 * sum(one.nbytes for one in held)
