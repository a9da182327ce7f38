import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_encoders import (
    DECODERS,
    FAMILIES,
    KIND_TASKS,
    family_model,
    make_batch,
    make_model,
    scalar_loss,
)
from torch import nn
from transformers import AutoConfig, AutoModel

from hpo.models.encoder import encoder_layers
from hpo.models.multitask import AttentionPooling, parameter_depths, pool_cls, pool_max, pool_mean
from hpo.tasks.kind import KINDS, Task


def test_logits_have_the_shape_of_their_kind() -> None:
    assert {task.kind for task in KIND_TASKS} == set(KINDS)
    logits = make_model(tasks=KIND_TASKS)(*make_batch((12, 7)))
    outputs = {"single": 3, "multi": 2, "number": 1, "joint": 5, "overlapping": 6, "answer": 2, "evidence": 2}
    of_text = ("single", "multi", "number")
    shapes = {name: (2, num) if name in of_text else (2, 12, num) for name, num in outputs.items()}
    assert {name: tuple(value.shape) for name, value in logits.items()} == shapes
    assert all(value.dtype == torch.float32 for value in logits.values())
    tasks = tuple(Task(name, "regression") for name in ("type", "keys", "a.b", "", "encoder", "forward"))
    assert [*make_model(tasks=tasks)(*make_batch())] == [task.name for task in tasks], "any name works"


@pytest.mark.parametrize("family", FAMILIES)
def test_type_ids_reach_encoders_with_segments_only(family: str) -> None:
    input_ids, mask = make_batch()
    type_ids = (torch.arange(12) > 5).long().expand(2, 12)
    model = family_model(family).eval()
    plain = model(input_ids, mask)["label"]
    assert torch.equal(model(input_ids, mask, torch.zeros_like(type_ids))["label"], plain)
    differs = not torch.equal(model(input_ids, mask, type_ids)["label"], plain)
    assert differs == (family in ("bert", "electra"))


@pytest.mark.parametrize("pooling", ["cls", "mean", "max", "attention"])
def test_pooling_equals_its_formula(pooling: str) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3, 9, 8) - 5  # far below zero: a maximum over padding would be 0
    mask = (torch.arange(9) < torch.tensor([9, 4, 1])[:, None]).long()
    hidden = hidden * mask[:, :, None] + (1 - mask[:, :, None]) * 1e4
    attention = AttentionPooling(8)
    pool: Any = {"cls": pool_cls, "mean": pool_mean, "max": pool_max, "attention": attention}[pooling]
    for row, found, length in zip(hidden.double(), pool(hidden, mask), mask.sum(1).tolist(), strict=True):
        real = row[:length]
        weight = torch.softmax(real @ attention.score.weight.double()[0], dim=0)
        formulas = {"cls": real[0], "mean": real.mean(0), "max": real.amax(0), "attention": weight @ real}
        torch.testing.assert_close(found.double(), formulas[pooling], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "attention"])
def test_pooling_sums_in_fp32_and_keeps_the_dtype(pooling: str) -> None:
    torch.manual_seed(0)
    hidden = (1 + torch.rand(1, 4096, 8)).bfloat16()
    mask = torch.ones(1, 4096, dtype=torch.int64)
    attention = AttentionPooling(8)
    nn.init.zeros_(attention.score.weight)
    attention.bfloat16()
    pooled = (pool_mean if pooling == "mean" else attention)(hidden, mask)
    # Only the last rounding is left. 4096 values added up in bf16 would stop at 256.
    assert torch.equal(pooled, hidden.double().mean(1).bfloat16())


@pytest.mark.parametrize("family", FAMILIES)
def test_parameter_depths_cover_every_parameter(family: str) -> None:
    model = family_model(family, pooling="attention", loss_weighting="uncertainty")
    depths = parameter_depths(model)
    parameters = dict(model.named_parameters())
    assert depths.keys() == parameters.keys()
    for number, layer in enumerate(encoder_layers(model.encoder), start=1):
        inside = {id(parameter) for parameter in layer.parameters()}
        assert {depths[name] for name, value in parameters.items() if id(value) in inside} == {number}
    lowest, highest = ({name for name, depth in depths.items() if depth == level} for level in (0, 3))
    assert any("word_embeddings" in name or "tok_embeddings" in name for name in lowest)
    assert {"heads", "pool", "log_variances"} <= {name.split(".")[0] for name in highest}
    outside = {name for name in highest if name.startswith("encoder.") and ".pooler." not in name}
    assert outside == ({"encoder.final_norm.weight"} if family == "modernbert" else set())


def test_parts_beside_the_layers_have_the_depth_of_their_use(tmp_path: Path) -> None:
    deberta = {**FAMILIES["deberta-v2"][0], "norm_rel_ebd": "layer_norm", "conv_kernel_size": 3}
    (tmp_path / "config.json").write_text(json.dumps(deberta | {"vocab_size": 30522}))
    AutoModel.from_config(AutoConfig.from_pretrained(tmp_path)).save_pretrained(tmp_path)
    model = make_model(str(tmp_path), attention="eager", freeze_layers=2)
    depths = parameter_depths(model)
    assert depths["encoder.encoder.LayerNorm.weight"] == 0
    assert depths["encoder.encoder.conv.conv.weight"] == 1
    assert not any(weight.requires_grad for weight in model.encoder.parameters())
    lfm2 = make_model({**DECODERS["llama"], "model_type": "lfm2"}, freeze_layers=2)
    assert [name for name, weight in lfm2.encoder.named_parameters() if weight.requires_grad] == [
        "embedding_norm.weight"
    ]


@pytest.mark.parametrize(("family", "num"), [*((family, 1) for family in FAMILIES), ("bert", 0), ("bert", 2)])
def test_freeze_layers_trains_only_the_rest(family: str, num: int) -> None:
    model = family_model(family, freeze_layers=num, pooling="attention")
    depths = parameter_depths(model)
    scalar_loss(model).backward()
    for name, parameter in model.named_parameters():
        if ".pooler." in name or (num and depths[name] <= num):
            assert parameter.grad is None, name
        elif not name.endswith(("key.bias", "k.bias", "k_lin.bias")):
            # (A bias of the keys adds the same to all scores of a query: its gradient is 0.)
            assert parameter.grad.any(), name


@pytest.mark.parametrize(("family", "num"), [("bert", 0), ("bert", 1), ("modernbert", 0), ("deberta-v2", 0)])
def test_gradient_checkpointing_repeats_layers(family: str, num: int) -> None:
    """The gradients are equal."""
    gradients, calls = [], []
    for checkpointing in (False, True):
        model = family_model(family, gradient_checkpointing=checkpointing, freeze_layers=num)
        modules = encoder_layers(model.encoder)[-1].modules()
        linear = next(one for one in modules if isinstance(one, nn.Linear))
        linear.register_forward_hook(lambda *_, checkpointing=checkpointing: calls.append(checkpointing))
        scalar_loss(model).backward()
        parameters = model.named_parameters()
        gradients.append({name: value.grad for name, value in parameters if value.grad is not None})
    assert calls == [False, True, True]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-6, atol=1e-8)
