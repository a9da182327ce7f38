"""fp8 linear layers by torchao.

A float8 product is twice as fast as a bf16 one, but its inputs are scaled and cast first. That costs more
than it saves on small layers: torchao measured 0.80 of the speed of bf16 for 1024 x 2048 x 1024 and 1.39 for
4096 x 8192 x 16384. torchao's filter by size decides here. Without `compile`, fp8 is slower than bf16. On an
H100, BERT-large in fp8 had 0.92 of the tokens/s of bf16 (tests/gpu/README.md).
"""

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

RECIPE = "tensorwise"
NEEDS_COMPILE = (
    "fp8 needs `compile`: without it, scaling its inputs costs more than its products save. Set `compile: "
    "default`, or use bf16."
)


def convert_to_float8(model: nn.Module, kept: Collection[str] = ()) -> nn.Module:
    """Replace the linear layers large enough for float8, except `kept`. The model may be on the meta device.

    torchao pads the number of tokens to multiples of 16, as gradient products need.
    """
    from torchao.float8 import (
        Float8LinearConfig,
        _auto_filter_for_recipe,
        convert_to_float8_training,
    )

    is_large = _auto_filter_for_recipe(RECIPE, filter_fqns=[])
    converted: nn.Module = convert_to_float8_training(
        model,
        module_filter_fn=lambda module, name: name not in kept and is_large(module, name),
        config=Float8LinearConfig(pad_inner_dim=True),
    )
    return converted


def float8_weights(model: nn.Module) -> list[str]:
    modules = model.named_modules()
    return [f"{name}.weight" for name, module in modules if type(module).__name__ == "Float8Linear"]


def float8_facts(model: nn.Module) -> dict[str, Any]:
    num_linears = sum(isinstance(module, nn.Linear) for module in model.modules())
    return {"float8_linears": len(float8_weights(model)), "num_linears": num_linears}


def no_float8(observed: Mapping[str, Any]) -> str:
    """Return why fp8 is bf16 in this model; empty if it has a float8 layer."""
    if observed.get("float8_linears"):
        return ""
    return (
        "no linear layer of this model is large enough for float8 to pay (torchao's table), so fp8 would be "
        "bf16. Use bf16."
    )
