"""The settings of a trial that a study may fix or search: meaning, unit, range and default.

A study fixes a setting under `training:` or searches it under `search_space:`, by the same name. Settings of
one task or one source of data have names such as `loss_weight.<task>` and `sampling_weight.<source>`.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

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
"""Value of `fp32_parts`: measure on each kind of device."""

PrecisionName = Annotated[str, AfterValidator(canonical_precision)]
Encoder = Annotated[str | dict[str, Any], BeforeValidator(_encoder)]
Share = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Share, Share], Field(strict=False)]
Positive = Annotated[float, Field(gt=0)]
BatchSize = Annotated[Count, Field(le=100_000)]
Targets = Annotated[str | tuple[str, ...], BeforeValidator(_targets)]
Parts = Annotated[str | tuple[str, ...], BeforeValidator(_parts)]
HeadType = Annotated[Head, or_own(HEADS.accepts)]


def _is_own_loss(value: Any) -> bool:
    return LOSSES.accepts(value) or any(value in kind.losses for kind in KINDS.values())


OF_TASKS = {"loss_weight.": "loss_weight", "head_type.": "head_types"}
OF_SOURCES = "sampling_weight."
WITH_FREE_PART = {**OF_TASKS, OF_SOURCES: "sampling_weight"}
"""Prefixes of settings of one task or one source of data, and their fields."""

BUDGETS = ("epochs", "max_steps", "max_seconds")
"""Every trial has exactly one of these."""

MODEL_SETTINGS = (
    *("encoder", "max_length", "attention", "dropout", "attention_dropout", "gradient_checkpointing"),
    *("freeze_layers", "layerwise_lr_decay", "adapter", "lora_rank", "lora_targets", "base_precision"),
    *("compile", "compile_scope", "fp32_parts"),
)
"""Settings with impossible combinations."""

DEFAULT_EPOCHS = 3.0

OWN_LOOP_SETTINGS = ("fp_precision", "init_scale", "max_grad_norm", "seed")
"""Settings with a meaning for a study's own training loop. All other names belong to its code."""


class TrialSettings(CheckedSection):
    """The settings of a trial, each fixed here or searched under `search_space` by the same name."""

    fp_precision: PrecisionName | None = None
    """Numeric precision: `fp32` (or `none`, `32-true`), `tf32`, `bf16` (or `bf16-mixed`), `fp16` (or
    `16-mixed`), `bf16-true` (weights and gradients in bf16, so updates below 1/512 of a weight are lost),
    `fp8`. Default: `amp.preset` decides."""
    fp32_parts: Parts = ()
    """Parts of the model in fp32 under `bf16` and `fp16`, and in bf16 under `fp8`: `embeddings`, `layers.3`,
    `layers.8-11`, `attention`, `norms`, `heads`, `heads.<task>`, or the name of a module. `auto` measures the
    parts that this kind of device needs. `fp32` and `tf32` ignore the setting; `bf16-true` has no fp32
    weights and refuses it. It turns TF32 off for all fp32 products."""
    encoder: Encoder | None = None
    """Encoder, in the form of `model.encoder`, its default."""
    max_length: Whole = Field(256, ge=8)
    """Longest input in tokens, including special tokens; see `data.long_text`."""

    pooling: Annotated[Pooling, or_own(POOLINGS.accepts)] = "mean"
    """Reduction of token vectors to one vector, for heads that label a whole text. Decoders need `last` (the
    last token), because their first token (`cls`) does not see the text."""
    head_type: HeadType = "linear"
    """Head of each task: one linear layer, or a hidden layer and a linear layer."""
    head_types: dict[str, HeadType] = Field(default_factory=dict)
    """Head of one task, written `head_type.<task>`. Default: `head_type`."""
    head_hidden_size: Count = 256
    """Width of the hidden layer (`head_type: mlp`)."""
    dropout: Share | None = None
    """Dropout in the encoder. Default: the encoder's own."""
    attention_dropout: Share | None = None
    """Dropout of attention weights. Default: the encoder's own. 0 allows the fused attention kernels on a
    CPU."""
    head_dropout: Share = 0.1
    """Dropout before each head."""
    freeze_layers: Whole = Field(0, ge=0)
    """Number of frozen layers, from the bottom. Above 0, the embeddings are frozen too."""
    adapter: Literal["none", "lora", "dora"] = "none"
    """Trained part of the encoder: all of it (`none`), or small matrices beside its frozen linear layers
    (`lora`, `dora`; extra `adapters`). Heads are always trained."""
    lora_rank: Count = 8
    """Rank of the adapter's matrices."""
    lora_alpha: Count = 16
    """Scale of the adapter: its output is multiplied by `lora_alpha / lora_rank`."""
    lora_dropout: Share = 0.0
    """Dropout before the adapter."""
    lora_targets: Targets = "all-linear"
    """Linear layers with an adapter: all, or a list of name suffixes such as `[query, value]`."""
    base_precision: Literal["fp32", "bf16", "int8", "nf4"] = "fp32"
    """Storage of frozen linear layers under an adapter. Each product decodes the weights into the format of
    `fp_precision`. `int8` has a scale for each row, `nf4` (extra `adapters`) for 64 weights. Embeddings are
    in bf16, or in fp32 with `fp32`. With `fp_precision: bf16-true`, `fp32` means bf16."""
    gradient_checkpointing: Switch = False
    """Recompute activations in the backward pass: less memory, more time."""
    attention: Literal["sdpa", "eager", "flash"] | None = None
    """Attention implementation. `sdpa` is PyTorch's fused one (with attention dropout on a CPU, one of ours,
    because PyTorch has no kernel). `flash` needs flash-attention and a GPU. Default: `sdpa`, or `eager` for
    an encoder without it (DeBERTa, MPNet, Mamba)."""
    compile: Literal["none", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = (
        "none"
    )
    """`torch.compile` mode; `none` runs eagerly. PyTorch's CUDA graphs are never used (see `cuda_graphs`), so
    `reduce-overhead` equals `default`, and `max-autotune` equals `max-autotune-no-cudagraphs`."""
    compile_scope: Literal["model", "layers"] = "model"
    """Compile the whole model, or the encoder layers (one graph for all)."""
    cuda_graphs: Switch | None = None
    """Record the training pass of each batch shape once as a CUDA graph, and replay it (NVIDIA GPUs, one
    process for a trial, without `amp.fallback_to_fp32`). A pass that cannot be recorded runs as usual.
    Default: `true` for a study without `code`, because a replay may repeat its effects wrongly."""

    optimizer: Annotated[Optimizer, or_own(OPTIMIZERS.accepts)] = "adamw"
    """Optimiser. It steps in fp32 in every precision."""
    optimizer_state: Literal["fp32", "bf16", "int8"] = "fp32"
    """Format of the moments of `adamw`, `adam` and `lion` between steps, for tensors of 4096 weights or more.
    AdamW needs 8 bytes for each weight in fp32, 4 in bf16, 2 in int8. The moments of embeddings stay in fp32,
    because most rows have no gradient in a step."""
    learning_rate: float = Field(5e-5, gt=0, le=10)
    """Peak learning rate of the encoder."""
    lora_learning_rate: Annotated[float, Field(gt=0, le=10)] | None = None
    """Peak learning rate of the adapter. Default: `learning_rate`. The optimum is about ten times that of
    training all weights."""
    head_learning_rate: Annotated[float, Field(gt=0, le=10)] | None = None
    """Peak learning rate of the heads. Default: `learning_rate`."""
    layerwise_lr_decay: float = Field(1.0, gt=0, le=1)
    """Factor on the learning rate from each encoder layer to the next lower one. 1: the same for all."""
    weight_decay: float = Field(0.01, ge=0, le=1)
    """Weight decay, except of biases and norms. Decoupled from the gradient in `adamw`, `lion` and
    `adafactor`; an L2 term of the gradient in `adam` and `sgd`."""
    betas: Betas = (0.9, 0.999)
    """Decay of the moments of `adamw`, `adam` and `lion` (lion's paper has 0.9 and 0.99). `sgd` uses the
    first as momentum; `adafactor` ignores both."""
    schedule: Annotated[Schedule, or_own(SCHEDULES.accepts)] = "linear"
    """Course of the learning rate after warm-up, down to 0 at the end of the trial's budget."""
    warmup_ratio: Share = 0.1
    """Share of the trial's budget for the rise of the learning rate from 0."""
    max_grad_norm: Positive | None = 1.0
    """Largest norm of the gradients, after unscaling. `null`: no clipping."""

    batch_size: BatchSize = 16
    """Examples in one optimiser step."""
    micro_batch_size: BatchSize | None = None
    """Examples in one forward and backward pass. Gradients are accumulated to `batch_size`, with the same
    loss. Default: `batch_size`, halved if memory runs out."""
    loss: Annotated[Loss, or_own(_is_own_loss)] = "auto"
    """Loss, for the tasks that it fits. `auto` is cross-entropy for single labels and tokens, binary
    cross-entropy for multiple labels, and mean squared error for regression."""
    focal_gamma: float = Field(2.0, ge=0)
    """Focus on hard examples (`loss: focal`)."""
    label_smoothing: Share = 0.0
    """Share of the target to spread over all classes."""
    class_weighting: Literal["none", "balanced"] = "none"
    """`balanced` weighs classes by the inverse of their frequency in training."""
    loss_weighting: Literal["fixed", "uncertainty"] = "fixed"
    """Weights of the tasks' losses: `loss_weight`, or learned uncertainty (Kendall et al. 2018,
    arXiv 1705.07115)."""
    loss_weight: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Weight of a task's loss, written `loss_weight.<task>`. Default: 1."""
    sampling_temperature: float = Field(1.0, ge=1)
    """With `data.sources`: training draws from a source of n windows in proportion to
    `n^(1/sampling_temperature)` (arXiv 1907.05019). 1 follows the sizes; a higher value favours small
    sources."""
    sampling_weight: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Factor on the draws of a source, written `sampling_weight.<source>`. Default: 1. 0 leaves it out."""
    option: dict[str, Any] = Field(default_factory=dict)
    """Options of your own code, written `<name>.<option>`."""

    init_scale: Annotated[float, Field(ge=1e-37, le=1e38)] | None = None
    """fp16: first scale of the loss. Default: `amp.init_scale`."""

    epochs: Positive | None = None
    """Budget in passes over the training split. A trial has exactly one of `epochs`, `max_steps` and
    `max_seconds`. Default: 3 epochs."""
    max_steps: Count | None = None
    """Budget in optimiser steps."""
    max_seconds: Positive | None = None
    """Budget in seconds of training: equal time for all trials, so a faster precision sees more data."""
    seed: Whole = Field(42, ge=0, lt=2**32)
    """Seed of head initialisation, dropout and the order of the data."""

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, data: Any) -> Any:
        """Gather `loss_weight.a: 2` as `loss_weight: {a: 2}`, and options under `option`."""
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
    """Return the field, and the task or source, of a setting `<prefix>.<name>`; None for other settings."""
    for prefix, field in WITH_FREE_PART.items():
        if name.startswith(prefix):
            return field, name.removeprefix(prefix)
    return None


def _is_option(name: str) -> bool:
    """Return True for an option of the code in use, or perhaps of code that is not in use."""
    if has_own_loop():
        return name not in (*OWN_LOOP_SETTINGS, "option")
    is_dotted = "." in name and free_part_of(name) is None
    return is_dotted and (option_section(name) is not None or OPTIONS.accepts(name))


NOT_OF_OWN_LOOPS = ("fp32_parts", "base_precision", "cuda_graphs")
"""Settings without effect on a study's own training loop."""


def _misspelled(name: str) -> str:
    """Return an error if the name is probably a misspelled `OWN_LOOP_SETTINGS`; empty otherwise."""
    if not has_own_loop() or name in OWN_LOOP_SETTINGS:
        return ""
    if name in NOT_OF_OWN_LOOPS:
        return "must be left out: it has no effect on the training loop (`@hpo.trial`) of the study's code."
    near = get_close_matches(name, OWN_LOOP_SETTINGS, n=1, cutoff=0.85)
    return f"there is no such setting. Did you mean `{near[0]}`?" if near else ""


def _gather_options(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Move the options of the study's own code under `option`, validated by their sections."""
    given = {key: value for key, value in data.items() if _is_option(str(key))}
    given |= data["option"] if isinstance(data.get("option"), Mapping) else {}
    options, problems = {}, []
    for name, value in given.items():
        section, key = option_section(name), name.partition(".")[2]
        try:
            options[name] = getattr(section.model_validate({key: value}), key) if section else value
        except ValidationError as raised:
            problems += [Problem((name, *each.where[1:]), each.message) for each in problems_of(raised)]
        if error := _misspelled(name):
            problems.append(Problem((name,), error))
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
    """Raise ValueError with the nearest name if there is no setting `name` with one value."""
    if error := _misspelled(name):
        raise ValueError(error)
    keys = [key for key in TrialSettings.model_fields if key not in ("option", *WITH_FREE_PART.values())]
    full = {prefix: f"{prefix}<{'source' if prefix == OF_SOURCES else 'task'}>" for prefix in WITH_FREE_PART}
    known = [*keys, *known_options(), *full.values()]
    found = free_part_of(name)
    if name not in known and not (found and found[1]) and not _is_option(name):
        whole = full.get(f"{name}.")
        near = f" Did you mean `{whole}`?" if whole else did_you_mean(name, known)
        raise ValueError(f"there is no such setting.{near}")


def takes_whole_numbers(name: str) -> bool:
    """Return True if the setting is an int, so that its range must be one of ints."""
    if _is_option(name) and option_section(name) is None:
        return False
    section = option_section(name)
    hint = get_type_hints(section or TrialSettings).get(name.partition(".")[2] if section else name)
    return int in (hint, *get_args(hint))


def setting_value(name: str, value: Any) -> Any:
    """Return the validated value of a setting: `16-mixed` becomes `fp16`, and `1` a float if one is needed.

    Raises ValueError for an unknown setting or a wrong value.
    """
    check_name(name)
    try:
        settings = TrialSettings.model_validate({name: value})
    except ValidationError as error:
        raise ValueError(" ".join(problem.message for problem in problems_of(error))) from None
    return setting_of(settings, name)
