"""Names of a model's parts in fp32, and their modules.

embeddings           the module that turns tokens into vectors
layers.3             one layer of the encoder, 0 the lowest
layers.8-11          several layers
attention            the attention of every layer
norms                every layer norm and RMS norm
heads                the pooling and the head of every task
heads.<task>         the head of one task
<name of a module>   as PyTorch names it: encoder.encoder.layer.0.output.dense
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

from torch import nn

from hpo.errors import ModelError, did_you_mean
from hpo.models.attention import FLASH
from hpo.models.encoder import encoder_layers
from hpo.models.multitask import MultitaskModel
from hpo.precision.observation import Observation
from hpo.precision.parts import run_as_before, run_in_float32
from hpo.precision.table import Precision

OTHERS = "others"
"""Name of the rest of the model in a trial's record."""
_LAYERS = re.compile(r"layers\.(\d+)(?:-(\d+))?")


def set_float32_parts(model: MultitaskModel, parts: Sequence[str]) -> None:
    """Make `parts` compute in fp32 under autocast, and all others in reduced precision.

    The weights must be fp32. Raises ModelError if the model has no such part, or cannot compute it in fp32.
    """
    roots = [(part, root) for part in parts for root in part_modules(model, part)]
    if getattr(model.encoder.config, "_attn_implementation", "") == FLASH:
        attention = {module for module in model.encoder.modules() if _is_attention(module)}
        for part, root in roots:
            if not attention.isdisjoint(root.modules()):
                raise ModelError(
                    f"fp32_parts: `{part}` contains attention, and `attention: flash` computes in fp16 and "
                    "bf16 alone. Use `attention: sdpa`, or leave this part out."
                )
    run_as_before(model)
    for _, root in roots:
        run_in_float32(root)


def part_modules(model: MultitaskModel, part: str) -> list[nn.Module]:
    """Return the modules of a part. Raises ModelError if the model has no such part."""
    if part == "embeddings":
        return [_embeddings(model.encoder)]
    if part == "heads":
        return [module for module in (*model.heads, model.pool) if isinstance(module, nn.Module)]
    if part == "norms":
        chosen = [module for module in model.modules() if "Norm" in type(module).__name__]
    elif part == "attention":
        chosen = [one for layer in encoder_layers(model.encoder) for one in _outermost_attention(layer)]
    elif match := _LAYERS.fullmatch(part):
        return _layers(model, part, int(match[1]), int(match[2] or match[1]))
    else:
        heads = {f"heads.{task.name}": head for task, head in zip(model.tasks, model.heads, strict=True)}
        modules = {name: module for name, module in model.named_modules() if name}
        chosen = [heads[part]] if part in heads else [modules[part]] if part in modules else []
        if not chosen:
            named = ["embeddings", "attention", "norms", "heads", *heads]
            raise ModelError(
                f"fp32_parts: must name parts of the model (embeddings, layers.0, layers.0-1, attention, "
                f"norms, heads, heads.<task> or a module), but {type(model.encoder).__name__} has no "
                f"`{part}`.{did_you_mean(part, named) or did_you_mean(part, [*modules])}"
            )
    if not chosen:
        raise ModelError(
            f"fp32_parts: {type(model.encoder).__name__} has no module of the part `{part}`. Name a module."
        )
    return chosen


def smallest_named_parts(model: MultitaskModel) -> list[str]:
    """Return parts with every weight: embeddings, each layer, each head, and other modules by their names."""
    heads = zip(model.tasks, model.heads, strict=True)
    named = {id(head): f"heads.{task.name}" for task, head in heads}
    with suppress(ModelError):  # an encoder without such modules has others
        layers = encoder_layers(model.encoder)
        named |= {id(layer): f"layers.{number}" for number, layer in enumerate(layers)}
    with suppress(ModelError):
        named[id(_embeddings(model.encoder))] = "embeddings"
    return [*_named_parts(model, "", named)]


def inner_parts(model: MultitaskModel, part: str) -> list[str]:
    """Return the modules one level inside a part, by name; lists of modules count as no level."""
    names = {id(module): name for name, module in model.named_modules()}
    inner = [one for root in part_modules(model, part) for one in _children(root)]
    return [names[id(module)] for module in inner if not isinstance(module, nn.Dropout | nn.Identity)]


def part_facts(
    model: MultitaskModel, parts: Sequence[str], seen: Observation, precision: Precision
) -> dict[str, Any]:
    """Return, for each part and for the others, the expected format and the observed ones.

    {part: {"effective": format, "observed": {format: number of weights}}}. The effective format is None if no
    weight of the part is in a product.
    """
    names = {id(weight): name for name, weight in model.named_parameters()}
    rest = set(seen.products)
    weights: dict[str, set[str]] = {}
    for part in parts:
        inside = {names[id(one)] for root in part_modules(model, part) for one in root.parameters()}
        weights[part] = inside & set(seen.products)
        rest -= inside
    weights[OTHERS] = rest
    return {
        part: {
            "effective": "/".join(sorted({seen.expected(name, precision) for name in inside})) or None,
            "observed": dict(Counter("/".join(sorted(seen.products[name])) for name in sorted(inside))),
        }
        for part, inside in weights.items()
    }


def _named_parts(module: nn.Module, name: str, named: dict[int, str]) -> Iterator[str]:
    if id(module) in named:
        yield named[id(module)]
    elif name in ("", "encoder") or any(id(one) in named for one in module.modules()):
        for child_name, child in module.named_children():
            yield from _named_parts(child, f"{name}.{child_name}".lstrip("."), named)
    elif next(module.parameters(), None) is not None and not isinstance(module, nn.ParameterList):
        yield name


def _children(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from _children(child)
        else:
            yield child


def _layers(model: MultitaskModel, part: str, first: int, last: int) -> list[nn.Module]:
    layers = encoder_layers(model.encoder)
    if not first <= last < len(layers):
        raise ModelError(
            f"fp32_parts: layers must be between 0 and {len(layers) - 1}, the first before the last, but got "
            f"`{part}`."
        )
    return layers[first : last + 1]


def _is_attention(module: nn.Module) -> bool:
    return "Attention" in type(module).__name__


def _outermost_attention(module: nn.Module) -> Iterator[nn.Module]:
    if _is_attention(module):
        yield module
        return
    for child in module.children():
        yield from _outermost_attention(child)


def _embeddings(encoder: nn.Module) -> nn.Module:
    """Return the module at the encoder's top that embeds the tokens and does not contain the layers."""
    try:
        tokens: Any = cast(Any, encoder).get_input_embeddings()
    except (AttributeError, NotImplementedError) as error:  # CANINE hashes characters into several tables
        raise ModelError(
            f"fp32_parts: `embeddings` needs one table of tokens, but {type(encoder).__name__} has none. "
            "Name modules."
        ) from error
    for child in encoder.children():
        is_inside = any(one is tokens for one in child.modules())
        if is_inside and not any(isinstance(one, nn.ModuleList) for one in child.modules()):
            return child
    return cast(nn.Module, tokens)
