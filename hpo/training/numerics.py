"""What precision does to one training step, measured at the step before each evaluation.

By part of the model (embeddings, each encoder layer, heads), as shares from 0 to 1:

underflow      gradient elements that are zero or subnormal in the dtype that computes them, with the loss
               scaled: below 6.1e-5 in fp16, 1.2e-38 in bf16 and fp32. Rows of an embedding without gradient
               (their tokens are not in the batch) do not count. Other zeros may be true: compare with fp32.
overflow       gradient elements that are infinite or NaN
update_ratio   norm of the update over norm of the weights; around 1e-3 in healthy training
updates_lost   weights with a gradient that the step left as they were, compensation included. None under
               stochastic rounding, which loses nothing on average, and in a step that loss scaling skipped.

Of each part about `PART_ELEMENTS` weights at most are looked at, in rows evenly spread: after the backward
pass, when the activations are gone, so that the peak of the memory stays. Gradients are the sums over
micro-batches and ranks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpo.errors import ModelError
from hpo.models.multitask import MultitaskModel, parameter_depths
from hpo.precision.amp import MixedPrecision, is_matmul_module
from hpo.precision.parts import float32_modules
from hpo.training.optim import Float32Optimizer, part_name, rounding_of

PART_ELEMENTS = 2**16

SHARES = ("underflow", "overflow", "update_ratio", "updates_lost")


@dataclass
class _Part:
    """The sampled weights of a part; tensors on the device."""

    num_elements: int = 0
    weights: list[nn.Parameter] = field(default_factory=list)
    stride: int = 1
    has_gradient: list[Tensor] = field(default_factory=list)
    before: list[Tensor] = field(default_factory=list)


class StepProbe:
    """Measures a step: made when its gradients are there, scaled; asked by `result` when it was made."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, mixed_precision: MixedPrecision) -> None:
        self._optimizer = optimizer
        self._mixed_precision = mixed_precision
        self._scale = self._loss_scale()
        self._parts = _parts(model)
        tiny = _smallest_normal(model, mixed_precision)
        embeddings = {
            module.weight for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        }
        counts = []
        for part in self._parts.values():
            totals = torch.zeros(4, dtype=torch.float64, device=part.weights[0].device)
            for weight in part.weights:
                gradient = _sample(cast(Tensor, weight.grad), part.stride).abs()
                is_counted = gradient.amax(1, keepdim=True) > 0 if weight in embeddings else gradient >= 0
                lost = (gradient < tiny[weight]) & is_counted
                is_finite = gradient < torch.inf
                sizes = (is_counted.expand_as(gradient) | ~is_finite, lost, ~is_finite)
                totals[:3] += torch.stack([one.sum() for one in sizes])
                totals[3] += gradient.numel()
                part.has_gradient.append((gradient > 0) & is_finite)
                part.before.append(self._stored(weight, part.stride))
            counts.append(totals)
        self._gradients = counts

    def result(self, step: int) -> dict[str, Any]:
        """Plain numbers; `step` is the number of the step. Waits for the device."""
        changes = []
        for part in self._parts.values():
            sums = torch.zeros(4, dtype=torch.float64, device=part.weights[0].device)
            for weight, before, has_gradient in zip(
                part.weights, part.before, part.has_gradient, strict=True
            ):
                change = self._stored(weight, part.stride).sub_(before)
                lost = (change == 0) & has_gradient
                sums[:2] += torch.stack([has_gradient.sum(), lost.sum()])
                sums[2:] += torch.stack([change.square().sum(), before.square().sum()])
            changes.append(sums)
        rows = torch.cat([torch.stack(self._gradients), torch.stack(changes)], dim=1).cpu()
        sizes = torch.tensor([part.num_elements for part in self._parts.values()]) / rows[:, 3]
        scale = self._loss_scale()
        is_skipped = scale is not None and self._scale is not None and scale < self._scale
        is_random = rounding_of(self._optimizer) == "stochastic"
        knows_lost = not is_skipped and not is_random
        every = _shares((rows * sizes[:, None]).sum(0).tolist(), is_skipped, knows_lost)
        shares = (_shares(row, is_skipped, knows_lost) for row in rows.tolist())
        parts = dict(zip(self._parts, shares, strict=True))
        return {"step": step, "loss_scale": self._scale, "all": every, "parts": parts}

    def _loss_scale(self) -> float | None:
        is_scaled = self._mixed_precision.precision.loss_scaling
        return float(self._mixed_precision.scale_value()) if is_scaled else None

    def _stored(self, weight: nn.Parameter, stride: int) -> Tensor:
        """A copy of the weight's sample in fp32, with what rounding keeps beside it."""
        values = _sample(weight, stride)
        if isinstance(self._optimizer, Float32Optimizer):
            residual = self._optimizer.residual(weight)
            if residual is not None:
                values.add_(_sample(residual, stride))
        return values


def _parts(model: nn.Module) -> dict[str, _Part]:
    """The parts that have gradients, from the lowest."""
    try:
        depths = parameter_depths(cast(MultitaskModel, model))
    except ModelError:  # an encoder whose layers are not known is one part
        depths = {}
    highest = max(depths.values(), default=1) - 1
    parts: dict[str, _Part] = defaultdict(_Part)
    for name, weight in sorted(model.named_parameters(), key=lambda pair: depths.get(pair[0], 0)):
        if weight.grad is not None and weight.numel():
            part = parts[part_name(name, depths, highest)]
            part.weights.append(weight)
            part.num_elements += weight.numel()
    for part in parts.values():
        part.stride = -(-part.num_elements // PART_ELEMENTS)
    return dict(parts)


def _sample(tensor: Tensor, stride: int) -> Tensor:
    """An fp32 copy [rows, columns] of every so-manieth row; of a vector, of such elements, as one row."""
    values = tensor.detach()
    values = values.flatten(1)[::stride] if values.ndim >= 2 else values.reshape(1, -1)[:, ::stride]
    return values.to(torch.float32, copy=True)


def _smallest_normal(model: nn.Module, mixed_precision: MixedPrecision) -> dict[Tensor, float]:
    """By parameter: of the dtype in which its gradient is computed.

    Autocast reaches the modules with weight matrices, but for parts that are to compute in fp32; what else
    has parameters computes in their dtype.
    """
    reduced = getattr(torch, mixed_precision.precision.linear_dtype)
    tiny: dict[Tensor, float] = {}
    in_float32 = float32_modules(model)
    for name, module in model.named_modules():
        is_reduced = is_matmul_module(module) and name not in in_float32
        for parameter in module.parameters(recurse=False):
            dtype = reduced if is_reduced else parameter.dtype
            tiny[parameter] = torch.finfo(dtype).smallest_normal
    return tiny


def _shares(row: list[float], is_skipped: bool, knows_lost: bool) -> dict[str, float | None]:
    counted, underflow, overflow, sampled, with_gradient, lost, change, weights = row
    shares = {
        "underflow": underflow / counted if counted else None,
        "overflow": overflow / sampled if sampled else None,
        "update_ratio": (change / weights) ** 0.5 if weights and not is_skipped else None,
        "updates_lost": lost / with_gradient if with_gradient and knows_lost else None,
    }
    return {name: None if share is None else float(f"{share:.4g}") for name, share in shares.items()}
