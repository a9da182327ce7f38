"""Differences between two passes of a check: of their outputs and of their gradients."""

import math

import torch
from torch import Tensor

_ROUNDING = 1e-5
"""Size of a gradient, relative to the largest of the model, that may be rounding alone."""


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Return ||value - reference|| / ||reference||; the numerator if the reference is 0."""
    norm = float(reference.double().norm())
    difference = float((value.double() - reference.double()).norm())
    return difference / norm if norm else difference


def gradient_shares(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    """Return `gradient_share` by parameter, without those whose gradient is rounding alone.

    The bias of attention's keys is one: it moves all scores of a query alike, so its true gradient is 0.
    """
    size = {
        name: float(one.norm()) / math.sqrt(one.numel()) for name, one in reference.items() if one.numel()
    }
    least = _ROUNDING * max(size.values(), default=0.0)
    known = [name for name in gradients if size.get(name, 0.0) > least]
    return {name: gradient_share(gradients[name], reference[name]) for name in known}


def gradient_share(gradient: Tensor, reference: Tensor) -> float:
    """Return the share s of the reference that is left, gradient = s reference + noise; at most 1.

    Rounding is noise: it takes nothing off the mean. A sum that stops growing or an underflow does. Five
    standard errors count for the gradient, which grow with the noise and fall with the number of values.
    """
    one, other = gradient.double().flatten(), reference.double().flatten()
    norm = float(other @ other)
    if len(other) < 16 or not norm:  # its noise is unknown
        return 1.0
    share = float(one @ other) / norm
    noise = float((one - share * other).norm())
    return min(1.0, share + 5 * noise / math.sqrt(len(other) * norm))


def cosine(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> float | None:
    """Return the cosine between all gradients as one vector each; None if one of them is zero."""
    names = gradients.keys() & reference.keys()
    one, other = (_scaled([side[name] for name in names]) for side in (gradients, reference))
    norms = math.sqrt(_product(one, one)) * math.sqrt(_product(other, other))
    return _product(one, other) / norms if norms else None


def _scaled(tensors: list[Tensor]) -> list[Tensor]:
    """Scale to a largest absolute value of 1, so that squares stay in the range of fp32."""
    largest = max((float(tensor.abs().max()) for tensor in tensors), default=0.0) or 1.0
    return [torch.atleast_1d(tensor) / largest for tensor in tensors]


def _product(one: list[Tensor], other: list[Tensor]) -> float:
    """Return the inner product: rows in fp32, their sum in fp64. All in fp64 takes fifteen times as long."""
    pairs = zip(one, other, strict=True)
    return sum(float(torch.linalg.vecdot(*pair).sum(dtype=torch.float64)) for pair in pairs)
