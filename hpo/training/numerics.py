"""What precision does to one training step, measured half-way between two evaluations.

Over the weights that are trained, as shares from 0 to 1:

underflow      gradient elements that are zero or subnormal in the dtype that computes them, with the loss
               scaled: below 6.1e-5 in fp16, 1.2e-38 in bf16 and fp32. Rows of an embedding without gradient
               (their tokens are not in the batch) do not count. Other zeros may be true: compare with fp32.
overflow       gradient elements that are infinite or NaN
update_ratio   norm of the update over norm of the weights; around 1e-3 in healthy training
updates_lost   weights with a gradient that the step left as they were. None in a step that was skipped.

About `SAMPLE_ELEMENTS` weights are looked at, in rows evenly spread over all matrices: after the backward
pass, when the activations are gone, so that the peak of the memory stays. So these are estimates: a share of
less than about 1e-5 is seen by chance. Gradients are the sums over micro-batches and ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from hpo.precision.amp import MixedPrecision, is_matmul_module

SAMPLE_ELEMENTS = 2**17


class _Seen(NamedTuple):
    """What is known of a weight before the step."""

    weight: nn.Parameter
    before: Tensor
    has_gradient: Tensor
    counts: Tensor
    """Elements; those whose gradients count, and of these those that underflow; that overflow; with a
    gradient."""


class StepProbe:
    """Measures steps of one trial.

    `start` is called when the gradients of a step are there, scaled, and `result` when the step was made.
    """

    def __init__(self, model: nn.Module, mixed_precision: MixedPrecision) -> None:
        self._model = model
        self._mixed_precision = mixed_precision

    @torch.no_grad()
    def start(self) -> None:
        """Look at the gradients, and copy the weights as they are before the step."""
        self._scale = self._loss_scale()
        self._seen: list[_Seen] = []
        smallest_normal = _smallest_normal(self._model, self._mixed_precision)
        modules = self._model.modules()
        embeddings = {one.weight for one in modules if isinstance(one, nn.Embedding | nn.EmbeddingBag)}
        weights = [one for one in self._model.parameters() if one.grad is not None and one.numel()]
        # Odd, so as not to meet the same place of each attention head, whose size is a power of 2.
        self._stride = -(-sum(weight.numel() for weight in weights) // SAMPLE_ELEMENTS) | 1
        for weight in weights:
            gradient_RN = self._rows(cast(Tensor, weight.grad)).abs_()
            is_finite = gradient_RN < torch.inf
            has_gradient = (gradient_RN > 0) & is_finite
            counts_R1 = torch.ones_like(is_finite[:, :1])
            if weight in embeddings:
                counts_R1 = (has_gradient | ~is_finite).any(dim=1, keepdim=True)
            underflows = (gradient_RN < smallest_normal[weight]) & counts_R1
            every = torch.ones_like(is_finite)
            masks = (every, counts_R1.expand_as(every), underflows, ~is_finite, has_gradient)
            counts = torch.stack([mask.sum() for mask in masks]).double()
            self._seen.append(_Seen(weight, self._rows(weight), has_gradient, counts))

    @torch.no_grad()
    def result(self, step: int) -> dict[str, Any]:
        """Plain numbers; `step` is the number of the step that was made. Waits for the device."""
        total = torch.zeros(8, dtype=torch.float64, device=self._seen[0].before.device)
        for seen in self._seen:
            change = self._rows(seen.weight) - seen.before
            is_lost = (change == 0) & seen.has_gradient
            squares = [values.double().square().sum() for values in (change, seen.before)]
            sums = torch.cat([seen.counts, torch.stack([is_lost.sum(), *squares])])
            total += sums * (seen.weight.numel() / seen.before.numel())  # of few rows, one is many
        self._seen = []
        elements, counted, underflow, overflow, with_gradient, lost, changes, weights = total.tolist()
        scale = self._loss_scale()
        is_skipped = overflow > 0  # what overflows is not applied
        is_skipped |= scale is not None and self._scale is not None and scale < self._scale
        shares = {
            "underflow": underflow / counted if counted else None,
            "overflow": overflow / elements,
            "update_ratio": (changes / weights) ** 0.5 if weights and not is_skipped else None,
            "updates_lost": lost / with_gradient if with_gradient and not is_skipped else None,
        }
        rounded = {name: None if share is None else float(f"{share:.4g}") for name, share in shares.items()}
        return {"step": step, "loss_scale": self._scale, "all": rounded}

    def _loss_scale(self) -> float | None:
        is_scaled = self._mixed_precision.precision.loss_scaling
        return float(self._mixed_precision.scale_value()) if is_scaled else None

    def _rows(self, tensor: Tensor) -> Tensor:
        """An fp32 copy [R, N] of every `stride`-th row; of a vector, a row is an element."""
        rows = (tensor.detach() if tensor.ndim else tensor.detach()[None])[:: self._stride]
        return rows.to(torch.float32, copy=True).reshape(len(rows), -1)


def _smallest_normal(model: nn.Module, mixed_precision: MixedPrecision) -> dict[Tensor, float]:
    """By parameter: of the dtype in which its gradient is computed.

    Autocast reaches the modules with weight matrices; what else has parameters computes in their dtype.
    """
    reduced = getattr(torch, mixed_precision.precision.linear_dtype)
    tiny: dict[Tensor, float] = {}
    for module in model.modules():
        is_reduced = is_matmul_module(module)
        for parameter in module.parameters(recurse=False):
            dtype = reduced if is_reduced else parameter.dtype
            tiny[parameter] = torch.finfo(dtype).smallest_normal
    return tiny
