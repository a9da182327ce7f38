"""Optimisers, the learning rates of their parameter groups, and the schedule.

Which rate a parameter gets: heads `head_learning_rate`; the encoder's highest layer `learning_rate`, each
layer below it `layerwise_lr_decay` times the one above, the embeddings the lowest (discriminative
fine-tuning: Howard and Ruder 2018, arXiv 1801.06146). Biases and norms are not decayed.

A schedule is a factor of these rates, a function of the share of the budget that is used up. So a budget
of seconds works like one of steps, and a resumed trial needs no scheduler state.

bf16 weights: a bf16 number has 8 bits of mantissa. Adam's second moment moves by 0.1 % of the difference a
step, which bf16 rounds away, so every step is made in fp32 and only the weights are rounded
(`Float32Optimizer`); the state is in fp32 too, unless `optimizer_state` says otherwise. Gradients are
accumulated and clipped in the dtype of their weights, by a norm in fp32.

A bf16 weight w has neighbours w / 256 to w / 128 away, so rounding to nearest loses an update of less than
w / 512, in every step anew, and weight decay too. Fine-tuning at a rate of 2e-5 moves a weight of 0.05 by
less than that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpo import extensions
from hpo.models.multitask import MultitaskModel, parameter_depths
from hpo.training.optimizer_states import SIGNED, Encoded, decode, encode, is_encoded, state_facts

SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda remaining: remaining,
    "cosine": lambda remaining: 0.5 * (1.0 - math.cos(math.pi * remaining)),
    "constant": lambda _: 1.0,
}
"""The rate's factor after warm-up, by the share of the budget after it that remains."""
CHUNK_ELEMENTS = 2**24
"""Weights that an optimiser of ours holds in fp32 at a time; 16.8 M are 64 MiB, and as much of gradients."""
DECODED_ELEMENTS = 2**22
"""The same limit if the moments are encoded: the decoded ones take twice as much."""


def parameter_groups(
    model: MultitaskModel,
    *,
    learning_rate: float,
    head_learning_rate: float | None = None,
    weight_decay: float = 0.01,
    layerwise_lr_decay: float = 1.0,
) -> list[dict[str, Any]]:
    """Return the groups of the trainable parameters, for `build_optimizer`.

    Each has `name`, `params`, `lr`, `initial_lr` (what the schedule's factor applies to) and
    `weight_decay`, which is 0 for parameters with less than two dimensions (biases, norms, log variances).
    `head_learning_rate` None is `learning_rate`. Raises ModelError where a decay below 1 meets an encoder
    whose layers are not known.
    """
    head_rate = learning_rate if head_learning_rate is None else head_learning_rate
    depths = parameter_depths(model) if layerwise_lr_decay != 1.0 else {}
    highest = max(depths.values(), default=1) - 1
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        part, rate = "encoder", learning_rate
        if not name.startswith("encoder."):
            part, rate = "heads", head_rate
        elif depths and depths[name] <= highest:
            part, rate = f"layer {depths[name]}", rate * layerwise_lr_decay ** (highest - depths[name])
        part, decay = (part, weight_decay) if parameter.ndim >= 2 else (f"{part}, no decay", 0.0)
        new = {"name": part, "params": [], "lr": rate, "initial_lr": rate, "weight_decay": decay}
        groups.setdefault(part, new)["params"].append(parameter)
    return list(groups.values())


def build_optimizer(
    name: str,
    groups: Sequence[Mapping[str, Any]],
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    option: Mapping[str, Any] = {},
    state: str = "fp32",
    fp32_state: Collection[Tensor] = (),
) -> Optimizer:
    """Return the optimiser over `groups`, whatever the dtype of the weights.

    Its state is kept as `state` says (`hpo.training.optimizer_states`), that of the weights `fp32_state` in
    fp32, and every step is made in fp32.

    adamw   Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv 1711.05101)
    adam    Adam, weight decay as an L2 term in the gradient (Kingma and Ba 2015, arXiv 1412.6980)
    adafactor   factored second moments; the rate is relative to the size of each weight matrix, weight
            decay is decoupled with the rate before that, and `betas` are not used: the second moment's
            decay rises as 1 - step^-0.8 (Shazeer and Stern 2018, arXiv 1804.04235; torch.optim.Adafactor)
    lion    the sign of a momentum, decoupled weight decay (Chen et al. 2023, arXiv 2302.06675); with the
            `betas` as they are, though the paper's are (0.9, 0.99)
    sgd     the first of `betas` is the momentum, 0 for none, and the second is not used; weight decay as
            an L2 term in the gradient

    adamw, adam and sgd use torch's fused kernels on CPU and CUDA. Another is of the study's own code, with
    its part of `option`.
    """
    parameters = [parameter for group in groups for parameter in group["params"]]
    # Every group names its own rate. The default is not used, but torch checks it.
    options: dict[str, Any] = {"lr": 0.0}
    if name in ("adamw", "adam", "sgd"):
        options["fused"] = all(parameter.device.type in ("cpu", "cuda") for parameter in parameters)
    if name in ("adamw", "adam", "lion"):
        options["betas"] = betas
    if name == "sgd":
        options["momentum"] = betas[0]
    build = partial(OPTIMIZERS[name], **options) if name in OPTIMIZERS else _own_optimizer(name, option)
    own = [dict(group) for group in groups]  # to which the optimiser adds its options
    if state == "fp32" and all(parameter.dtype == torch.float32 for parameter in parameters):
        optimizer = build(own)
        _start_momentum(optimizer, {parameter: parameter for parameter in parameters})
        return optimizer
    return Float32Optimizer(own, build, state, fp32_state)


def _own_optimizer(name: str, option: Mapping[str, Any]) -> Callable[..., Optimizer]:
    return partial(extensions.OPTIMIZERS[name].make, options=extensions.options_of(name, option))


def own_schedule(name: str, option: Mapping[str, Any]) -> Callable[[float], float] | None:
    """The schedule that the study's own code brings; None: it is one of `SCHEDULES`."""
    own = extensions.SCHEDULES.get(name)
    return partial(own.make, options=extensions.options_of(name, option)) if own else None


def optimizer_state_facts(optimizer: Optimizer, requested: str) -> dict[str, Any]:
    """What is stored of an `optimizer_state`: as it was requested, what it is, and what the moments take."""
    if not isinstance(optimizer, Float32Optimizer):
        return {"requested": requested, "effective": "fp32", **state_facts(optimizer.state.values())}
    effective = optimizer.kind if any(optimizer.moments.values()) else "fp32"
    reason = "" if effective == requested else "no matrix of the model is large enough."
    facts = state_facts([*optimizer.inner.state.values(), *optimizer.moments.values()])
    return {"requested": requested, "effective": effective, "reason": reason, **facts}


def is_fused(optimizer: Optimizer) -> bool:
    """Whether it is one of PyTorch's fused optimisers."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def step_unless(optimizer: Optimizer, found_inf: Tensor) -> None:
    """Step, where `found_inf` is 0 and not 1.

    The fused optimisers and Lion read `found_inf` on the device. For Adafactor and for encoded moments, which
    a step would encode again, this waits for the device, as GradScaler does.
    """
    stepping: Any = optimizer.inner if isinstance(optimizer, Float32Optimizer) else optimizer
    has_encoded = isinstance(optimizer, Float32Optimizer) and optimizer.kind != "fp32"
    if not has_encoded and (is_fused(stepping) or isinstance(stepping, Lion)):
        stepping.found_inf = found_inf
    elif found_inf:
        return
    optimizer.step()


def set_learning_rate(optimizer: Optimizer, factor: float) -> None:
    """Set every group's `lr` to `factor` times its `initial_lr`."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def schedule_factor(
    schedule: str | Callable[[float], float], progress: float, warmup_ratio: float = 0.0
) -> float:
    """Return the learning rate's factor at `progress`, the share of the budget that is used up.

    The factor rises linearly from 0 over the first `warmup_ratio` of the budget. After that: `linear` and
    `cosine` fall from 1 to 0 at the end, `constant` stays at 1. A share outside [0, 1] counts as its
    nearer end: the last step of a budget in seconds may overrun it.
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup_ratio:
        return progress / warmup_ratio
    remaining = (1.0 - progress) / (1.0 - warmup_ratio) if warmup_ratio < 1.0 else 1.0
    return SCHEDULES[schedule](remaining) if isinstance(schedule, str) else schedule(remaining)


def gradient_norm(gradients: Sequence[Tensor], device_type: str) -> Tensor:
    """Return the 2-norm of all gradients together, computed in fp32 whatever their dtype is."""
    if device_type != "cpu":
        if all(gradient.dtype == torch.float32 for gradient in gradients):
            return nn.utils.get_total_norm(gradients)
        # get_total_norm would return a bf16 norm for bf16 gradients.
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm
    # Faster than get_total_norm, whose kernel does not use the processor's vectors where it converts.
    flat = (gradient.reshape(-1).float() for gradient in gradients)
    return torch.stack([torch.dot(values, values) for values in flat]).sum().sqrt()


class Lion(Optimizer):
    """Lion: the update is the sign of a mean of momentum and gradient (Chen et al. 2023, arXiv 2302.06675).

        u = sign(beta1 m + (1 - beta1) g);  w = w - lr (u + weight_decay w);  m = beta2 m + (1 - beta2) g

    Every weight moves by `lr`, so rates are 3 to 10 times smaller and weight decays larger than AdamW's
    (the paper, section 5).
    """

    found_inf: Tensor | None = None
    """1: the next step changes nothing; as PyTorch's fused optimisers have it."""

    def __init__(
        self, params: list[dict[str, Any]], lr: float, betas: tuple[float, float], weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        first: Tensor = self.param_groups[0]["params"][0]
        is_skipped = first.new_zeros((), dtype=torch.bool) if self.found_inf is None else self.found_inf > 0
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            rate = torch.where(is_skipped, 0.0, group["lr"])
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                if weight not in self.state:
                    self.state[weight]["momentum"] = torch.zeros_like(weight)
                momentum = self.state[weight]["momentum"]
                gradient = torch.where(is_skipped, momentum, weight.grad)  # which may be NaN
                update = momentum.lerp(gradient, 1 - beta1).sign_()
                weight.sub_(weight * rate * group["weight_decay"]).sub_(update.mul_(rate))
                momentum.lerp_(gradient, 1 - beta2)


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "adafactor": torch.optim.Adafactor,
    "lion": Lion,
    "sgd": torch.optim.SGD,
}


class Float32Optimizer(Optimizer):
    """An optimiser that steps in fp32 over weights, or with moments, in a shorter dtype.

    `build` makes the inner optimiser from groups whose parameters are fp32 stand-ins. A step copies
    weights and gradients into the stand-ins, lets the inner optimiser step, and rounds the weights back.
    Between steps the stand-ins hold no memory; in a step at most `CHUNK_ELEMENTS` of them (or one tensor, if
    that is larger) do, so that the saving of short weights is not lost in the step. Parameters that are fp32
    already are stepped in place.

    To the outside this is an optimiser over the real weights: `zero_grad`, `GradScaler.unscale_` and
    learning rates see these. The state is the inner optimiser's, but for the moments that are kept as `kind`
    says: these are decoded for the step of their chunk, and encoded again after it.

    Args:
        groups: of the parameters.
        build: makes the inner optimiser.
        kind: of `hpo.training.optimizer_states`.
        fp32_state: the weights whose moments are kept in fp32 all the same.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        build: Callable[[list[dict[str, Any]]], Optimizer],
        kind: str = "fp32",
        fp32_state: Collection[Tensor] = (),
    ) -> None:
        super().__init__(groups, {})
        stand_ins = {
            weight: nn.Parameter(weight.new_empty(0, dtype=torch.float32))
            for group in self.param_groups
            for weight in group["params"]
        }
        self.inner = build(
            [{**group, "params": [stand_ins[w] for w in group["params"]]} for group in self.param_groups]
        )
        _start_momentum(self.inner, {stand_in: weight for weight, stand_in in stand_ins.items()})
        self._copy_options(self.inner.param_groups, self.param_groups)
        self.chunks = list(_chunks(stand_ins.items(), CHUNK_ELEMENTS if kind == "fp32" else DECODED_ELEMENTS))
        self.kind = kind
        left = {id(weight) for weight in fp32_state}
        self._order: dict[Tensor, int] = {
            stand_in: index for index, stand_in in enumerate(stand_ins.values())
        }
        self.moments: dict[int, dict[str, Encoded]] = {
            self._order[stand_in]: {}
            for weight, stand_in in stand_ins.items()
            if is_encoded(weight, kind) and id(weight) not in left
        }
        """By the numbers of the parameters; empty before their first step."""
        self.num_encoded = 0
        """How often a moment was encoded: the seed of its chances."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        self._copy_options(self.param_groups, self.inner.param_groups)
        for chunk in self.chunks:
            with_gradient = [pair for pair in chunk if pair[0].grad is not None]
            for weight, stand_in in with_gradient:
                stand_in.data = weight.detach().to(torch.float32)
                stand_in.grad = cast(Tensor, weight.grad).to(torch.float32)
                self._decode(stand_in)
            # The inner optimiser passes over every parameter without a gradient: all of the other chunks.
            self.inner.step()
            for weight, stand_in in with_gradient:
                self._encode(stand_in)
                stand_in.grad = None
                if weight.dtype != torch.float32:
                    weight.copy_(stand_in.detach())
                stand_in.data = stand_in.new_empty(0)

    def _decode(self, stand_in: Tensor) -> None:
        """Give the inner optimiser the moments of a parameter in fp32."""
        for name, encoded in self.moments.get(self._order[stand_in], {}).items():
            self.inner.state[stand_in][name] = decode(encoded, name, self.kind, stand_in.shape)

    def _encode(self, stand_in: Tensor) -> None:
        """Take them from it."""
        number, state = self._order[stand_in], self.inner.state[stand_in]
        if number not in self.moments:
            return
        for name in [name for name in SIGNED if name in state]:  # in this order: it decides on the seeds
            self.num_encoded += 1
            self.moments[number][name] = encode(state.pop(name), name, self.kind, self.num_encoded)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimiser's state; learning rates are those of this optimiser."""
        self._copy_options(self.param_groups, self.inner.param_groups)
        state = self.inner.state_dict()
        if self.kind == "fp32":
            return state
        return state | {"moments": self.moments, "num_encoded": self.num_encoded}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.inner.load_state_dict(
            {key: value for key, value in state_dict.items() if key in ("state", "param_groups")}
        )
        self._copy_options(self.inner.param_groups, self.param_groups)
        if self.kind != "fp32":
            self.num_encoded = state_dict["num_encoded"]
            device = self.param_groups[0]["params"][0].device
            self.moments = {
                number: {
                    name: {part: tensor.to(device) for part, tensor in encoded.items()}
                    for name, encoded in moments.items()
                }
                for number, moments in state_dict["moments"].items()
            }

    @staticmethod
    def _copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        for from_group, to_group in zip(source, target, strict=True):
            to_group.update({key: value for key, value in from_group.items() if key != "params"})


def _start_momentum(optimizer: Optimizer, weights: Mapping[Tensor, Tensor]) -> None:
    """Give SGD the momenta that its first step would make: a fused step that is skipped leaves them unset.

    `weights` are those, by the optimiser's parameters, that have the momenta's shapes. As of torch 2.13.
    """
    if isinstance(optimizer, torch.optim.SGD) and optimizer.defaults["momentum"]:
        for parameter, weight in weights.items():
            momentum = torch.zeros_like(weight, dtype=torch.float32)
            optimizer.state[parameter]["momentum_buffer"] = momentum


def _chunks(rows: Iterable[tuple[Tensor, ...]], num_elements: int) -> Iterator[list[tuple[Tensor, ...]]]:
    """Cut rows into chunks whose first tensors have at most so many elements; a larger row is alone."""
    chunk: list[tuple[Tensor, ...]] = []
    size = 0
    for row in rows:
        if chunk and size + row[0].numel() > num_elements:
            yield chunk
            chunk, size = [], 0
        chunk.append(row)
        size += row[0].numel()
    if chunk:
        yield chunk
