"""Every setting of a trial that a study may fix or search: its meaning, its unit, its range, its default.

A study fixes a setting under `training:` and searches it under `search_space:`, by the same name. What may
differ from task to task is fixed or searched for each by itself, written `loss_weight.<task>`; so is
`sampling_weight.<source>` for each source of the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from hpo.config.removed import removed_key
from hpo.config.study_file import CheckedSection, Problem, problems_of, refuse, show
from hpo.errors import did_you_mean
from hpo.extensions import (
    HEADS,
    LOSSES,
    OPTIMIZERS,
    OPTIONS,
    POOLINGS,
    SCHEDULES,
    Head,
    Loss,
    Optimizer,
    Pooling,
    Schedule,
    has_own_loop,
    known_options,
    option_section,
    options_of,
    or_own,
)
from hpo.precision.table import canonical_precision
from hpo.section import Count, Switch, Whole
from hpo.tasks.kind import KINDS


def _encoder(value: Any) -> Any:
    if (isinstance(value, str) and value.strip()) or (isinstance(value, dict) and value):
        return value
    what = "a name, a hub id, a folder, or a mapping with the config of a fresh encoder"
    raise ValueError(f"must be {what}, but got {show(value)}.")


def _targets(value: Any) -> Any:
    if value == "all-linear":
        return value
    if isinstance(value, (list, tuple)) and value and all(isinstance(one, str) and one for one in value):
        return tuple(value)
    raise ValueError(f"must be `all-linear` or a list of names of layers, but got {show(value)}.")


def _parts(value: Any) -> Any:
    if value == AUTO:
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(one, str) and one.strip() for one in value):
        return tuple(dict.fromkeys(value))
    raise ValueError(
        f"must be `auto` or a list of parts, such as [embeddings, heads], but got {show(value)}."
    )


AUTO = "auto"
"""The `fp32_parts` that each kind of device finds by measuring."""

PrecisionName = Annotated[str, AfterValidator(canonical_precision)]
Encoder = Annotated[str | dict[str, Any], BeforeValidator(_encoder)]
Share = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Share, Share], Field(strict=False)]
Positive = Annotated[float, Field(gt=0)]
BatchSize = Annotated[Count, Field(le=100_000)]
Targets = Annotated[str | tuple[str, ...], BeforeValidator(_targets)]
Parts = Annotated[str | tuple[str, ...], BeforeValidator(_parts)]


HeadType = Annotated[Head, or_own(HEADS.takes)]


def _is_own_loss(value: Any) -> bool:
    return LOSSES.takes(value) or any(value in kind.losses for kind in KINDS.values())


OF_TASKS = {"loss_weight.": "loss_weight", "head_type.": "head_types"}
"""What the settings begin with whose name has a free part, the task, and the fields that hold them."""

OF_SOURCES = {"sampling_weight.": "sampling_weight"}
"""The same for settings whose free part is a source of the data."""

WITH_FREE_PART = OF_TASKS | OF_SOURCES

BUDGETS = ("epochs", "max_steps", "max_seconds")
"""A trial ends by exactly one of these."""

MODEL_SETTINGS = (
    "encoder",
    "attention",
    "freeze_layers",
    "adapter",
    "lora_rank",
    "lora_targets",
    "base_precision",
    "max_length",
    "dropout",
    "attention_dropout",
    "gradient_checkpointing",
    "layerwise_lr_decay",
    "compile",
    "compile_scope",
    "fp32_parts",
)
"""Settings of which some combinations cannot be built."""

DEFAULT_EPOCHS = 3.0

OWN_LOOP_SETTINGS = ("fp_precision", "init_scale", "max_grad_norm", "seed")
"""The settings that keep their meaning where the study's own code trains. All other names are its own."""


class TrialSettings(CheckedSection):
    """The settings of a trial. Each is fixed here or searched under `search_space`, by the same name."""

    fp_precision: PrecisionName | None = None
    """Numeric precision: `fp32` (or `none`, `32-true`), `tf32`, `bf16` (or `bf16-mixed`), `fp16` (or
    `16-mixed`), `bf16-true` (bf16 weights, which lose updates of less than 1/512 of a weight, and whose
    gradients are also accumulated and clipped in bf16), `fp8`. Left out, `amp.preset` decides."""
    fp32_parts: Parts = ()
    """Parts of the model that compute in fp32 under `bf16` and `fp16`, and in bf16 under `fp8`: `embeddings`,
    `layers.3`, `layers.8-11`, `attention`, `norms`, `heads`, `heads.<task>`, or a module by its name. `auto`
    measures which parts this kind of device needs. `fp32` and `tf32` ignore it; `bf16-true` has no fp32
    weights and refuses it. With it, other fp32 products do not use TF32, whatever `amp.tf32` says."""
    encoder: Encoder | None = None
    """Encoder, as in `model.encoder`, which it takes when left out."""
    max_length: Whole = Field(256, ge=8)
    """Longest input in tokens, special tokens included; see `data.long_text`."""

    pooling: Annotated[Pooling, or_own(POOLINGS.takes)] = "mean"
    """How token vectors become one vector for the heads that label a whole text. `last`, that of the last
    token, is for decoders, whose first one (`cls`) sees nothing of the text."""
    head_type: HeadType = "linear"
    """Head of each task: one linear layer, or one hidden layer before it."""
    head_types: dict[str, HeadType] = Field(default_factory=dict)
    """Head of one task in place of `head_type`, written `head_type.<task>`."""
    head_hidden_size: Count = 256
    """Width of that hidden layer (`head_type: mlp`)."""
    dropout: Share | None = None
    """Dropout in the encoder; left out, what the encoder's config says."""
    attention_dropout: Share | None = None
    """Dropout of attention weights; left out, what the encoder's config says. 0 allows the fused attention
    kernels on a CPU."""
    head_dropout: Share = 0.1
    """Dropout before each head."""
    freeze_layers: Whole = Field(0, ge=0)
    """Layers that are not trained, from the bottom; above 0 the embeddings neither."""
    adapter: Literal["none", "lora", "dora"] = "none"
    """What is trained of the encoder: all of it (`none`), or small matrices beside its frozen linear layers
    (`lora`, `dora`; needs the extra `adapters`). Heads are trained in full."""
    lora_rank: Count = 8
    """Rank of the adapter's matrices."""
    lora_alpha: Count = 16
    """The adapter's part is multiplied by `lora_alpha / lora_rank`."""
    lora_dropout: Share = 0.0
    """Dropout before the adapter."""
    lora_targets: Targets = "all-linear"
    """The linear layers that have an adapter: all of the encoder, or a list of ends of their names, such as
    `[query, value]`."""
    base_precision: Literal["fp32", "bf16", "int8", "nf4"] = "fp32"
    """How the weights of frozen linear layers are stored under an adapter; each product decodes them into
    what `fp_precision` multiplies in. `int8` has a scale for each row, `nf4` (needs the extra `adapters`) one
    for 64 weights. Embeddings are in bf16 under all but `fp32`, which under `fp_precision: bf16-true` is
    bf16."""
    gradient_checkpointing: Switch = False
    """Compute activations again in the backward pass: less memory, more time."""
    attention: Literal["sdpa", "eager", "flash"] = "sdpa"
    """Attention implementation: `sdpa` is PyTorch's fused one and, with attention dropout on a CPU, where
    that has no kernel, one of ours; `flash` needs flash-attention and a GPU."""
    compile: Literal["none", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = (
        "none"
    )
    """`torch.compile` mode. `none` runs eagerly. PyTorch's CUDA graphs are never used (see `cuda_graphs`),
    so `reduce-overhead` is the same as `default`, and `max-autotune` as `max-autotune-no-cudagraphs`."""
    compile_scope: Literal["model", "layers"] = "model"
    """Compile the whole model, or each encoder layer (one graph for all of them)."""
    cuda_graphs: Switch | None = None
    """Record the training pass of each batch shape once as a CUDA graph, and replay it (NVIDIA GPUs, one
    process for a trial, without `amp.fallback_to_fp32`). Left out, `true` if the study has no `code`, because
    code may do what a replay repeats wrongly. A pass that cannot be recorded runs as usual."""

    optimizer: Annotated[Optimizer, or_own(OPTIMIZERS.takes)] = "adamw"
    """Optimiser. It steps in fp32 in every precision."""
    optimizer_state: Literal["fp32", "bf16", "int8"] = "fp32"
    """Format of the moments of `adamw`, `adam` and `lion` between steps, for tensors of 4096 weights or more.
    AdamW needs 8 bytes for each weight in fp32, 4 in bf16, 2 in int8. Embeddings keep fp32, because most of
    their rows have no gradient in a step."""
    learning_rate: float = Field(5e-5, gt=0, le=10)
    """Peak learning rate of the encoder."""
    lora_learning_rate: Annotated[float, Field(gt=0, le=10)] | None = None
    """Peak learning rate of the adapter; left out, `learning_rate`. Best ones are about ten times those of
    all weights."""
    head_learning_rate: Annotated[float, Field(gt=0, le=10)] | None = None
    """Peak learning rate of the heads; left out, `learning_rate`."""
    layerwise_lr_decay: float = Field(1.0, gt=0, le=1)
    """Factor on the learning rate from each encoder layer to the one below. 1: the same rate everywhere."""
    weight_decay: float = Field(0.01, ge=0, le=1)
    """Weight decay; biases and norms are left out. Decoupled from the gradient in `adamw`, `lion` and
    `adafactor`, an L2 term in the gradient in `adam` and `sgd`."""
    betas: Betas = (0.9, 0.999)
    """Decay of the moments of `adamw`, `adam` and `lion`, with the same default (lion's paper has 0.9 and
    0.99). `sgd` takes the first as momentum; `adafactor` takes neither."""
    schedule: Annotated[Schedule, or_own(SCHEDULES.takes)] = "linear"
    """Learning rate after warm-up, down to 0 at the end of the trial's budget."""
    warmup_ratio: Share = 0.1
    """Share of the trial's budget in which the learning rate rises from 0."""
    max_grad_norm: Positive | None = 1.0
    """Norm to which gradients are clipped, after unscaling. `null`: no clipping."""

    batch_size: BatchSize = 16
    """Examples in one optimiser step."""
    micro_batch_size: BatchSize | None = None
    """Examples in one forward and backward pass; gradients are accumulated to `batch_size`, with the same
    loss. Left out, `batch_size`, halved when memory runs out."""
    loss: Annotated[Loss, or_own(_is_own_loss)] = "auto"
    """Loss of the tasks that it fits; `auto` is cross-entropy for single labels and tokens, binary
    cross-entropy for multiple labels, mean squared error for regression."""
    focal_gamma: float = Field(2.0, ge=0)
    """Focus of `loss: focal` on hard examples."""
    label_smoothing: Share = 0.0
    """Share of the target spread over all classes."""
    class_weighting: Literal["none", "balanced"] = "none"
    """`balanced` weighs classes by the inverse of their frequency in training."""
    loss_weighting: Literal["fixed", "uncertainty"] = "fixed"
    """How the losses of tasks are added: by `loss_weight`, or by learned uncertainty (Kendall et al. 2018,
    arXiv 1705.07115)."""
    loss_weight: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Weight of a task's loss, written `loss_weight.<task>`; 1 each."""
    sampling_temperature: float = Field(1.0, ge=1)
    """With `data.sources`: training draws from a source of n windows in proportion to
    `n^(1/sampling_temperature)` (arXiv 1907.05019). At 1 that is its size; a higher value favours small
    sources."""
    sampling_weight: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Factor on that, written `sampling_weight.<source>`; 1 each. Training leaves out a source with 0."""
    option: dict[str, Any] = Field(default_factory=dict)
    """Options of what your own code brings, written `<name>.<option>`."""

    init_scale: Annotated[float, Field(gt=0, le=1e38)] | None = None
    """fp16: first factor of the loss; left out, `amp.init_scale`."""

    epochs: Positive | None = None
    """Budget: passes over the training split. Exactly one of `epochs`, `max_steps` and `max_seconds`; with
    none given, 3 epochs."""
    max_steps: Count | None = None
    """Budget: optimiser steps."""
    max_seconds: Positive | None = None
    """Budget: seconds of training. Equal time for all trials, so a faster precision sees more data."""
    seed: Whole = Field(42, ge=0, lt=2**32)
    """Seed of head initialisation, dropout and the order of the data."""

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, data: Any) -> Any:
        """`loss_weight.a: 2` is `loss_weight: {a: 2}`; so are options gathered under `option`."""
        if not isinstance(data, Mapping):
            return data
        data = _gather_options(data)
        for prefix, field in WITH_FREE_PART.items():
            gathered = {key: value for key, value in data.items() if not str(key).startswith(prefix)}
            dotted = {key.removeprefix(prefix): data[key] for key in data if key not in gathered}
            given = gathered.get(field, {})
            if dotted and isinstance(given, Mapping):
                if twice := sorted(given.keys() & dotted.keys()):
                    raise ValueError(f"`{prefix}{twice[0]}` is given twice. Keep one.")
                gathered[field] = {**given, **dotted}
            data = gathered
        return data

    def problems(self) -> Iterator[Problem]:
        given = [budget for budget in BUDGETS if getattr(self, budget) is not None]
        if len(given) > 1:
            yield Problem((), f"a trial has one budget, but {' and '.join(given)} are given. Keep one.")


def free_part_of(name: str) -> tuple[str, str] | None:
    """The field and the task or source of a setting `<prefix>.<name>`; None: it is another."""
    return next(
        (
            (field, name.removeprefix(prefix))
            for prefix, field in WITH_FREE_PART.items()
            if name.startswith(prefix)
        ),
        None,
    )


def _is_option(name: str) -> bool:
    """Return whether the code in use has such an option, or code that is not in use may have it."""
    if has_own_loop():
        return name not in (*OWN_LOOP_SETTINGS, "option")
    is_dotted = "." in name and free_part_of(name) is None
    return is_dotted and (option_section(name) is not None or OPTIONS.takes(name))


NOT_OF_OWN_LOOPS = ("fp32_parts", "base_precision", "cuda_graphs")
"""Settings that would seem to change a training loop of the study's own."""


def _misspelled(name: str) -> str:
    """Return an error if the name looks like a misspelled `OWN_LOOP_SETTINGS`; empty otherwise."""
    if not has_own_loop() or name in OWN_LOOP_SETTINGS:
        return ""
    if name in NOT_OF_OWN_LOOPS:
        return (
            "must be left out: the study's code has a training loop (`@hpo.trial`), which this cannot change."
        )
    near = get_close_matches(name, OWN_LOOP_SETTINGS, n=1, cutoff=0.85)
    return f"there is no such setting. Did you mean `{near[0]}`?" if near else ""


def _gather_options(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings with those of code of one's own under `option`, each as its section holds it."""
    given = {key: value for key, value in data.items() if _is_option(str(key))}
    given |= data["option"] if isinstance(data.get("option"), Mapping) else {}
    options, problems = {}, []
    for name, value in given.items():
        section, key = option_section(name), name.partition(".")[2]
        try:
            options[name] = getattr(section.model_validate({key: value}), key) if section else value
        except ValidationError as error:
            problems += [Problem((name, *each.where[1:]), each.message) for each in problems_of(error)]
        if told := _misspelled(name):
            problems.append(Problem((name,), told))
        if not _is_option(name):
            hint = did_you_mean(name, known_options())
            problems.append(Problem((name,), f"there is no such option.{hint}"))
    refuse(*problems)
    others = {key: value for key, value in data.items() if key not in given}
    return others | {"option": options} if options else others


def setting_of(settings: TrialSettings, name: str) -> Any:
    if found := free_part_of(name):
        field, free_part = found
        return getattr(settings, field).get(free_part, settings.head_type if field == "head_types" else 1.0)
    if option_section(name):
        owner, _, key = name.partition(".")
        return getattr(options_of(owner, settings.option), key)
    return settings.option[name] if name in settings.option else getattr(settings, name)


def check_name(name: str) -> None:
    """Raise ValueError with the nearest name where there is no setting `name` that takes one value."""
    if told := _misspelled(name):
        raise ValueError(told)
    keys = [key for key in TrialSettings.model_fields if key not in ("option", *WITH_FREE_PART.values())]
    full = {prefix: f"{prefix}<{'task' if prefix in OF_TASKS else 'source'}>" for prefix in WITH_FREE_PART}
    known = [*keys, *known_options(), *full.values()]
    found = free_part_of(name)
    if name not in known and not (found and found[1]) and not _is_option(name):
        if removed := removed_key(("training", name)):
            raise ValueError(removed)
        whole = full.get(f"{name}.")
        near = f" Did you mean `{whole}`?" if whole else did_you_mean(name, known)
        raise ValueError(f"there is no such setting.{near}")


def takes_whole_numbers(name: str) -> bool:
    """Return whether the setting is an int, so that a search over it must be over ints."""
    if _is_option(name) and option_section(name) is None:
        return False
    section = option_section(name)
    hint = get_type_hints(section or TrialSettings).get(name.partition(".")[2] if section else name)
    return int in (hint, *get_args(hint))


def setting_value(name: str, value: Any) -> Any:
    """`value` as the setting holds it: `16-mixed` becomes `fp16`, `1` becomes `1.0` where a float is due.

    Raises ValueError when there is no such setting, or it refuses the value.
    """
    check_name(name)
    try:
        settings = TrialSettings.model_validate({name: value})
    except ValidationError as error:
        raise ValueError(" ".join(problem.message for problem in problems_of(error))) from None
    return setting_of(settings, name)
