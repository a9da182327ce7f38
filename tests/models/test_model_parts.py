"""Which modules a part is, and that a part in fp32 computes what fp32 computes, and nothing else does."""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import Any

import pytest
import torch
from tiny import CPU, EMULATED, tiny_batch, tiny_model, tiny_objective
from tiny_encoders import FAMILIES, SIZES, family_model, make_batch, make_model, scalar_loss
from torch import Tensor, nn

from hpo.errors import ModelError
from hpo.models.model_parts import num_weights, part_modules, parts_of, parts_with, set_float32_parts
from hpo.models.multitask import MultitaskModel
from hpo.precision.amp import MixedPrecision, prepare_model
from hpo.precision.effective import observe
from hpo.precision.parts import float32_modules
from hpo.precision.table import PRECISIONS
from hpo.training.losses import MultitaskLoss

PARTS = ["embeddings", "attention", "encoder.layer.0", "encoder.layer.1", "heads", "heads.label"]


def prepared(model: MultitaskModel, name: str, *parts: str) -> tuple[MultitaskModel, MixedPrecision]:
    set_float32_parts(model, None, parts)
    prepare_model(model, PRECISIONS[name])
    return model.eval(), MixedPrecision(PRECISIONS[name], EMULATED, CPU)


def relative_error(value: Tensor, reference: Tensor) -> float:
    return float((value.double() - reference.double()).norm() / reference.double().norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_every_part(family: str) -> None:
    model = family_model(family)
    assert parts_of(model) == [*PARTS[:5], "heads.label", "heads.spans", "loss"]
    names = {id(module): name for name, module in model.named_modules()}
    found = {part: [names[id(module)] for module in part_modules(model, part)] for part in PARTS}
    assert all("embeddings" in name for name in found["embeddings"])
    assert len(found["attention"]) == 2
    layers = [*found["encoder.layer.0"], *found["encoder.layer.1"]]
    for attention, layer in zip(found["attention"], layers, strict=True):
        assert attention.startswith(f"{layer}.")
    assert part_modules(model, "encoder.layer.last") == part_modules(model, "encoder.layer.1")
    assert part_modules(model, "encoder.layer.first") == part_modules(model, "encoder.layer.0")


@pytest.mark.parametrize("name", ["bf16", "fp16", "bf16-true"])
@pytest.mark.parametrize("family", ["bert", "deberta-v2"])
def test_a_part_computes_what_plain_fp32_computes(family: str, name: str) -> None:
    """Each of its modules gives bit for bit what a plain copy in fp32 gives for the same inputs, which fp64
    agrees with; without the override it does not."""
    for part in PARTS:
        for parts in ((), (part,)):
            plain = family_model(family).eval()
            model, amp = prepared(copy.deepcopy(plain), name, *parts)
            modules = list(zip(part_modules(model, part), part_modules(plain, part), strict=True))
            seen: dict[nn.Module, tuple[Any, Any, Any]] = {}
            for module, _ in modules:
                module.register_forward_hook(partial(note, seen), with_kwargs=True)
            with torch.no_grad(), amp.autocast():
                model(*make_batch())
            for module, reference in modules:
                inputs, options, output = seen[module]
                expected = first(call(reference.float(), inputs, options, torch.float32))
                exact = first(call(reference.double(), inputs, options, torch.float64))
                output = first(output)
                if not parts:
                    # A table in fp32 is the same under autocast, which leaves norms to fp32 too.
                    assert part == "embeddings" or relative_error(output, exact) > 1e-6
                elif name == "bf16-true":
                    assert output.dtype == torch.bfloat16, "the weights around it are bf16"
                    assert torch.equal(output, expected.bfloat16())
                else:
                    assert output.dtype == torch.float32
                    assert torch.equal(output, expected)
                    assert relative_error(output, exact) < 1e-6


def note(seen: dict[nn.Module, Any], module: nn.Module, *call: Any) -> None:
    seen[module] = call


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def call(module: nn.Module, inputs: Any, options: Any, dtype: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(cast, value))
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    with torch.no_grad():
        return module(*cast(inputs), **{key: cast(value) for key, value in options.items()})


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "bf16-true"])
@pytest.mark.parametrize(
    "parts",
    [("attention",), ("heads.label", "encoder.layer.0"), ("embeddings", "attention", "heads"), ("loss",)],
)
def test_what_is_seen_is_what_was_asked_for(name: str, parts: tuple[str, ...]) -> None:
    model, amp = prepared(make_model(pooling="attention"), name, *parts)
    with observe(model) as seen, amp.autocast():
        model(*make_batch())
    in_float32 = float32_modules(model)
    assert seen.disagreement(PRECISIONS[name], in_float32) == ""
    assert bool(in_float32 & seen.facts.keys()) == (parts != ("loss",))
    set_float32_parts(model, None, ["encoder.layer.1"] if "attention" in parts else ["attention"])
    if name in ("bf16", "fp16"):
        assert "did not compute in" in observe_again(model, amp, in_float32, name)


def observe_again(model: MultitaskModel, amp: MixedPrecision, asked_for: set[str], name: str) -> str:
    """What is said where other modules were to be in fp32."""
    with observe(model) as seen, amp.autocast():
        model(*make_batch())
    return seen.disagreement(PRECISIONS[name], asked_for)


def test_an_override_can_be_taken_back() -> None:
    model, loss_fn = make_model(), tiny_objective()
    classes = [type(module) for module in model.modules()]
    set_float32_parts(model, loss_fn, [*PARTS, "loss"])
    assert [type(module) for module in model.modules()] != classes
    assert [type(module).__name__ for module in model.modules()] == [one.__name__ for one in classes]
    assert isinstance(loss_fn, MultitaskLoss)
    set_float32_parts(model, loss_fn, ())
    assert [type(module) for module in model.modules()] == classes
    assert type(loss_fn) is MultitaskLoss
    assert float32_modules(model) == set()


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_recomputed_activations_are_those_of_the_part(name: str) -> None:
    gradients = []
    for recomputes in (False, True):
        model = make_model(gradient_checkpointing=recomputes, dropout=0.0, head_dropout=0.0)
        amp = prepared(model, name, "attention", "encoder.layer.1")[1]
        with amp.autocast():
            loss = scalar_loss(model.train())
        loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(map(torch.equal, *gradients))


def overflowing(part: str) -> MultitaskModel:
    """A model that passes fp16's largest number in the part."""
    model = make_model(tasks=tiny_model().tasks)
    for root in part_modules(model, part):
        for module in root.modules():
            if isinstance(module, nn.Linear):
                nn.init.constant_(module.weight, 5e4)
    return model


@pytest.mark.parametrize("scope", ["model", "layers"])
def test_a_part_stays_in_fp32_when_compiled(scope: str) -> None:
    model, amp = prepared(overflowing("encoder.layer.1"), "fp16", "encoder.layer.1")
    with torch.no_grad(), amp.autocast():
        eager = model(*make_batch())
        for module in [model] if scope == "model" else model.encoder.encoder.layer:
            module.compile(backend="aot_eager")
        compiled = model(*make_batch())
    torch._dynamo.reset()
    for task, logits in eager.items():
        assert logits.isfinite().all()
        torch.testing.assert_close(compiled[task], logits, rtol=1e-2, atol=1e-2)


def test_the_fallback_to_fp32_runs_parts_too() -> None:
    model, _ = prepared(make_model(), "bf16-true", "embeddings", "heads")
    config = EMULATED.model_copy(update={"fallback_to_fp32": True})
    amp = MixedPrecision(PRECISIONS["bf16-true"], config, CPU)
    outputs: list[Tensor] = []

    def compute(forward: Any) -> Tensor:
        outputs.append(forward(*make_batch())["label"])
        return outputs[-1].float().sum() * (1 if len(outputs) > 1 else float("nan"))

    amp.loss(model, compute).backward()
    assert [output.dtype for output in outputs] == [torch.bfloat16, torch.float32]
    with torch.no_grad():
        assert model(*make_batch())["label"].dtype == torch.bfloat16, "as before"


def test_weights_of_parts_stay_in_fp32() -> None:
    """Bit for bit: they were never rounded."""
    plain = make_model()
    model, _ = prepared(copy.deepcopy(plain), "bf16-true", "heads", "encoder.layer.0")
    for (name, value), before in zip(model.named_parameters(), plain.parameters(), strict=True):
        kept = name.startswith(("heads", "encoder.encoder.layer.0."))
        assert value.dtype == (torch.float32 if kept else torch.bfloat16)
        assert torch.equal(value, before.to(value.dtype))


def test_the_loss_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that computes a product, which autocast would take for fp16."""

    def product_sum(_task: Any, logits: Tensor, *_: Any) -> Tensor:
        flat = logits.reshape(1, -1).float() * 1e3
        return (flat @ flat.T).float().sum()

    monkeypatch.setattr("hpo.training.losses.loss_sum", product_sum)
    amp, batch = MixedPrecision(PRECISIONS["fp16"], EMULATED, CPU), tiny_batch()
    losses = []
    for parts in ((), ("loss",)):
        model, loss_fn = make_model(tasks=tiny_model().tasks), tiny_objective()
        set_float32_parts(model, loss_fn, parts)
        items = loss_fn.count(batch)
        with amp.autocast():
            losses.append(loss_fn(model, batch, items, items))
        assert loss_fn.task_losses_T.shape == (4,)
    assert not losses[0].isfinite()
    assert losses[1].isfinite()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("attentoin", "there is no part 'attentoin' of a model. Did you mean `attention`?"),
        ("encoder.layers.3", "Did you mean `encoder.layer.3`?"),
        ("encoder.layer.2", "a layer must be between 0 and 1, but got 2."),
        ("encoder.layer.-1", "there is no part"),
        ("heads.lable", "there is no such task. Did you mean `label`?"),
        ("heads.", "there is no part"),
    ],
)
def test_a_part_that_the_model_lacks_is_refused(part: str, message: str) -> None:
    model = make_model()
    with pytest.raises(ModelError, match=re.escape(message)):
        set_float32_parts(model, None, ["attention", part])
    assert not float32_modules(model)


def test_an_encoder_that_shares_its_layers_has_no_such_parts() -> None:
    model = make_model({"model_type": "albert", "hidden_size": 32, "embedding_size": 16, **SIZES})
    assert parts_of(model) == ["embeddings", "attention", "heads", "heads.label", "heads.spans", "loss"]


def test_the_parts_around_a_module_the_smallest_first() -> None:
    model = make_model()
    dense = "encoder.encoder.layer.1.attention.output.dense"
    assert parts_with(model, dense) == ["encoder.layer.1", "attention"]
    assert num_weights(model, ["encoder.layer.1"]) < num_weights(model, ["attention"])
    assert parts_with(model, "heads.0.1") == ["heads.label", "heads"]
    assert num_weights(model, ["heads", "heads.label"]) == num_weights(model, ["heads"])
    assert parts_with(model, "") == []
