"""Which modules a part of a model is, and the parts that compute in fp32.

`hpo.precision.part_names` has the names. Parts may overlap: attention lies inside the layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, cast

from torch import nn

from hpo.errors import ModelError, did_you_mean
from hpo.models.encoder import encoder_layers
from hpo.models.multitask import MultitaskModel
from hpo.precision.part_names import (
    ATTENTION,
    EMBEDDINGS,
    FIRST,
    HEAD,
    HEADS,
    LAST,
    LAYER,
    LOSS,
    check_part,
    task_of,
)
from hpo.precision.parts import loss_in_float32, run_as_before, run_in_float32


def part_modules(model: MultitaskModel, part: str) -> list[nn.Module]:
    """The modules of a part; none of `loss`. Raises ModelError where the model has no such part."""
    try:
        check_part(part)
    except ValueError as error:
        raise ModelError(f"precision_overrides.{part}: {error}") from None
    if part == EMBEDDINGS:
        return _embeddings(model.encoder)
    if part == ATTENTION:
        return _attention(model.encoder)
    if part.startswith(LAYER):
        return [_layer(model.encoder, part)]
    if part == HEADS:
        return [module for module in (*model.heads, model.pool) if isinstance(module, nn.Module)]
    if task := task_of(part):
        names = [one.name for one in model.tasks]
        if task not in names:
            raise ModelError(f"precision_overrides.{part}: there is no such task.{did_you_mean(task, names)}")
        return [model.heads[names.index(task)]]
    return []


def parts_of(model: MultitaskModel) -> list[str]:
    """Every part of the model that can be in fp32, in the order of a forward pass.

    `heads` is left out where it is no more than the head of each task.
    """
    parts = []
    for part, find in ((EMBEDDINGS, _embeddings), (ATTENTION, _attention), (LAYER, encoder_layers)):
        with contextlib.suppress(ModelError):  # an encoder without such modules
            found = find(model.encoder)
            parts += [f"{part}{number}" for number in range(len(found))] if part == LAYER else [part]
    heads = [f"{HEAD}{task.name}" for task in model.tasks]
    return [*parts, *([HEADS] if isinstance(model.pool, nn.Module) or len(heads) > 1 else []), *heads, LOSS]


def parts_with(model: MultitaskModel, module: str) -> list[str]:
    """The parts that contain the module of that name, the one with the fewest weights first."""
    inside = model.get_submodule(module)
    found = [
        part
        for part in parts_of(model)
        if any(inside is one for root in part_modules(model, part) for one in root.modules())
    ]
    return sorted(found, key=lambda part: num_weights(model, [part]))


def num_weights(model: MultitaskModel, parts: Iterable[str]) -> int:
    """How many weights the parts have together."""
    weights = {
        id(weight): weight.numel()
        for part in parts
        for root in part_modules(model, part)
        for weight in root.parameters()
    }
    return sum(weights.values())


def set_float32_parts(model: MultitaskModel, loss_fn: Any, parts: Sequence[str]) -> None:
    """Let these parts and no others compute in fp32, `loss` in `loss_fn` (None: there is no loss).

    The weights of the model must be in fp32 now; `prepare_model` leaves those of the parts so.

    Raises ModelError where the model has no such part, or cannot compute it in fp32.
    """
    flash = getattr(model.encoder.config, "_attn_implementation", "") == "flash_attention_2"
    roots = [(part, root) for part in parts for root in part_modules(model, part)]
    for part, _ in roots:
        if flash and (part == ATTENTION or part.startswith(LAYER)):
            raise ModelError(
                f"precision_overrides.{part}: flash attention computes in fp16 and bf16 alone. Use "
                "`attention: sdpa`."
            )
    for one in (*model.modules(), loss_fn):
        run_as_before(one)
    for _, root in roots:
        run_in_float32(root)
    if LOSS in parts and loss_fn is not None:
        loss_in_float32(loss_fn)


def _embeddings(encoder: nn.Module) -> list[nn.Module]:
    """The module at the encoder's top that embeds the tokens; not one that also has the layers."""
    try:
        tokens: Any = cast(Any, encoder).get_input_embeddings()
    except (AttributeError, NotImplementedError) as error:  # CANINE hashes characters into several tables
        raise ModelError(
            f"precision_overrides.{EMBEDDINGS}: {type(encoder).__name__} must have one table of tokens, but "
            "has none. Name its layers."
        ) from error
    for child in encoder.children():
        is_inside = any(one is tokens for one in child.modules())
        if is_inside and not any(isinstance(one, nn.ModuleList) for one in child.modules()):
            return [child]
    return [tokens]


def _attention(encoder: nn.Module) -> list[nn.Module]:
    """The outermost modules whose class is named so."""
    found: dict[str, nn.Module] = {}
    for name, module in encoder.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if name and not is_inside and "attention" in type(module).__name__.lower():
            found[name] = module
    if not found:
        raise ModelError(
            f"precision_overrides.{ATTENTION}: {type(encoder).__name__} must have modules whose class is "
            "named Attention, but has none. Name its layers."
        )
    return list(found.values())


def _layer(encoder: nn.Module, part: str) -> nn.Module:
    layers = encoder_layers(encoder)
    index = part.removeprefix(LAYER)
    number = {FIRST: 0, LAST: len(layers) - 1}.get(index)
    number = int(index) if number is None else number
    if number >= len(layers):
        raise ModelError(
            f"precision_overrides.{part}: a layer must be between 0 and {len(layers) - 1}, but got {number}."
        )
    return layers[number]
