"""What precision does to one training step, measured at the step before each evaluation.

By part of the model (embeddings, each encoder layer, heads), as shares from 0 to 1:

underflow      gradient elements that are zero or subnormal in the dtype that computes them, with the loss
               scaled: below 6.1e-5 in fp16, 1.2e-38 in bf16 and fp32. Rows of an embedding without gradient
               (their tokens are not in the batch) do not count. Other zeros may be true: compare with fp32.
overflow       gradient elements that are infinite or NaN
update_ratio   norm of the update over norm of the weights; around 1e-3 in healthy training
updates_lost   weights with a gradient that the step left as they were, compensation included. None under
               stochastic rounding, which loses nothing on average, and in a step that loss scaling skipped.

Of each part about `PART_ELEMENTS` weights at most are looked at (`EMBEDDING_ELEMENTS` where there are
embeddings, few of whose rows have a gradient), in rows evenly spread: after the backward pass, when the
activations are gone, so that the peak of the memory stays. Gradients are the sums over micro-batches and
ranks.

So these are estimates. Five steps of MiniLM, against all of its weights, root mean square of the relative
error: in a layer 0.10 of an underflow of 1.6 %, 0.06 of the update ratio, 0.02 of 65 % updates lost; in a
whole table of 30 522 embeddings 0.21 of the update ratio, 0.17 of the updates lost. A share of less than
about 1e-4 of a part is seen by chance.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
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
EMBEDDING_ELEMENTS = 2**16

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
            gradient = _joined(group.rows_of([cast(Tensor, weight.grad) for weight in group.weights])).abs_()
            is_finite = gradient < torch.inf
            has_gradient = (gradient > 0) & is_finite
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
            lost.append(((change == 0) & has_gradient).sum(1))
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
        found = [_joined(group.stored) for group in sample.groups]
        if isinstance(self._optimizer, Float32Optimizer):
            for group, values in zip(sample.groups, found, strict=True):
                residuals = [self._optimizer.residual(weight) for weight in group.weights]
                if residuals[0] is not None:  # of one dtype: all of them have one, or none
                    values.add_(_joined(group.rows_of(cast(list[Tensor], residuals))))
        return found


@dataclass(frozen=True)
class _Member:
    """A weight, of which every `stride`-th row is looked at."""

    weight: nn.Parameter
    stride: int
    part: int
    is_embedding: bool
    smallest_normal: float


class _Group:
    """Weights of one dtype with rows of one shape; with facts of each of the R rows that are looked at."""

    def __init__(self, members: Sequence[_Member]) -> None:
        self.weights = [member.weight for member in members]
        self._strides = [member.stride for member in members]
        self.stored = self.rows_of([weight.detach() for weight in self.weights])
        """Views of the weights."""
        num_rows = torch.tensor([len(rows) for rows in self.stored])

        def by_row(values: list[Any]) -> Tensor:
            return torch.tensor(values).repeat_interleave(num_rows).to(self.weights[0].device)

        self.part_R = by_row([member.part for member in members])
        self.size_R = by_row([rows[0].numel() for rows in self.stored])
        """Elements."""
        self.is_embedding_R = by_row([member.is_embedding for member in members])
        self.smallest_normal_R1 = by_row([member.smallest_normal for member in members])[:, None]

    def rows_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Views of the rows in `tensors`, each of its weight's shape."""
        return [_rows(tensor)[::stride] for tensor, stride in zip(tensors, self._strides, strict=True)]


class _Sample:
    """What is looked at of `weights`, which have gradients: R rows, by group."""

    def __init__(
        self, model: nn.Module, mixed_precision: MixedPrecision, weights: Sequence[nn.Parameter]
    ) -> None:
        self._identity = _identity(weights)
        smallest_normal = _smallest_normal(model, mixed_precision)
        embeddings = {
            module.weight for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        }
        self.num_elements: dict[str, int] = {}
        members: dict[Any, list[_Member]] = defaultdict(list)
        for index, (name, part) in enumerate(_parts(model).items()):
            self.num_elements[name] = size = sum(weight.numel() for weight in part)
            embeds = any(weight in embeddings for weight in part)
            # Odd, so as not to meet the same place of each attention head, whose size is a power of 2.
            stride = -(-size // (EMBEDDING_ELEMENTS if embeds else PART_ELEMENTS)) | 1
            for weight in part:
                member = _Member(weight, stride, index, weight in embeddings, smallest_normal[weight])
                members[weight.shape[1:], weight.dtype].append(member)
        self.groups = [_Group(group) for group in members.values()]
        self._part_R = torch.cat([group.part_R for group in self.groups])
        self.size_R = torch.cat([group.size_R for group in self.groups])
        self.is_embedding_R = torch.cat([group.is_embedding_R for group in self.groups])

    def is_of(self, weights: Sequence[nn.Parameter]) -> bool:
        """Whether it is a sample of just these."""
        return self._identity == _identity(weights)

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
    """What a tensor is in the first dimension: of a vector its elements, of a number itself."""
    return tensor if tensor.ndim else tensor[None]


def _joined(rows: list[Tensor]) -> Tensor:
    """An fp32 copy [R, length]."""
    joined = torch.cat(rows).to(torch.float32)
    return joined.reshape(len(joined), -1)


def _identity(weights: Sequence[nn.Parameter]) -> list[tuple[int, int]]:
    """Equal for the same weights at the same place in memory."""
    return [(id(weight), weight.data_ptr()) for weight in weights]


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
