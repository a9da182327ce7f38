"""Kept copies of weights change the time alone: autocast's numbers, wherever weights are read or changed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import CPU, EMULATED, tiny_batch, tiny_executor, tiny_model, tiny_objective
from torch import Tensor, nn

from hpo.config.trial_config import build_trial_config
from hpo.data.batches import collate
from hpo.models.multitask import MultitaskModel
from hpo.precision.amp import MixedPrecision, prepare_model
from hpo.precision.table import PRECISIONS, AmpConfig
from hpo.precision.weight_copies import ReducedLinear, ReducedWeight, keep_reduced_weights
from hpo.training.loop import TrainState, accumulate_gradients, apply_gradients
from hpo.training.optim import OnePassAdam, build_optimizer, parameter_groups

BF16 = PRECISIONS["bf16"]


class Training:
    """A few steps of a tiny model, with kept copies or with autocast's conversions."""

    def __init__(
        self, *, keep: bool, optimizer: str = "adamw", config: AmpConfig = EMULATED, frozen: str = ""
    ) -> None:
        torch.manual_seed(0)
        self.model = tiny_model().train()
        for name, weight in self.model.named_parameters():
            weight.requires_grad_(name != frozen)
        self.reduced = keep_reduced_weights(self.model, BF16, CPU) if keep else {}
        groups = parameter_groups(self.model, learning_rate=1e-2, weight_decay=0.1)
        self.optimizer = build_optimizer(optimizer, groups, reduced=self.reduced)
        self.amp = MixedPrecision(BF16, config, CPU)

    def losses(self, *, num_steps: int = 4, micro_batch_size: int = 6, max_norm: float = 0.1) -> list[float]:
        progress, objective, losses = TrainState(micro_batch_size=micro_batch_size), tiny_objective(), []
        for step in range(num_steps):
            loss = accumulate_gradients(self.model, objective, tiny_batch(), self.amp, step, progress)
            apply_gradients(self.model, self.optimizer, loss, self.amp, max_norm)
            losses.append(float(loss))
        return losses

    def logits(self) -> dict[str, Tensor]:
        batch = tiny_batch()
        with self.amp.evaluation():
            self.model.eval()
            logits: dict[str, Tensor] = self.model(batch.input_ids_BL, batch.attention_mask_BL)
        return logits


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("cached_elements", [1, 100, 10**6])
@pytest.mark.parametrize("max_norm", [0.0, 0.1, 1e6])
@pytest.mark.parametrize("micro_batch_size", [6, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
def test_training_is_that_of_autocast(
    monkeypatch: pytest.MonkeyPatch,
    optimizer: str,
    micro_batch_size: int,
    max_norm: float,
    cached_elements: int,
) -> None:
    monkeypatch.setattr("hpo.training.optim.CACHED_ELEMENTS", cached_elements)
    kept, plain = (Training(keep=keep, optimizer=optimizer) for keep in (True, False))
    assert isinstance(kept.optimizer, OnePassAdam)
    losses, expected = (
        each.losses(micro_batch_size=micro_batch_size, max_norm=max_norm) for each in (kept, plain)
    )
    assert len(set(losses)) == len(losses)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_same(kept.model.state_dict(), plain.model.state_dict())
    assert_same(kept.logits(), plain.logits())


def test_gradients_are_short_and_add_up_in_fp32() -> None:
    kept, plain = Training(keep=True), Training(keep=False)
    for micro_batch_size, dtype in ((6, torch.bfloat16), (2, torch.float32)):
        for each in (kept, plain):
            progress = TrainState(micro_batch_size=micro_batch_size)
            accumulate_gradients(each.model, tiny_objective(), tiny_batch(), each.amp, 0, progress)
        assert {weight.grad.dtype for weight in kept.reduced if weight.grad is not None} == {dtype}
        pairs = zip(kept.model.parameters(), plain.model.parameters(), strict=True)
        for weight, expected in pairs:
            assert weight.grad is not None
            assert expected.grad is not None
            assert torch.equal(weight.grad.float(), expected.grad)


def test_a_failed_backward_pass_leaves_nothing_behind() -> None:
    """As when memory is short and the step is done again."""
    kept, expected = Training(keep=True), Training(keep=True)
    batch, progress = tiny_batch(), TrainState(micro_batch_size=6)

    def fail(_: Any) -> None:
        raise RuntimeError("in the middle")

    handle = kept.model.encoder.embedding.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        accumulate_gradients(kept.model, tiny_objective(), batch, kept.amp, 0, progress)
    handle.remove()
    assert any(weight.grad is not None for weight in kept.reduced)
    assert kept.losses() == expected.losses()


@pytest.mark.parametrize("micro_batch_size", [6, 2])
def test_the_optimizer_alone_writes_the_copies(micro_batch_size: int) -> None:
    kept = Training(keep=True)
    kept.losses(num_steps=1)
    written = []
    original = ReducedWeight.refresh
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReducedWeight, "refresh", lambda self: written.append(self) or original(self))
        kept.logits()
        assert written == []
        kept.losses(num_steps=1, micro_batch_size=micro_batch_size)
        kept.logits()
    assert written == list(kept.reduced.values())


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.load_state_dict({k: v + 0.5 for k, v in model.state_dict().items()}),
        lambda model: [nn.init.normal_(weight) for weight in model.parameters()],
    ],
)
def test_a_copy_follows_its_weight(change: Callable[[nn.Module], Any]) -> None:
    kept, plain = Training(keep=True), Training(keep=False)
    kept.logits()
    with torch.no_grad():
        for each in (kept, plain):
            torch.manual_seed(1)
            change(each.model)
    assert_same(kept.logits(), plain.logits())
    assert kept.losses() == pytest.approx(plain.losses(), rel=1e-5)


@pytest.mark.parametrize(
    "broken", [(True,), (True, False, False), (False, True, False), (False, False, True)]
)
def test_a_repeat_in_fp32_reaches_the_weights_themselves(broken: tuple[bool, ...]) -> None:
    """Of one micro-batch, or of the first, second or third."""
    config = EMULATED.model_copy(update={"fallback_to_fp32": True, "max_fp32_fallbacks": 100})
    kept, plain = Training(keep=True, config=config), Training(keep=False, config=config)
    for each in (kept, plain):
        seen = cycle(broken)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "isfinite", lambda _loss, seen=seen: torch.tensor(not next(seen)))
            progress = TrainState(micro_batch_size=6 // len(broken))
            accumulate_gradients(each.model, tiny_objective(), tiny_batch(), each.amp, 0, progress)
        assert each.amp.statistics().fp32_fallbacks == 1
    for weight, expected in zip(kept.model.parameters(), plain.model.parameters(), strict=True):
        assert weight.grad is not None
        assert expected.grad is not None
        assert weight.grad.dtype == torch.float32
        torch.testing.assert_close(weight.grad, expected.grad, rtol=1e-6, atol=0)


def test_another_weight_in_the_layer_is_not_taken_for_its_own() -> None:
    kept = Training(keep=True)
    batch = tiny_batch()
    doubled = {name: 2 * weight for name, weight in kept.model.named_parameters()}
    with kept.amp.evaluation():
        arguments = (batch.input_ids_BL, batch.attention_mask_BL)
        logits = torch.func.functional_call(kept.model.eval(), doubled, arguments)
    plain = Training(keep=False)
    plain.model.load_state_dict(doubled)
    assert_same(logits, plain.logits())


def test_a_deep_copy_trains() -> None:
    kept = Training(keep=True)
    model = deepcopy(kept.model)
    progress = TrainState(micro_batch_size=6)
    accumulate_gradients(model, tiny_objective(), tiny_batch(), kept.amp, 0, progress)
    assert all(weight.grad is not None for weight in model.parameters())
    assert all(weight.grad is None for weight in kept.model.parameters())


def test_a_layer_is_freed_with_its_last_reference() -> None:
    gc.disable()
    try:
        model = nn.Sequential(nn.Linear(4, 4))
        copies = keep_reduced_weights(model, BF16, CPU)
        weight = weakref.ref(model[0].weight)
        del model, copies
        assert weight() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_transformer_trains_as_under_autocast(tmp_path: Path, checkpointing: bool) -> None:
    """With its dropout, and with activations computed anew in the backward pass."""
    executor = tiny_executor(tmp_path)
    settings = {"learning_rate": 1e-3, "dropout": 0.1, "attention_dropout": 0.1}
    settings["gradient_checkpointing"] = checkpointing
    config = build_trial_config(executor.study, settings, "bf16", executor.amp)
    split = executor.tokens("train", config)
    losses: list[list[float]] = []
    for keep in (True, False):
        torch.manual_seed(0)
        model = executor.build_model(config).train()
        reduced = keep_reduced_weights(model, BF16, CPU) if keep else {}
        update = build_optimizer("adamw", parameter_groups(model, learning_rate=1e-3), reduced=reduced)
        amp, objective = MixedPrecision(BF16, EMULATED, CPU), executor.loss_fn(config, model, split)
        losses.append([])
        for step in range(4):
            batch = collate(split, np.arange(8 * step, 8 * step + 8), executor.tasks, 0)
            progress = TrainState(step=step, micro_batch_size=8)
            loss = accumulate_gradients(model, objective, batch, amp, 0, progress)
            apply_gradients(model, update, loss, amp, 1.0)
            losses[-1].append(float(loss))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_frozen_layer_is_kept_and_stays() -> None:
    kept, plain = (Training(keep=keep, frozen="encoder.dense.weight") for keep in (True, False))
    before = kept.model.state_dict()["encoder.dense.weight"].clone()
    assert kept.losses() == pytest.approx(plain.losses(), rel=1e-5)
    assert torch.equal(kept.model.state_dict()["encoder.dense.weight"], before)
    assert isinstance(kept.model.encoder.dense, ReducedLinear)


def test_the_state_is_that_of_adam_in_pytorch() -> None:
    kept, plain = Training(keep=True), Training(keep=False)
    kept.losses()
    plain.losses()
    state, expected = kept.optimizer.state_dict(), plain.optimizer.state_dict()
    assert state["state"].keys() == expected["state"].keys()
    for index in expected["state"]:
        assert_same(state["state"][index], expected["state"][index])
    # Each goes on from the other's checkpoint.
    kept.optimizer.load_state_dict(expected)
    plain.optimizer.load_state_dict(state)
    assert kept.losses() == pytest.approx(plain.losses(), rel=1e-4)


def test_a_weight_without_gradient_is_not_stepped() -> None:
    kept = Training(keep=True)
    kept.losses(num_steps=1)
    before = [weight.detach().clone() for weight in kept.model.parameters()]
    kept.optimizer.zero_grad()
    kept.optimizer.step()
    assert all(map(torch.equal, before, kept.model.parameters()))


@pytest.mark.parametrize("name", [name for name in PRECISIONS if name != "bf16"])
def test_only_bf16_autocast_on_a_cpu_keeps_copies(name: str) -> None:
    model = tiny_model()
    assert keep_reduced_weights(model, PRECISIONS[name], CPU) == {}
    assert keep_reduced_weights(model, BF16, replace(CPU, type="cuda")) == {}
    prepare_model(model, PRECISIONS["bf16-true"])
    assert keep_reduced_weights(model, BF16, CPU) == {}


def test_a_weight_that_two_layers_share_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    assert list(keep_reduced_weights(model, BF16, CPU)) == [model[2].weight]


def test_an_optimizer_that_cannot_read_them_gets_no_short_gradients() -> None:
    model = tiny_model()
    reduced = keep_reduced_weights(model, BF16, CPU)
    with pytest.raises(ValueError, match="lion"):
        build_optimizer("lion", parameter_groups(model, learning_rate=1e-3), reduced=reduced)


@pytest.mark.parametrize(
    ("optimizer", "compile_mode", "kept"),
    [("adamw", "none", True), ("adam", "none", True), ("sgd", "none", False), ("adamw", "default", False)],
)
def test_a_trial_keeps_copies_where_it_can(
    tmp_path: Path, optimizer: str, compile_mode: str, kept: bool
) -> None:
    executor = tiny_executor(tmp_path)
    settings = {"optimizer": optimizer, "compile": compile_mode, "learning_rate": 1e-3}
    config = build_trial_config(executor.study, settings, "bf16", executor.amp)
    model: MultitaskModel = executor.build_model(config)
    executor.prepare(model, BF16, config, executor.used_ids(config))
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert layers
    assert {isinstance(layer, ReducedLinear) for layer in layers} == {kept}
