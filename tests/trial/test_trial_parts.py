"""The way of a trial's model to the device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.every_kind import WINDOWS, write_every_kind
from support.tiny import CPU
from support.tiny_encoders import BERT
from support.tiny_loop import config_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpo.config.resolved_study import resolve_study
from hpo.config.study_config import load_study
from hpo.trial.executor import Executor

STORED = ["bf16", "int8", "nf4"]


def executor_of(folder: Path, encoder: Any, base: str) -> Executor:
    training = {**WINDOWS, "max_steps": 1, "batch_size": 2, "adapter": "lora", "base_precision": base}
    changes: dict[str, Any] = {"training": training, "amp": {"allow_emulated": True}, "search_space": {}}
    return Executor(
        resolve_study(load_study(write_every_kind(folder, model={"encoder": encoder}, **changes)), CPU),
        folder,
    )


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


@pytest.mark.parametrize("base", ["fp32", *STORED])
def test_frozen_layers_reach_the_device_in_their_stored_format(tmp_path: Path, base: str) -> None:
    # No head has as many outputs as there are types.
    executor = executor_of(tmp_path, {**BERT, "type_vocab_size": 7}, base)
    config = config_of(executor)
    frozen = {
        weight.shape
        for module in executor.loader.build_encoder(config).modules()
        if isinstance(module, nn.Linear | nn.Embedding)
        for weight in [module.weight]
    }
    executor.loader.device = SimpleNamespace(type="meta", torch_device="meta")  # type: ignore[assignment]
    with Moved() as moved:
        model = executor.loader.build_model(config)
    assert {weight.device.type for weight in (*model.parameters(), *model.buffers())} == {"meta"}
    in_fp32 = [one for one in moved.tensors if one.dtype == torch.float32 and one.shape in frozen]
    assert bool(in_fp32) == (base == "fp32")
    held = sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
    assert sum(one.nbytes for one in moved.tensors) <= 1.01 * held
