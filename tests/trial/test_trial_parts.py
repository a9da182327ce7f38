"""How a trial's model gets to the device, and the memory that it takes there."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.every_kind import WINDOWS, write_every_kind
from support.jsonl_sets import write_set
from support.tiny import CPU
from support.tiny_encoders import BERT
from support.tiny_loop import config_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpo.config.resolved_study import resolve_study
from hpo.config.study_config import StudyConfig, load_study
from hpo.config.trial_config import TrialConfig
from hpo.models.multitask import MultitaskModel
from hpo.trial.executor import Executor
from hpo.trial.parts import TrialLoader

STORED = ["bf16", "int8", "nf4"]
LARGE = {**BERT, "hidden_size": 512, "num_hidden_layers": 7, "intermediate_size": 2048}
"""Its linear layers take 84 MiB in fp32. Batches of few tokens keep the activations small beside them."""
FEW_TOKENS = 128


def executor_of(folder: Path, encoder: Any, base: str, *, checks: bool = True) -> Executor:
    training = {**WINDOWS, "max_steps": 1, "batch_size": 2, "adapter": "lora", "base_precision": base}
    changes: dict[str, Any] = {"training": training, "amp": {"allow_emulated": True}, "search_space": {}}
    changes |= {"compat": {"enabled": checks}, "evaluation": {"batch_tokens": FEW_TOKENS}}
    return Executor(
        resolve_study(load_study(write_every_kind(folder, model={"encoder": encoder}, **changes)), CPU),
        folder,
    )


class Moved(TorchDispatchMode):
    """Keeps every tensor that is made on the device `meta`."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        tensors = (one for one in tree_leaves(output) if isinstance(one, Tensor))
        self.tensors += [one for one in tensors if one.device.type == "meta"]
        return output


@pytest.mark.parametrize("base", ["fp32", *STORED])
def test_frozen_layers_are_stored_before_they_move_to_the_device(tmp_path: Path, base: str) -> None:
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


def peak_of(folder: Path, base: str) -> int:
    folder.mkdir()
    result = executor_of(folder, LARGE, base, checks=base == "nf4").run({}, None, "")
    assert result.outcome == "complete", result.reason
    peak: int = result.telemetry["peak_memory_bytes"]
    return peak


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK),
    reason="Linux resets the peak only where /proc/self/clear_refs is writable",
)
def test_the_recorded_peak_is_of_the_stored_weights(tmp_path: Path) -> None:
    """The check of a trial and the loading of its model leave nothing behind."""
    # Not in a trial: pytest keeps its warning, whose traceback would keep the model of the trial.
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    peaks = {base: peak_of(tmp_path / base, base) for base in ("fp32", "nf4")}
    assert peaks["nf4"] < peaks["fp32"], peaks


def test_a_trial_over_stored_layers_needs_no_memory_for_fp32(tmp_path: Path) -> None:
    executor = executor_of(tmp_path, BERT, "int8")
    build_model = executor.loader.build_model

    def build(config: TrialConfig) -> MultitaskModel:
        if config.base_precision == "fp32":
            raise MemoryError
        return build_model(config)

    executor.loader.build_model = build  # type: ignore[method-assign]
    result = executor.run({}, None, "")
    assert (result.outcome, result.reason) == ("complete", "")
    (reason,) = result.telemetry["compatibility"]["reasons"]
    assert reason.startswith("fp32 does not fit into memory here")


def test_a_run_warns_of_spans_whose_offsets_are_probably_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"id": f"r{n}", "text": f"so Ann met {n}", "spans": {"name": [[3, 5]]}} for n in range(9)]
    tasks = {"who": {"kind": "token_classification", "span_names": ["name"]}}
    write_set(
        tmp_path / "set", tasks, train=rows, validation=[{**row, "id": f"v{row['id']}"} for row in rows]
    )
    data = {"source": "jsonl", "path": str(tmp_path / "set")}
    study = StudyConfig.model_validate({"name": "s", "data": data})
    TrialLoader(resolve_study(study, CPU), tmp_path)
    (told,) = [message for message in caplog.messages if "inside a word" in message]
    assert told.startswith("`who`: 18 of 18 spans")
    assert told.endswith("add 1 to each end. `hpo check` shows more.")
