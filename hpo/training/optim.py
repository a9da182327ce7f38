"""Optimisers, the learning rates of their parameter groups and their schedule, and a step's norm.

Heads have the rate `head_learning_rate`. The encoder's highest layer has `learning_rate`, each layer below it
`layerwise_lr_decay` times the rate above, the embeddings the lowest (discriminative fine-tuning: Howard and
Ruder 2018, arXiv 1801.06146). Biases and norms have no weight decay.

Gradients are accumulated and clipped in the dtype of their weights, by a norm in fp32. Every step is in fp32
(`hpo.training.float32_optimizer`). The schedule is a factor of each group's rate, by the used share of the
budget. So a resumed trial needs no scheduler state.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpo import extensions
from hpo.errors import CodeError, shorten
from hpo.models.multitask import MultitaskModel, parameter_depths
from hpo.training.float32_optimizer import Float32Optimizer, start_momentum, state_facts

SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda remaining: remaining,
    "cosine": lambda remaining: 0.5 * (1.0 - math.cos(math.pi * remaining)),
    "constant": lambda _: 1.0,
}
"""Factors after warm-up, by the remaining share of the budget after it."""


def parameter_groups(
    model: MultitaskModel,
    *,
    learning_rate: float,
    head_learning_rate: float | None = None,
    weight_decay: float = 0.01,
    layerwise_lr_decay: float = 1.0,
) -> list[dict[str, Any]]:
    """Return the groups of trainable parameters for `build_optimizer`. Raises ModelError.

    Each has `name`, `params`, `lr`, `initial_lr` (the rate before the schedule) and `weight_decay`, 0 for
    parameters with less than two dimensions. `head_learning_rate` None is `learning_rate`.
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


class Lion(Optimizer):
    """Lion: the update is the sign of a mean of momentum and gradient (Chen et al. 2023, arXiv 2302.06675).

        u = sign(beta1 m + (1 - beta1) g);  w = w - lr (u + weight_decay w);  m = beta2 m + (1 - beta2) g

    Every weight moves by `lr`, so rates are 3 to 10 times smaller and weight decays larger than AdamW's
    (the paper, section 5).
    """

    found_inf: Tensor | None = None  # 1: the next step changes nothing, as in PyTorch's fused optimisers

    def __init__(
        self, params: list[dict[str, Any]], lr: float, betas: tuple[float, float], weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
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
                gradient = torch.where(is_skipped, momentum, weight.grad)  # a skipped gradient may be NaN
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


def build_optimizer(
    name: str,
    groups: Sequence[Mapping[str, Any]],
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    option: Mapping[str, Any] = {},
    state: str = "fp32",
    fp32_state: Collection[Tensor] = (),
) -> Optimizer:
    """Return the optimiser over `groups`.

    `state` is the format of its moments (`hpo.training.float32_optimizer`). Weights in `fp32_state` have
    moments in fp32. `option` has the options of an optimiser of the study's own code.

    adamw   Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv 1711.05101)
    adam    Adam, weight decay as an L2 term in the gradient (Kingma and Ba 2015, arXiv 1412.6980)
    adafactor   factored second moments; the rate is relative to the size of each weight matrix, weight
            decay is decoupled with the rate before that, and `betas` are not used: the second moment's
            decay rises as 1 - step^-0.8 (Shazeer and Stern 2018, arXiv 1804.04235; torch.optim.Adafactor)
    lion    the sign of a momentum, decoupled weight decay (Chen et al. 2023, arXiv 2302.06675); with the
            default `betas`, not the paper's (0.9, 0.99)
    sgd     the first of `betas` is the momentum, 0 for none, and the second is not used; weight decay as
            an L2 term in the gradient

    adamw, adam and sgd use torch's fused kernels on CPU and CUDA.
    """
    parameters = [parameter for group in groups for parameter in group["params"]]
    # Every group has its own rate. The default is not used, but torch checks it.
    options: dict[str, Any] = {"lr": 0.0}
    if name in ("adamw", "adam", "sgd"):
        options["fused"] = all(parameter.device.type in ("cpu", "cuda") for parameter in parameters)
    if name in ("adamw", "adam", "lion"):
        options["betas"] = betas
    if name == "sgd":
        options["momentum"] = betas[0]
    if name in OPTIMIZERS:
        build = partial(OPTIMIZERS[name], **options)
    else:
        build = partial(_own_optimizer, name, extensions.options_of(name, option))
    copies = [dict(group) for group in groups]  # the optimiser adds its options to them
    if state == "fp32" and all(parameter.dtype == torch.float32 for parameter in parameters):
        optimizer = build(copies)
        start_momentum(optimizer, {parameter: parameter for parameter in parameters})
        return optimizer
    return Float32Optimizer(copies, build, state, fp32_state, unknown=name not in OPTIMIZERS)


def _own_optimizer(name: str, options: Any, groups: Sequence[Mapping[str, Any]]) -> Optimizer:
    optimizer = extensions.OPTIMIZERS[name].make(groups, options)
    if not isinstance(optimizer, Optimizer) or len(optimizer.param_groups) != len(groups):
        message = f"the optimizer `{name}` must be a torch.optim.Optimizer over the groups, but got "
        raise CodeError(f"{message}`{shorten(repr(optimizer), 60)}`.")
    return optimizer


def optimizer_state_facts(optimizer: Optimizer, requested: str) -> dict[str, Any]:
    if not isinstance(optimizer, Float32Optimizer):
        return {"requested": requested, "effective": "fp32", **state_facts(optimizer.state.values())}
    effective = optimizer.kind if any(optimizer.moments.values()) else "fp32"
    reason = "" if effective == requested else "no matrix of the model is large enough."
    facts = state_facts([*optimizer.inner.state.values(), *optimizer.moments.values()])
    return {"requested": requested, "effective": effective, "reason": reason, **facts}


def is_fused(optimizer: Optimizer) -> bool:
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def needs_closure(optimizer: Optimizer) -> bool:
    """Return True if a step needs a closure that makes loss and gradients again, as L-BFGS does."""
    closure = signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is Parameter.empty


def step_unless(optimizer: Optimizer, found_inf: Tensor, closure: Any = None) -> None:
    """Step if `found_inf` is 0, not 1. The closure is that of `Optimizer.step`.

    Fused optimisers and Lion read `found_inf` on the device. Adafactor and encoded moments wait for the
    device here, like GradScaler.
    """
    stepping: Any = optimizer.inner if isinstance(optimizer, Float32Optimizer) else optimizer
    has_encoded = isinstance(optimizer, Float32Optimizer) and optimizer.kind != "fp32"
    if not has_encoded and (is_fused(stepping) or isinstance(stepping, Lion)):
        stepping.found_inf = found_inf
    elif found_inf:
        return
    optimizer.step(*[closure] if closure else [])


def gradient_norm(gradients: Sequence[Tensor], device_type: str) -> Tensor:
    """Return the 2-norm of all gradients together, in fp32 for every dtype."""
    if device_type != "cpu":
        if all(gradient.dtype == torch.float32 for gradient in gradients):
            return nn.utils.get_total_norm(gradients)
        # get_total_norm would return a bf16 norm for bf16 gradients.
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm
    # Faster than get_total_norm: its kernel converts without the processor's vectors.
    flat = (gradient.reshape(-1).float() for gradient in gradients)
    return torch.stack([torch.dot(values, values) for values in flat]).sum().sqrt()


def own_schedule(name: str, option: Mapping[str, Any]) -> Callable[[float], float] | None:
    own = extensions.SCHEDULES.get(name)
    if own is None:
        return None
    options = extensions.options_of(name, option)
    return lambda remaining: extensions.as_number(f"schedule `{name}`", own.make(remaining, options))


def schedule_factor(
    schedule: str | Callable[[float], float], progress: float, warmup_ratio: float = 0.0
) -> float:
    """Return the factor of the learning rate at `progress`, the used share of the budget.

    It rises linearly from 0 over the first `warmup_ratio`. The last step of a budget in seconds may overrun
    it.
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup_ratio:
        return progress / warmup_ratio
    remaining = (1.0 - progress) / (1.0 - warmup_ratio) if warmup_ratio < 1.0 else 1.0
    return SCHEDULES[schedule](remaining) if isinstance(schedule, str) else schedule(remaining)


def set_learning_rate(optimizer: Optimizer, factor: float) -> None:
    """Set every group's `lr` to `factor` times its `initial_lr`."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
