"""Every setting of a trial that a study may fix or search: its meaning, its unit, its range, its default.

A study fixes a setting under `training:` and searches it under `search_space:`, by the same name. The
weight of a task's loss is written `loss_weight.<task>`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from hpo.config.study_file import show
from hpo.precision.table import canonical_precision
from hpo.section import Count, Section, Switch, Whole


def _encoder(value: Any) -> Any:
    if (isinstance(value, str) and value.strip()) or (isinstance(value, dict) and value):
        return value
    what = "a name, a hub id, a folder, or a mapping with the config of a fresh encoder"
    raise ValueError(f"must be {what}, but got {show(value)}.")


PrecisionName = Annotated[str, AfterValidator(canonical_precision)]
Encoder = Annotated[str | dict[str, Any], BeforeValidator(_encoder)]
Share = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Share, Share], Field(strict=False)]

LOSS_WEIGHT = "loss_weight."
"""`loss_weight.<task>` is the one setting whose name has a free part."""

BUDGETS = ("epochs", "max_steps", "max_seconds")
"""A trial ends by exactly one of these."""

MODEL_SETTINGS = (
    "encoder",
    "attention",
    "freeze_layers",
    "max_length",
    "dropout",
    "attention_dropout",
    "gradient_checkpointing",
    "layerwise_lr_decay",
    "compile",
    "compile_scope",
)
"""Settings of which some combinations cannot be built."""

STEP_SETTINGS = (*BUDGETS, *MODEL_SETTINGS, "batch_size", "micro_batch_size", "compile_dynamic")
"""Settings that decide whether a trial has steps in which nothing is compiled."""

DEFAULT_EPOCHS = 3.0


class TrialSettings(Section):
    """The settings of a trial. Each is fixed here or searched under `search_space`, by the same name."""

    fp_precision: PrecisionName | None = Field(
        None,
        description="Numeric precision: `fp32` (or `none`, `32-true`), `tf32`, `bf16` (or `bf16-mixed`), "
        "`fp16` (or `16-mixed`), `bf16-true` (bf16 weights, whose gradients are also accumulated and clipped "
        "in bf16), `fp8`. Left out, `amp.preset` decides.",
    )
    encoder: Encoder | None = Field(
        None, description="Encoder, as in `model.encoder`, which it takes when left out."
    )
    max_length: Whole = Field(
        256, ge=8, description="Longest input in tokens, special tokens included; see `data.long_text`."
    )

    pooling: Literal["cls", "mean", "max", "attention"] = Field(
        "mean", description="How token vectors become one vector for the heads that label a whole text."
    )
    head_type: Literal["linear", "mlp"] = Field(
        "linear", description="Head of each task: one linear layer, or one hidden layer before it."
    )
    head_hidden_size: Count = Field(256, description="Width of that hidden layer (`head_type: mlp`).")
    dropout: Share | None = Field(
        None, description="Dropout in the encoder; left out, what the encoder's config says."
    )
    attention_dropout: Share | None = Field(
        None,
        description="Dropout of attention weights; left out, what the encoder's config says. 0 allows the "
        "fused attention kernels on a CPU.",
    )
    head_dropout: Share = Field(0.1, description="Dropout before each head.")
    freeze_layers: Whole = Field(
        0, ge=0, description="Layers that are not trained, from the bottom; above 0 the embeddings neither."
    )
    gradient_checkpointing: Switch = Field(
        False, description="Compute activations again in the backward pass: less memory, more time."
    )
    attention: Literal["sdpa", "eager", "flash"] = Field(
        "sdpa",
        description="Attention implementation: `sdpa` is PyTorch's fused one and, with attention dropout on "
        "a CPU, where that has no kernel, one of ours; `flash` needs flash-attention and a GPU.",
    )
    compile: Literal["none", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = (
        Field("none", description="`torch.compile` mode. `none` runs eagerly.")
    )
    compile_scope: Literal["model", "layers"] = Field(
        "model", description="Compile the whole model, or each encoder layer (one graph for all of them)."
    )
    compile_dynamic: Switch | None = Field(
        None, description="`torch.compile`'s `dynamic`: symbolic shapes; left out, PyTorch decides."
    )

    optimizer: Literal["adamw", "adam", "adafactor", "lion", "sgd"] = Field(
        "adamw", description="Optimiser. Its state is fp32 in every precision."
    )
    learning_rate: float = Field(5e-5, gt=0, le=10, description="Peak learning rate of the encoder.")
    head_learning_rate: Annotated[float, Field(gt=0, le=10)] | None = Field(
        None, description="Peak learning rate of the heads; left out, `learning_rate`."
    )
    layerwise_lr_decay: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Factor on the learning rate from each encoder layer to the one below. 1: the same rate "
        "everywhere.",
    )
    weight_decay: float = Field(
        0.01,
        ge=0,
        le=1,
        description="Weight decay; biases and norms are left out. Decoupled from the gradient in `adamw`, "
        "`lion` and `adafactor`, an L2 term in the gradient in `adam` and `sgd`.",
    )
    betas: Betas = Field(
        (0.9, 0.999),
        description="Decay of the moments of `adamw`, `adam` and `lion`, with the same default (lion's paper "
        "has 0.9 and 0.99). `sgd` takes the first as momentum; `adafactor` takes neither.",
    )
    schedule: Literal["linear", "cosine", "constant"] = Field(
        "linear", description="Learning rate after warm-up, down to 0 at the end of the trial's budget."
    )
    warmup_ratio: Share = Field(
        0.1, description="Share of the trial's budget in which the learning rate rises from 0."
    )
    max_grad_norm: Annotated[float, Field(gt=0)] | None = Field(
        1.0, description="Norm to which gradients are clipped, after unscaling. `null`: no clipping."
    )

    batch_size: Count = Field(16, description="Examples in one optimiser step.")
    micro_batch_size: Count | None = Field(
        None,
        description="Examples in one forward and backward pass; gradients are accumulated to `batch_size`, "
        "with the same loss. Left out, `batch_size`, halved when memory runs out.",
    )
    loss: Literal["auto", "cross_entropy", "bce", "focal", "mse", "huber"] = Field(
        "auto",
        description="Loss of the tasks that it fits; `auto` is cross-entropy for single labels and tokens, "
        "binary cross-entropy for multiple labels, mean squared error for regression.",
    )
    focal_gamma: float = Field(2.0, ge=0, description="Focus of `loss: focal` on hard examples.")
    label_smoothing: Share = Field(0.0, description="Share of the target spread over all classes.")
    class_weighting: Literal["none", "balanced"] = Field(
        "none", description="`balanced` weighs classes by the inverse of their frequency in training."
    )
    loss_weighting: Literal["fixed", "uncertainty"] = Field(
        "fixed",
        description="How the losses of tasks are added: by `loss_weight`, or by learned uncertainty "
        "(Kendall et al. 2018, arXiv 1705.07115).",
    )
    loss_weight: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict, description="Weight of a task's loss, written `loss_weight.<task>`; 1 each."
    )

    init_scale: Annotated[float, Field(gt=0)] | None = Field(
        None, description="fp16: first factor of the loss; left out, `amp.init_scale`."
    )
    growth_factor: Annotated[float, Field(gt=1)] | None = Field(
        None, description="fp16: growth of the scale; left out, `amp.growth_factor`."
    )
    backoff_factor: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="fp16: shrinkage after an overflow; left out, `amp.backoff_factor`."
    )
    growth_interval: Count | None = Field(
        None, description="fp16: steps without overflow before growth; left out, `amp.growth_interval`."
    )

    epochs: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Budget: passes over the training split. Exactly one of `epochs`, `max_steps` and "
        "`max_seconds`; with none given, 3 epochs.",
    )
    max_steps: Count | None = Field(None, description="Budget: optimiser steps.")
    max_seconds: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Budget: seconds of training. Equal time for all trials, so a faster precision sees "
        "more data.",
    )
    seed: Whole = Field(
        42, ge=0, lt=2**32, description="Seed of head initialisation, dropout and the order of the data."
    )

    @model_validator(mode="before")
    @classmethod
    def _gather_loss_weights(cls, data: Any) -> Any:
        """`loss_weight.a: 2` is `loss_weight: {a: 2}`."""
        if not isinstance(data, Mapping) or not any(str(key).startswith(LOSS_WEIGHT) for key in data):
            return data
        rest = {key: value for key, value in data.items() if not str(key).startswith(LOSS_WEIGHT)}
        dotted = {key.removeprefix(LOSS_WEIGHT): value for key, value in data.items() if key not in rest}
        given = rest.get("loss_weight", {})
        if not isinstance(given, Mapping):
            return rest
        if twice := sorted(given.keys() & dotted.keys()):
            raise ValueError(f"`{LOSS_WEIGHT}{twice[0]}` is given twice. Keep one.")
        return {**rest, "loss_weight": {**given, **dotted}}

    @model_validator(mode="after")
    def _check_budget(self) -> TrialSettings:
        given = [budget for budget in BUDGETS if getattr(self, budget) is not None]
        if len(given) > 1:
            raise ValueError(f"a trial has one budget, but {' and '.join(given)} are given. Keep one.")
        return self


def setting_names() -> tuple[str, ...]:
    """The settings that can be fixed or searched, in the order of the reference."""
    return tuple(
        f"{LOSS_WEIGHT}<task>" if name == "loss_weight" else name for name in TrialSettings.model_fields
    )


def choices(name: str) -> tuple[str, ...]:
    """The names that the setting takes, of those that are a choice of names."""
    return get_args(TrialSettings.model_fields[name].annotation)


def is_setting(name: str) -> bool:
    """Whether `name` is a setting that one value can be given for: `loss_weight.x`, not `loss_weight`."""
    if name.startswith(LOSS_WEIGHT):
        return len(name) > len(LOSS_WEIGHT)
    return name in TrialSettings.model_fields and name != "loss_weight"


def takes_whole_numbers(name: str) -> bool:
    """Whether the setting is an int, so a search over it must be over ints."""
    return name in TrialSettings.model_fields and _holds_int(TrialSettings.model_fields[name].annotation)


def _holds_int(annotation: Any) -> bool:
    return annotation is int or any(map(_holds_int, get_args(annotation)))


def setting_value(name: str, value: Any) -> Any:
    """`value` as the setting holds it: `16-mixed` becomes `fp16`, `1` becomes `1.0` where a float is due.

    Raises pydantic's ValidationError when the setting refuses the value.
    """
    settings = TrialSettings.model_validate({name: value})
    if name.startswith(LOSS_WEIGHT):
        return settings.loss_weight[name.removeprefix(LOSS_WEIGHT)]
    return getattr(settings, name)
