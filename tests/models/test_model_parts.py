"""Which modules a part is, and that a part in fp32 computes what fp32 computes, and nothing else does."""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import Any

import pytest
import torch
from tiny import CPU, EMULATED, tiny_model
from tiny_encoders import FAMILIES, SIZES, family_model, make_batch, make_model, scalar_loss
from torch import Tensor, nn

from hpo.errors import ModelError
from hpo.models.model_parts import part_modules, part_with, set_float32_parts
from hpo.models.multitask import MultitaskModel
from hpo.precision.amp import MixedPrecision, prepare_model
from hpo.precision.effective import observe
from hpo.precision.parts import float32_modules
from hpo.precision.table import PRECISIONS

PARTS = ["embeddings", "encoder.layer.0", "encoder.layer.1", "heads"]


def prepared(model: MultitaskModel, name: str, *parts: str) -> tuple[MultitaskModel, MixedPrecision]:
    set_float32_parts(model, parts)
    prepare_model(model, PRECISIONS[name])
    return model.eval(), MixedPrecision(PRECISIONS[name], EMULATED, CPU)


def relative_error(value: Tensor, reference: Tensor) -> float:
    return float((value.double() - reference.double()).norm() / reference.double().norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_every_part(family: str) -> None:
    model = family_model(family)
    names = {id(module): name for name, module in model.named_modules()}
    found = {part: [names[id(module)] for module in part_modules(model, part)] for part in PARTS}
    assert all("embeddings" in name for name in found["embeddings"])
    for part, modules in found.items():
        assert {part_with(model, name) for name in modules} == {part}
    for number, (layer,) in enumerate((found["encoder.layer.0"], found["encoder.layer.1"])):
        inside = [name for name in names.values() if name.startswith(f"{layer}.")]
        assert {part_with(model, name) for name in inside} == {f"encoder.layer.{number}"}


@pytest.mark.parametrize("name", ["bf16", "fp16"])
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


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "parts",
    [("encoder.layer.0",), ("heads", "encoder.layer.0"), ("embeddings", "heads")],
)
def test_what_is_seen_is_what_was_asked_for(name: str, parts: tuple[str, ...]) -> None:
    model, amp = prepared(make_model(pooling="attention"), name, *parts)
    with observe(model) as seen, amp.autocast():
        model(*make_batch())
    in_float32 = float32_modules(model)
    assert seen.disagreement(PRECISIONS[name], in_float32) == ""
    assert in_float32 & seen.facts.keys()
    set_float32_parts(model, ["encoder.layer.1"])
    with observe(model) as seen, amp.autocast():
        model(*make_batch())
    assert bool(seen.disagreement(PRECISIONS[name], in_float32)) == (name != "fp32"), "other modules are"


def test_an_override_can_be_taken_back() -> None:
    model = make_model()
    classes = [type(module) for module in model.modules()]
    set_float32_parts(model, PARTS)
    assert [type(module) for module in model.modules()] != classes
    assert [type(module).__name__ for module in model.modules()] == [one.__name__ for one in classes]
    set_float32_parts(model, ())
    assert [type(module) for module in model.modules()] == classes
    assert float32_modules(model) == set()


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_recomputed_activations_are_those_of_the_part(name: str) -> None:
    gradients = []
    for recomputes in (False, True):
        model = make_model(gradient_checkpointing=recomputes, dropout=0.0, head_dropout=0.0)
        amp = prepared(model, name, "embeddings", "encoder.layer.1")[1]
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


def test_a_part_stays_in_fp32_when_compiled() -> None:
    model, amp = prepared(overflowing("encoder.layer.1"), "fp16", "encoder.layer.1")
    with torch.no_grad(), amp.autocast():
        eager = model(*make_batch())
        for module in model.encoder.encoder.layer:
            module.compile(backend="aot_eager")
        compiled = model(*make_batch())
    torch._dynamo.reset()
    for task, logits in eager.items():
        assert logits.isfinite().all()
        torch.testing.assert_close(compiled[task], logits, rtol=1e-2, atol=1e-2)


def test_weights_in_bf16_have_no_parts_in_fp32() -> None:
    with pytest.raises(ModelError, match="`bf16-true` has no parts in fp32: use bf16"):
        prepared(make_model(), "bf16-true", "heads")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("embedings", "there is no part 'embedings' of a model. Did you mean `embeddings`?"),
        ("encoder.layers.3", "Did you mean `encoder.layer.3`?"),
        ("encoder.layer.2", "a layer must be between 0 and 1, but got 2."),
        ("encoder.layer.-1", "there is no part"),
        ("heads.label", "there is no part 'heads.label' of a model. Did you mean `heads`?"),
    ],
)
def test_a_part_that_the_model_lacks_is_refused(part: str, message: str) -> None:
    model = make_model()
    with pytest.raises(ModelError, match=re.escape(message)):
        set_float32_parts(model, ["heads", part])
    assert not float32_modules(model)


def test_an_encoder_that_shares_its_layers_has_no_such_parts() -> None:
    model = make_model({"model_type": "albert", "hidden_size": 32, "embedding_size": 16, **SIZES})
    assert part_with(model, "encoder.encoder.albert_layer_groups.0") is None
    assert part_with(model, "heads.0.1") == "heads"
    assert part_with(model, "") is None
