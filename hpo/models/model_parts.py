"""Which modules a part of a model is, and the parts that compute in fp32.

`hpo.precision.part_names` has the names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, cast

from torch import nn

from hpo.errors import ModelError
from hpo.models.attention import FLASH
from hpo.models.encoder import encoder_layers
from hpo.models.multitask import MultitaskModel
from hpo.precision.part_names import EMBEDDINGS, HEADS, LAYER, check_part
from hpo.precision.parts import run_as_before, run_in_float32


def part_modules(model: MultitaskModel, part: str) -> list[nn.Module]:
    """The modules of a part. Raises ModelError where the model has no such part."""
    try:
        check_part(part)
    except ValueError as error:
        raise ModelError(f"precision_overrides.{part}: {error}") from None
    if part == EMBEDDINGS:
        return [_embeddings(model.encoder)]
    if part == HEADS:
        return [module for module in (*model.heads, model.pool) if isinstance(module, nn.Module)]
    layers, number = encoder_layers(model.encoder), int(part.removeprefix(LAYER))
    if number >= len(layers):
        raise ModelError(
            f"precision_overrides.{part}: a layer must be between 0 and {len(layers) - 1}, but got {number}."
        )
    return [layers[number]]


def part_with(model: MultitaskModel, module: str) -> str | None:
    """The part that contains the module of that name; None where none does."""
    inside, names = model.get_submodule(module), [EMBEDDINGS, HEADS]
    with contextlib.suppress(ModelError):  # an encoder without such modules
        names += [f"{LAYER}{number}" for number in range(len(encoder_layers(model.encoder)))]
    for name in names:
        with contextlib.suppress(ModelError):
            if any(inside is one for root in part_modules(model, name) for one in root.modules()):
                return name
    return None


def set_float32_parts(model: MultitaskModel, parts: Sequence[str]) -> None:
    """Let these parts and no others compute in fp32; the weights of the model must be in fp32.

    Raises ModelError where the model has no such part, or cannot compute it in fp32.
    """
    flash = getattr(model.encoder.config, "_attn_implementation", "") == FLASH
    roots = [(part, root) for part in parts for root in part_modules(model, part)]
    for part, _ in roots:
        if flash and part.startswith(LAYER):
            raise ModelError(
                f"precision_overrides.{part}: flash attention computes in fp16 and bf16 alone. Use "
                "`attention: sdpa`."
            )
    for module in model.modules():
        run_as_before(module)
    for _, root in roots:
        run_in_float32(root)


def _embeddings(encoder: nn.Module) -> nn.Module:
    """The module at the encoder's top that embeds the tokens; not one that also has the layers."""
    try:
        tokens: Any = cast(Any, encoder).get_input_embeddings()
    except (AttributeError, NotImplementedError) as error:  # CANINE hashes characters into several tables
        raise ModelError(
            f"precision_overrides.{EMBEDDINGS}: {type(encoder).__name__} has no table of tokens. Name layers."
        ) from error
    for child in encoder.children():
        is_inside = any(one is tokens for one in child.modules())
        if is_inside and not any(isinstance(one, nn.ModuleList) for one in child.modules()):
            return child
    return cast(nn.Module, tokens)
