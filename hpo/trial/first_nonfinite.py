"""The first operator of a pass with a number that is not finite, and its module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

_MASKING = {"masked_fill", "where", "log", "_to_copy"}
"""Operators with an intended -inf; `_to_copy` makes it from fp32's lowest number."""


class FirstNonfinite(TorchDispatchMode):
    """A block that notes the `operator` of its first non-finite number, in words; None: all are finite."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operator: str | None = None
        self.module: str | None = None
        """The innermost module of the operator; "" is the model itself, None the loss after it."""
        self._tracker = ModuleTracker()

    def __enter__(self) -> FirstNonfinite:
        self._tracker.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._tracker.__exit__(*error)

    def facts(self) -> dict[str, str | None]:
        """Return the fields of a `Measurement`."""
        return {"first_nonfinite": self.operator, "first_nonfinite_module": self.module}

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1].rstrip("_")
        inputs = _floating((args, kwargs))
        is_constant = "empty" in name or "full" in name
        if self.operator or func.is_view or is_constant or not inputs:
            return func(*args, **kwargs)
        largest = max((float(tensor.abs().max()) for tensor in inputs if tensor.numel()), default=0.0)
        masks = name in _MASKING or largest == torch.inf
        result = func(*args, **kwargs)
        broken = [tensor for tensor in _floating(result) if not is_finite(tensor)]
        if broken and not (masks and all(map(_only_masks, broken))):
            self._note(func, broken[0].dtype, largest)
        return result

    def _note(self, func: Any, dtype: torch.dtype, largest_input: float) -> None:
        modules = [module for module in self._tracker.parents if module != "Global"]
        if modules:
            self.module = max(modules, key=len).partition(".")[2]
        where = "the loss, after the logits" if self.module is None else self.module or "the model itself"
        phase = "backward" if self._tracker.is_bw else "forward"
        kind = str(dtype).removeprefix("torch.")
        self.operator = f"{func} ({kind}) in {where}, {phase} pass, inputs up to {largest_input:.4g}"


def is_finite(values: Tensor) -> bool:
    """Return true if all values are finite. The extremes (NaN propagates) are faster than each value."""
    return not values.numel() or bool(torch.stack(torch.aminmax(values.detach())).isfinite().all())


def _floating(values: Any) -> list[Tensor]:
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return [leaf for leaf in leaves if leaf.is_floating_point() and leaf.layout == torch.strided]


def _only_masks(tensor: Tensor) -> bool:
    """Return true if -inf is the only number that is not finite."""
    return not bool((tensor.isnan() | tensor.isposinf()).any())
