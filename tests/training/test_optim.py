from __future__ import annotations

import copy
import math
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_encoders import BERT, FAMILIES, make_model, scalar_loss
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpo.errors import ModelError
from hpo.models.multitask import MultitaskModel
from hpo.training import optim as optim_module
from hpo.training.optim import (
    OPTIMIZERS,
    SCHEDULES,
    Float32Optimizer,
    Lion,
    build_optimizer,
    parameter_groups,
    schedule_factor,
    set_learning_rate,
)

# transformers up to 5.17 scripts parts of DeBERTa, which torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")


def rates(model: MultitaskModel, **settings: Any) -> dict[str, float]:
    """Learning rate by parameter name."""
    groups = parameter_groups(model, **settings)
    rate_of = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
    return {name: rate_of[id(value)] for name, value in model.named_parameters() if id(value) in rate_of}


# Parameter groups.


def test_every_trained_parameter_is_in_exactly_one_group() -> None:
    for settings in ({}, {"freeze_layers": 1}, {"loss_weighting": "uncertainty", "pooling": "attention"}):
        model = make_model(**settings)
        for decay in (1.0, 0.5):
            groups = parameter_groups(model, learning_rate=1e-3, layerwise_lr_decay=decay)
            grouped = sorted(id(parameter) for group in groups for parameter in group["params"])
            assert grouped == sorted(id(value) for value in model.parameters() if value.requires_grad)


def test_weight_decay_spares_biases_norms_and_log_variances() -> None:
    model = make_model(pooling="attention", loss_weighting="uncertainty")
    names = {id(value): name for name, value in model.named_parameters()}
    groups = parameter_groups(model, learning_rate=1e-3, weight_decay=0.1)
    by_decay: dict[float, set[str]] = {0.0: set(), 0.1: set()}
    for group in groups:
        by_decay[group["weight_decay"]] |= {names[id(parameter)] for parameter in group["params"]}
    assert all(name.endswith(".weight") and "LayerNorm" not in name for name in by_decay[0.1])
    spared = re.compile(r".*\.bias|.*LayerNorm.*|log_variances.*")
    assert all(spared.fullmatch(name) for name in by_decay[0.0])
    assert {"heads.0.1.weight", "pool.score.weight"} <= by_decay[0.1]
    assert {"log_variances.0", "heads.0.1.bias"} <= by_decay[0.0]


def test_one_rate_for_all_unless_asked_otherwise() -> None:
    assert set(rates(make_model(), learning_rate=1e-3).values()) == {1e-3}
    assert len(parameter_groups(make_model(), learning_rate=1e-3)) == 4


def test_head_learning_rate_is_for_all_that_is_new() -> None:
    model = make_model(pooling="attention", loss_weighting="uncertainty")
    for name, rate in rates(model, learning_rate=1e-3, head_learning_rate=0.5).items():
        assert rate == (1e-3 if name.startswith("encoder.") else 0.5), name


def test_layerwise_decay_gives_each_layer_its_exact_rate() -> None:
    model = make_model({**BERT, "num_hidden_layers": 4}, pooling="attention")
    found = rates(model, learning_rate=0.1, head_learning_rate=0.3, layerwise_lr_decay=0.5)
    for name, rate in found.items():
        if name.startswith("encoder.embeddings."):
            assert rate == 0.1 * 0.5**4, name
        elif name.startswith("encoder.encoder.layer."):
            layer = int(name.split(".")[3])  # 0 to 3
            assert rate == 0.1 * 0.5 ** (3 - layer), name
        else:
            assert rate == 0.3, name


@pytest.mark.parametrize("family", FAMILIES)
def test_layerwise_decay_works_for_every_family(family: str) -> None:
    config, attention = FAMILIES[family]
    found = rates(make_model(config, attention=attention), learning_rate=1.0, layerwise_lr_decay=0.1)
    assert sorted({round(rate, 6) for rate in found.values()}) == [0.01, 0.1, 1.0]


def test_frozen_layers_do_not_move_the_rates_of_the_others() -> None:
    free = rates(make_model(), learning_rate=1.0, layerwise_lr_decay=0.5)
    frozen = rates(make_model(freeze_layers=1), learning_rate=1.0, layerwise_lr_decay=0.5)
    assert frozen.keys() < free.keys()
    assert frozen == {name: free[name] for name in frozen}


def test_layerwise_decay_needs_layers() -> None:
    albert = make_model({**BERT, "model_type": "albert", "embedding_size": 16})
    assert set(rates(albert, learning_rate=1.0).values()) == {1.0}
    with pytest.raises(ModelError, match="layerwise_lr_decay at 1"):
        parameter_groups(albert, learning_rate=1.0, layerwise_lr_decay=0.9)


# Optimisers against plain fp64 formulas.


def adam(weight: Tensor, gradients: list[Tensor], lr: float, decay: float, decoupled: bool) -> Tensor:
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, raw in enumerate(gradients, start=1):
        gradient = raw if decoupled else raw + decay * weight
        if decoupled:
            weight = weight * (1 - lr * decay)
        mean = 0.8 * mean + 0.2 * gradient
        square = 0.95 * square + 0.05 * gradient**2
        weight = weight - lr * (mean / (1 - 0.8**step)) / ((square / (1 - 0.95**step)).sqrt() + 1e-8)
    return weight


def lion(weight: Tensor, gradients: list[Tensor], lr: float, decay: float) -> Tensor:
    momentum = torch.zeros_like(weight)
    for gradient in gradients:
        update = torch.sign(0.8 * momentum + 0.2 * gradient)
        weight = weight - lr * (update + decay * weight)
        momentum = 0.95 * momentum + 0.05 * gradient
    return weight


def sgd(weight: Tensor, gradients: list[Tensor], lr: float, decay: float) -> Tensor:
    momentum = torch.zeros_like(weight)
    for gradient in gradients:
        momentum = 0.8 * momentum + gradient + decay * weight
        weight = weight - lr * momentum
    return weight


def adafactor(weight: Tensor, gradients: list[Tensor], lr: float, decay: float) -> Tensor:
    row, column = weight.new_zeros(weight.shape[0], 1), weight.new_zeros(1, weight.shape[1])
    for step, gradient in enumerate(gradients, start=1):
        size = max(1e-3, float(weight.square().mean().sqrt()))
        rate = min(lr, 1 / math.sqrt(step)) * size
        weight = weight * (1 - lr * decay)
        keep = 1 - step**-0.8
        row = keep * row + (1 - keep) * gradient.square().mean(1, keepdim=True)
        column = keep * column + (1 - keep) * gradient.square().mean(0, keepdim=True)
        update = gradient / (row @ column / row.mean()).sqrt()
        update = update / max(1.0, float(update.square().mean().sqrt()))
        weight = weight - rate * update
    return weight


REFERENCES: dict[str, Callable[..., Tensor]] = {
    "adamw": lambda *values: adam(*values, decoupled=True),
    "adam": lambda *values: adam(*values, decoupled=False),
    "adafactor": adafactor,
    "lion": lion,
    "sgd": sgd,
}


def group(*parameters: nn.Parameter, lr: float = 0.1, weight_decay: float = 0.0) -> dict[str, Any]:
    rates = {"lr": lr, "initial_lr": lr, "weight_decay": weight_decay}
    return {"name": "g", "params": list(parameters), **rates}


def gradients_for(shape: tuple[int, ...], steps: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(steps)]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_an_optimizer_computes_its_formula(name: str, weight_decay: float) -> None:
    start, gradients = gradients_for((6, 4), 1)[0], gradients_for((6, 4), 12, seed=2)
    weight = nn.Parameter(start.float())
    optimizer = build_optimizer(name, [group(weight, lr=0.03, weight_decay=weight_decay)], betas=(0.8, 0.95))
    for gradient in gradients:
        weight.grad = gradient.float()
        optimizer.step()
    expected = REFERENCES[name](start, gradients, 0.03, weight_decay)
    torch.testing.assert_close(weight.detach().double(), expected, rtol=2e-5, atol=2e-6)


def test_sgd_without_momentum_follows_the_gradient_alone() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = build_optimizer("sgd", [group(weight, lr=0.5)], betas=(0.0, 0.999))
    for gradient in (1.0, -1.0):
        weight.grad = torch.full((2,), gradient)
        optimizer.step()
    assert weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_fused_kernels_are_used_where_torch_has_them(name: str) -> None:
    assert build_optimizer(name, [group(nn.Parameter(torch.ones(2)))]).param_groups[0]["fused"] is True
    elsewhere = nn.Parameter(torch.ones(2, device="meta"))
    assert build_optimizer(name, [group(elsewhere)]).param_groups[0]["fused"] is False


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_keep_their_own_rate_and_decay(name: str) -> None:
    fast, slow = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = build_optimizer(name, [group(fast, lr=0.1), group(slow, lr=0.0, weight_decay=0.5)])
    for weight in (fast, slow):
        weight.grad = torch.ones(2, 2)
    optimizer.step()
    assert [entry["weight_decay"] for entry in optimizer.param_groups] == [0.0, 0.5]
    assert bool((fast < 1).all())
    assert torch.equal(slow, torch.ones(2, 2))


def test_lion_passes_over_parameters_without_a_gradient() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = Lion([used, unused], lr=0.5, weight_decay=0.1)
    used.grad = torch.tensor([2.0, -2.0])
    assert optimizer.step(lambda: 3.0) == 3.0
    torch.testing.assert_close(used.detach(), torch.tensor([0.45, 1.45]))
    assert torch.equal(unused, torch.ones(2))
    assert unused not in optimizer.state


class Allocations(TorchDispatchMode):
    """The most elements at a time in tensors that were made within."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_elements = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def tensors(values: Any) -> list[Tensor]:
            return [value for value in tree_leaves(values) if isinstance(value, Tensor)]

        given = {tensor.untyped_storage().data_ptr() for tensor in tensors(args)}
        made = function(*args, **(kwargs or {}))
        for tensor in tensors(made):
            if tensor.untyped_storage().data_ptr() not in given:
                self._live[id(tensor)] = tensor.numel()
                weakref.finalize(tensor, self._live.pop, id(tensor))
        self.peak_elements = max(self.peak_elements, sum(self._live.values()))
        return made


def test_lion_allocates_a_bounded_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many weights, of one that is larger than a piece, and of a scalar; with the same result."""
    shapes = [*[(30, 10)] * 8, (200, 10), (2500,), ()]
    results = []
    for elements in (2**22, 500):
        monkeypatch.setattr(optim_module, "LION_ELEMENTS", elements)
        weights = [nn.Parameter(values.float()) for shape in shapes for values in gradients_for(shape, 1)]
        optimizer = build_optimizer("lion", [group(*weights, lr=0.1, weight_decay=0.2)])
        for step in range(3):
            for weight in weights:
                weight.grad = gradients_for(tuple(weight.shape), 1, seed=step)[0].float()
            with Allocations() as seen:
                optimizer.step()
        results.append((seen.peak_elements, [weight.detach() for weight in weights]))
    assert results[0][0] >= sum(map(math.prod, shapes))
    assert results[1][0] <= 500
    assert all(map(torch.equal, results[0][1], results[1][1]))


# Learning rate.


def test_set_learning_rate_scales_the_initial_rates() -> None:
    optimizer = build_optimizer("adamw", [group(nn.Parameter(torch.ones(2)), lr=rate) for rate in (0.1, 0.4)])
    for factor in (0.5, 0.25, 1.0):
        set_learning_rate(optimizer, factor)
        assert [entry["lr"] for entry in optimizer.param_groups] == [0.1 * factor, 0.4 * factor]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", {0.0: 0.0, 0.1: 0.5, 0.2: 1.0, 0.6: 0.5, 1.0: 0.0}),
        ("cosine", {0.0: 0.0, 0.1: 0.5, 0.2: 1.0, 0.4: 0.5 + 0.5 * math.sqrt(0.5), 0.6: 0.5, 1.0: 0.0}),
        ("constant", {0.0: 0.0, 0.1: 0.5, 0.2: 1.0, 0.6: 1.0, 1.0: 1.0}),
    ],
)
def test_schedule_factor(schedule: str, expected: dict[float, float]) -> None:
    for progress, factor in expected.items():
        assert schedule_factor(schedule, progress, 0.2) == pytest.approx(factor, abs=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_factor_at_the_edges(schedule: str) -> None:
    assert schedule_factor(schedule, 0.0, 0.0) == 1.0
    assert schedule_factor(schedule, -0.1, 0.5) == 0.0
    assert schedule_factor(schedule, 1.7, 0.1) == schedule_factor(schedule, 1.0, 0.1)
    assert schedule_factor(schedule, 0.999, 1.0) == 0.999
    assert 0.0 <= schedule_factor(schedule, 1.0, 1.0) <= 1.0


# fp32 state over bf16 weights.


def bf16_step_by_hand(name: str, start: Tensor, gradients: list[Tensor], **options: float) -> Tensor:
    """One fp32 optimiser whose weights are rounded to bf16 after each step."""
    rounded = nn.Parameter(start.float())
    optimizer = build_optimizer(name, [group(rounded, **options)])
    for gradient in gradients:
        rounded.grad = gradient.float()
        optimizer.step()
        rounded.data = rounded.data.bfloat16().float()
    return rounded.data.bfloat16()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("chunk_elements", [2**24, 1])
def test_bf16_weights_step_in_fp32_and_round_once(
    name: str, chunk_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optim_module, "CHUNK_ELEMENTS", chunk_elements)
    starts = [gradients_for(shape, 1)[0].bfloat16() for shape in ((6, 4), (5, 3))]
    gradients = [[value.bfloat16() for value in gradients_for(start.shape, 20, 2)] for start in starts]
    weights = [nn.Parameter(start.clone()) for start in starts]
    groups = [group(weights[0], lr=0.02), group(weights[1], lr=0.05, weight_decay=0.1)]
    optimizer = build_optimizer(name, groups)
    assert isinstance(optimizer, Float32Optimizer)
    assert len(optimizer.chunks) == (1 if chunk_elements > 1 else 2)
    for step in range(20):
        for weight, its_gradients in zip(weights, gradients, strict=True):
            weight.grad = its_gradients[step]
        optimizer.step()
    assert torch.equal(weights[0], bf16_step_by_hand(name, starts[0], gradients[0], lr=0.02))
    expected = bf16_step_by_hand(name, starts[1], gradients[1], lr=0.05, weight_decay=0.1)
    assert torch.equal(weights[1], expected)
    for state in optimizer.inner.state.values():
        assert {value.dtype for value in state.values() if isinstance(value, Tensor)} == {torch.float32}


def test_a_second_moment_in_bf16_would_stand_still() -> None:
    # After gradients of 1 come gradients of 1/16. Adam's second moment falls by 0.1 % a step, which is
    # less than half a unit in the last place of bf16.
    def final_square(weight_dtype: torch.dtype, wrapped: bool) -> float:
        weight = nn.Parameter(torch.zeros(1, dtype=weight_dtype))
        plain = torch.optim.AdamW([weight], lr=0.1, fused=False, foreach=False)
        optimizer = build_optimizer("adamw", [group(weight)]) if wrapped else plain
        state: Any = getattr(optimizer, "inner", optimizer).state
        for step in range(300):
            weight.grad = torch.ones_like(weight) * (1.0 if step < 100 else 0.0625)
            optimizer.step()
        return float(next(iter(state.values()))["exp_avg_sq"])

    exact = final_square(torch.float32, wrapped=True)
    assert final_square(torch.bfloat16, wrapped=True) == pytest.approx(exact, rel=1e-6)
    assert final_square(torch.bfloat16, wrapped=False) > 1.15 * exact


def test_stand_ins_hold_no_memory_between_steps() -> None:
    weight = nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    optimizer = build_optimizer("adamw", [group(weight)])
    assert isinstance(optimizer, Float32Optimizer)
    for _ in range(2):
        assert [stand_in.numel() for _, stand_in in optimizer.chunks[0]] == [0]
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert [stand_in.grad for _, stand_in in optimizer.chunks[0]] == [None]


def test_weights_in_both_dtypes_can_be_mixed() -> None:
    long, plain = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    short, unused = (nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = build_optimizer("adamw", [group(long, short, unused, lr=0.1)])
    reference = build_optimizer("adamw", [group(plain, lr=0.1)])
    for _ in range(3):
        for weight in (long, short, plain):
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        reference.step()
    assert torch.equal(long, plain)
    assert torch.allclose(short.float(), plain, atol=1e-2)
    assert torch.equal(unused, torch.ones(3, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_restored_optimizer_goes_on_as_if_nothing_had_happened(name: str, dtype: torch.dtype) -> None:
    gradients = [value.to(dtype) for value in gradients_for((4, 4), 10)]

    def make() -> tuple[nn.Parameter, Optimizer]:
        weight = nn.Parameter(torch.ones(4, 4, dtype=dtype))
        return weight, build_optimizer(name, [group(weight, lr=0.02, weight_decay=0.1)])

    def advance(weight: nn.Parameter, optimizer: Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            set_learning_rate(optimizer, 1 - step / 10)
            weight.grad = gradients[step].clone()
            optimizer.step()

    straight, optimizer = make()
    advance(straight, optimizer, 0, 10)

    before, optimizer = make()
    advance(before, optimizer, 0, 5)
    saved = copy.deepcopy(optimizer.state_dict())
    after, restored = make()
    after.data.copy_(before.data)
    restored.load_state_dict(saved)
    assert restored.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    advance(after, restored, 5, 10)
    assert torch.equal(after, straight)


def test_state_holds_tensors_numbers_and_names_only(tmp_path: Any) -> None:
    model = make_model().bfloat16()
    optimizer = build_optimizer("adamw", parameter_groups(model, learning_rate=1e-3))
    scalar_loss(model).backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    loaded = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert loaded["param_groups"][0]["name"] == "encoder"


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradient_scaler_unscales_and_skips(name: str, dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.ones(4, 4, dtype=dtype))
    plain = nn.Parameter(torch.ones(4, 4, dtype=dtype))
    optimizer = build_optimizer(name, [group(weight, lr=0.1)])
    reference = build_optimizer(name, [group(plain, lr=0.1)])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(gradient: float) -> float:
        optimizer.zero_grad()
        scaler.scale((weight * gradient).sum()).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_([weight], 1.0)
        scaler.step(optimizer)
        scaler.update()
        return norm.item()

    assert step(0.5) == pytest.approx(2.0)  # 16 gradients of 0.5, after unscaling
    plain.grad = torch.full_like(plain, 0.25)  # clipped to norm 1
    reference.step()
    torch.testing.assert_close(weight, plain, rtol=1e-5, atol=1e-6)
    assert not torch.equal(weight, torch.ones_like(weight))

    before = weight.detach().clone()
    step(math.inf)
    assert torch.equal(weight, before)
    assert scaler.get_scale() == 512.0
