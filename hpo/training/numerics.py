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
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpo.errors import ModelError
from hpo.models.multitask import MultitaskModel, parameter_depths
from hpo.precision.amp import MixedPrecision, is_matmul_module
from hpo.precision.parts import float32_modules
from hpo.training.optim import Float32Optimizer, part_name, rounding_of

PART_ELEMENTS = 2**14

SHARES = ("underflow", "overflow", "update_ratio", "updates_lost")


class StepProbe:
    """Measures steps of one trial.

    `start` is called when the gradients of a step are there, scaled, and `result` when the step was made.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, mixed_precision: MixedPrecision) -> None:
        self._model = model
        self._weights = [weight for weight in model.parameters() if weight.numel()]
        self._optimizer = optimizer
        self._mixed_precision = mixed_precision
        self._sample: _Sample | None = None

    @torch.no_grad()
    def start(self) -> None:
        """Look at the gradients, and copy the weights as they are before the step."""
        weights = [weight for weight in self._weights if weight.grad is not None]
        # The same in every step, but where a batch has no labels of a task.
        if self._sample is None or not self._sample.is_of(weights):
            self._sample = _Sample(self._model, self._mixed_precision, weights)
        sample = self._sample
        self._scale = self._loss_scale()
        self._has_gradient, counts = [], []
        for group in sample.groups:
            gradient = group.values([cast(Tensor, weight.grad) for weight in group.weights]).abs_()
            is_finite = gradient < torch.inf
            has_gradient = (gradient > 0).logical_and_(is_finite)
            masks = (gradient < group.smallest_normal_R1, is_finite, has_gradient)
            counts.append(torch.stack([mask.sum(1) for mask in masks]))
            self._has_gradient.append(has_gradient)
        underflow_R, finite_R, with_gradient_R = torch.cat(counts, dim=1)
        overflow_R = sample.size_R - finite_R
        counts_R = ~sample.is_embedding_R | (with_gradient_R + overflow_R > 0)
        self._gradients = (
            sample.size_R * counts_R,
            underflow_R * counts_R,
            overflow_R,
            sample.size_R,
            with_gradient_R,
        )
        self._before = self._stored(sample)

    @torch.no_grad()
    def result(self, step: int) -> dict[str, Any]:
        """Plain numbers; `step` is the number of the step that was made. Waits for the device."""
        sample = cast(_Sample, self._sample)
        lost, norms = [], []
        for before, after, has_gradient in zip(
            self._before, self._stored(sample), self._has_gradient, strict=True
        ):
            change = after.sub_(before)
            lost.append((change == 0).logical_and_(has_gradient).sum(1))
            norms.append(torch.stack([torch.linalg.vector_norm(each, dim=1) for each in (change, before)]))
        squares = torch.cat(norms, dim=1).double().square_()
        sums_P = sample.sum_by_part((*self._gradients, torch.cat(lost), *squares)).cpu()
        del self._gradients, self._before, self._has_gradient
        sizes_P = torch.tensor(list(sample.num_elements.values())) / sums_P[:, 3]
        scale = self._loss_scale()
        is_skipped = scale is not None and self._scale is not None and scale < self._scale
        is_random = rounding_of(self._optimizer) == "stochastic"
        knows_lost = not is_skipped and not is_random
        every = _shares((sums_P * sizes_P[:, None]).sum(0).tolist(), is_skipped, knows_lost)
        shares = (_shares(row, is_skipped, knows_lost) for row in sums_P.tolist())
        parts = dict(zip(sample.num_elements, shares, strict=True))
        return {"step": step, "loss_scale": self._scale, "all": every, "parts": parts}

    def _loss_scale(self) -> float | None:
        is_scaled = self._mixed_precision.precision.loss_scaling
        return float(self._mixed_precision.scale_value()) if is_scaled else None

    def _stored(self, sample: _Sample) -> list[Tensor]:
        """The sampled weights in fp32, by group, with what rounding keeps beside them."""
        found = [group.values(group.weights) for group in sample.groups]
        if isinstance(self._optimizer, Float32Optimizer):
            for group, values in zip(sample.groups, found, strict=True):
                residuals = [self._optimizer.residual(weight) for weight in group.weights]
                if residuals[0] is not None:  # of one dtype: all of them have one, or none
                    values.add_(group.values(cast(list[Tensor], residuals)))
        return found


@dataclass(frozen=True)
class _Group:
    """Weights of one dtype with rows of one length, and every so-manieth row of each."""

    weights: list[nn.Parameter]
    strides: list[int]
    smallest_normal_R1: Tensor

    def values(self, tensors: list[Tensor]) -> Tensor:
        """An fp32 copy [R, length] of the rows in `tensors`, each of its weight's shape."""
        pairs = zip(tensors, self.strides, strict=True)
        return torch.cat([_rows(tensor)[::stride] for tensor, stride in pairs]).to(torch.float32)


class _Sample:
    """What is looked at of the weights that have a gradient: R rows, in groups, so that operations are few.

    Its tensors are on the weights' device.
    """

    def __init__(
        self, model: nn.Module, mixed_precision: MixedPrecision, weights: Sequence[nn.Parameter]
    ) -> None:
        self._weights = weights
        smallest_normal = _smallest_normal(model, mixed_precision)
        embeddings = {
            module.weight for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        }
        parts = _parts(model)
        self.num_elements = {name: sum(weight.numel() for weight in part) for name, part in parts.items()}
        members: dict[Any, list[tuple[nn.Parameter, int, int]]] = defaultdict(list)
        for index, (name, part) in enumerate(parts.items()):
            stride = -(-self.num_elements[name] // PART_ELEMENTS)
            for weight in part:
                members[_rows(weight).shape[1], weight.dtype].append((weight, stride, index))
        every = [one for group in members.values() for one in group]
        num_rows = torch.tensor([-(-len(_rows(weight)) // stride) for weight, stride, _ in every])

        def by_row(values: list[Any]) -> Tensor:
            return torch.tensor(values).repeat_interleave(num_rows).to(weights[0].device)

        self._part_R = by_row([part for _, _, part in every])
        self.size_R = by_row([_rows(weight).shape[1] for weight, _, _ in every])
        """Elements of each row."""
        self.is_embedding_R = by_row([weight in embeddings for weight, _, _ in every])
        smallest_R = by_row([smallest_normal[weight] for weight, _, _ in every])
        of_groups = torch.split(num_rows, [len(group) for group in members.values()])
        self.groups = [
            _Group([weight for weight, _, _ in group], [stride for _, stride, _ in group], smallest[:, None])
            for group, smallest in zip(
                members.values(), smallest_R.split([int(rows.sum()) for rows in of_groups]), strict=True
            )
        ]

    def is_of(self, weights: Sequence[nn.Parameter]) -> bool:
        """Whether it is a sample of just these."""
        return len(weights) == len(self._weights) and all(map(is_, weights, self._weights))

    def sum_by_part(self, values: Sequence[Tensor]) -> Tensor:
        """Add up `values`, each [R]: fp64 [parts, values]."""
        columns = torch.stack([each.double() for each in values], dim=1)
        sums = columns.new_zeros(len(self.num_elements), len(values))
        return sums.index_add_(0, self._part_R, columns)


def _parts(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The weights that have gradients, by part, from the lowest."""
    try:
        depths = parameter_depths(cast(MultitaskModel, model))
    except ModelError:  # an encoder whose layers are not known is one part
        depths = {}
    highest = max(depths.values(), default=1) - 1
    parts: dict[str, list[nn.Parameter]] = defaultdict(list)
    for name, weight in sorted(model.named_parameters(), key=lambda pair: depths.get(pair[0], 0)):
        if weight.grad is not None and weight.numel():
            parts[part_name(name, depths, highest)].append(weight)
    return dict(parts)


def _rows(tensor: Tensor) -> Tensor:
    """[rows, columns]; of a vector, each element is a row."""
    return tensor.flatten(1) if tensor.ndim >= 2 else tensor.reshape(-1, 1)


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
