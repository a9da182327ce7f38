from __future__ import annotations

import pytest
import torch
from support.tiny_encoders import (
    FAMILIES,
    KIND_TASKS,
    dropout_rates,
    family_model,
    make_batch,
    make_model,
    scalar_loss,
)
from torch import Tensor, nn

from hpo.models.encoder import encoder_layers
from hpo.models.multitask import (
    AttentionPooling,
    parameter_depths,
    pool_cls,
    pool_max,
    pool_mean,
)
from hpo.tasks.kind import KINDS, Task

POOLINGS = ("cls", "mean", "max", "attention")


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_logits_have_the_shape_of_their_kind() -> None:
    assert {task.kind for task in KIND_TASKS} == set(KINDS)
    logits = make_model(tasks=KIND_TASKS)(*make_batch((12, 7)))
    assert {name: tuple(value.shape) for name, value in logits.items()} == {
        "single": (2, 3),
        "multi": (2, 2),
        "number": (2, 1),
        "joint": (2, 12, 5),
        "overlapping": (2, 12, 6),
        "answer": (2, 12, 2),
        "evidence": (2, 12, 2),
    }
    assert all(value.dtype == torch.float32 for value in logits.values())


def test_any_task_name_works() -> None:
    tasks = tuple(Task(name, "regression") for name in ("type", "keys", "a.b", "", "encoder", "forward"))
    model = make_model(tasks=tasks, loss_weighting="uncertainty")
    assert list(model(*make_batch())) == [task.name for task in tasks]
    log_variance = model.log_variance
    assert log_variance is not None
    assert list(log_variance) == [task.name for task in tasks]


@pytest.mark.parametrize("family", FAMILIES)
def test_type_ids_reach_encoders_that_know_segments_and_no_others(family: str) -> None:
    input_ids, mask = make_batch()
    type_ids = (torch.arange(12) > 5).long().expand(2, 12)
    model = family_model(family).eval()
    plain = model(input_ids, mask)["label"]
    assert torch.equal(model(input_ids, mask, torch.zeros_like(type_ids))["label"], plain)
    differs = not torch.equal(model(input_ids, mask, type_ids)["label"], plain)
    assert differs == (family in ("bert", "electra"))


def pool_by_hand(pooling: str, hidden: Tensor, mask: Tensor, score: nn.Linear) -> Tensor:
    rows = []
    for row, length in zip(hidden, mask.sum(1).tolist(), strict=True):
        real = row[:length]
        if pooling == "attention":
            weight = torch.softmax(real @ score.weight.to(real.dtype)[0], dim=0)
            rows.append((weight[:, None] * real).sum(0))
        else:
            rows.append({"cls": real[0], "mean": real.mean(0), "max": real.amax(0)}[pooling])
    return torch.stack(rows)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooling_is_what_it_says(pooling: str) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3, 9, 8) - 5  # all far below zero: a maximum that saw padding would be 0
    mask = (torch.arange(9) < torch.tensor([9, 4, 1])[:, None]).long()
    hidden = hidden * mask[:, :, None] + (1 - mask[:, :, None]) * 1e4
    attention = AttentionPooling(8)
    pool = {"cls": pool_cls, "mean": pool_mean, "max": pool_max, "attention": attention}[pooling]
    expected = pool_by_hand(pooling, hidden.double(), mask, attention.score)
    torch.testing.assert_close(pool(hidden, mask).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "attention"])
def test_pooling_sums_in_fp32_and_gives_back_the_dtype_it_got(pooling: str) -> None:
    torch.manual_seed(0)
    hidden = (1 + torch.rand(1, 4096, 8)).bfloat16()
    mask = torch.ones(1, 4096, dtype=torch.int64)
    attention = AttentionPooling(8)
    nn.init.zeros_(attention.score.weight)
    attention.bfloat16()
    pooled = (pool_mean if pooling == "mean" else attention)(hidden, mask)
    assert pooled.dtype == torch.bfloat16
    # Only the last rounding is left. 4096 values added up in bf16 would stop at 256.
    assert torch.equal(pooled, hidden.double().mean(1).bfloat16())


def test_mlp_head_computes_gelu_of_a_hidden_layer() -> None:
    model = make_model(head_type="mlp", head_hidden_size=48, pooling="cls").eval()
    pooled = model.encoder(*make_batch()).last_hidden_state[:, 0]
    first, second = model.heads[0][1], model.heads[0][4]
    assert (first.weight.shape, second.weight.shape) == ((48, 32), (3, 48))
    by_hand = nn.functional.gelu(pooled @ first.weight.T + first.bias) @ second.weight.T + second.bias
    torch.testing.assert_close(model(*make_batch())["label"], by_hand)


@pytest.mark.parametrize("head_type", ["linear", "mlp"])
def test_head_dropout_acts_in_the_heads_only_and_only_in_training(head_type: str) -> None:
    low, high = (dropout_rates(make_model(head_type=head_type, head_dropout=value)) for value in (0.0, 0.4))
    changed = {name for name in low if low[name] != high[name]}
    assert changed
    assert all(name.startswith("heads.") for name in changed)
    assert {high[name] for name in changed} == {0.4}

    model = make_model(head_type=head_type, head_dropout=0.4, dropout=0.0, attention_dropout=0.0)
    with torch.no_grad():
        assert not torch.equal(model(*make_batch())["label"], model(*make_batch())["label"])
        model.eval()
        assert torch.equal(model(*make_batch())["label"], model(*make_batch())["label"])


def test_the_same_seed_gives_the_same_model() -> None:
    first, again, other = (state(make_model("minilm", seed=seed)) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    differ = {name for name in first if not torch.equal(first[name], other[name])}
    assert differ == {"heads.0.1.weight", "heads.1.1.weight"}


@pytest.mark.parametrize("family", FAMILIES)
def test_parameter_depths_put_every_parameter_in_its_place(family: str) -> None:
    model = family_model(family, pooling="attention", loss_weighting="uncertainty")
    depths = parameter_depths(model)
    assert depths.keys() == dict(model.named_parameters()).keys()
    layers = encoder_layers(model.encoder)
    for number, layer in enumerate(layers, start=1):
        of_layer = {id(parameter) for parameter in layer.parameters()}
        found = {depths[name] for name, value in model.named_parameters() if id(value) in of_layer}
        assert found == {number}
    lowest = {name for name, depth in depths.items() if depth == 0}
    assert any("word_embeddings" in name or "tok_embeddings" in name for name in lowest)
    highest = {name.split(".")[0] for name, depth in depths.items() if depth == 3}
    assert {"heads", "pool", "log_variances"} <= highest
    outside = {name for name, depth in depths.items() if depth == 3 and name.startswith("encoder.")}
    expected = {"modernbert": {"encoder.final_norm.weight"}}
    assert {name for name in outside if ".pooler." not in name} == expected.get(family, set())


@pytest.mark.parametrize(
    ("family", "freeze_layers"), [*((family, 1) for family in FAMILIES), ("bert", 0), ("bert", 2)]
)
def test_freeze_layers_keeps_the_lowest_layers_and_trains_the_rest(family: str, freeze_layers: int) -> None:
    model = family_model(family, freeze_layers=freeze_layers, pooling="attention")
    depths, before = parameter_depths(model), state(model)
    optimizer = torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr=1.0)
    scalar_loss(model).backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        if ".pooler." in name or (freeze_layers and depths[name] <= freeze_layers):
            assert parameter.grad is None, name
            assert torch.equal(parameter, before[name]), name
        elif "key.bias" not in name and "k.bias" not in name and "k_lin.bias" not in name:
            # (A bias of the keys adds the same to all scores of a query: its gradient is 0.)
            assert not torch.equal(parameter, before[name]), name


@pytest.mark.parametrize(
    ("family", "freeze_layers"), [("bert", 0), ("bert", 1), ("modernbert", 0), ("deberta-v2", 0)]
)
def test_gradient_checkpointing_runs_layers_twice_and_gives_the_same_gradients(
    family: str, freeze_layers: int
) -> None:
    gradients, calls = {}, {}
    for checkpointing in (False, True):
        model = family_model(family, gradient_checkpointing=checkpointing, freeze_layers=freeze_layers)
        count: list[int] = []
        linear = next(
            part for part in encoder_layers(model.encoder)[-1].modules() if isinstance(part, nn.Linear)
        )
        linear.register_forward_hook(lambda *_args, count=count: count.append(1))
        scalar_loss(model).backward()
        gradients[checkpointing] = {
            name: value.grad for name, value in model.named_parameters() if value.grad is not None
        }
        calls[checkpointing] = len(count)
    assert calls == {False: 1, True: 2}
    assert gradients[False].keys() == gradients[True].keys()
    for name, gradient in gradients[False].items():
        torch.testing.assert_close(gradients[True][name], gradient, rtol=1e-6, atol=1e-8)
