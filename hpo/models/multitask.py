"""The multitask model: one encoder, one head a task, and functions that act on the plain module.

    input_ids_BL -> encoder -> hidden_BLD -+-> pooling -> pooled_BD -> head -> logits_BK    sequence tasks
                                           +----------------------->  head -> logits_BLK   token tasks

The module knows nothing of precision, devices or compilation. Freezing, compiling, exporting are functions
applied to it. Only one choice in here is about numerics: pooling sums over tokens in fp32 and hands back
the dtype that it got. A bf16 sum keeps 8 bits: once it has reached 256 an addition of 0.5 is lost.

Shape suffixes: B windows, L tokens in a window, D hidden size, K outputs of one task, T tasks.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hpo.data.tasks import Task, initial_bias
from hpo.errors import ModelError, did_you_mean
from hpo.models.dropout import use_bit_dropout
from hpo.models.encoder import (
    encoder_layers,
    load_encoder,
    load_tokenizer,
    max_positions,
    resolve_encoder,
    takes_type_ids,
)

__all__ = [
    "COMPILE_MODES",
    "POOLINGS",
    "MultitaskModel",
    "apply_compile",
    "build_model",
    "compiled_modules",
    "encoder_layers",
    "export_model",
    "load_exported",
    "load_tokenizer",
    "parameter_depths",
    "resolve_encoder",
    "training_flops",
]

COMPILE_MODES = ("none", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
HEAD_SETTINGS = ("pooling", "head_type", "head_hidden_size", "head_dropout", "loss_weighting")
EXPORT_FORMAT = 1


class MultitaskModel(nn.Module):
    """An encoder and one head a task.

    `encoder` takes input_ids and attention_mask and returns a `last_hidden_state` [B, L, D]; its
    `config.hidden_size` is D. `loss_weighting="uncertainty"` adds one learnt log variance a task.
    """

    def __init__(
        self,
        encoder: nn.Module,
        tasks: Sequence[Task],
        *,
        pooling: str = "mean",
        head_type: str = "linear",
        head_hidden_size: int = 256,
        head_dropout: float = 0.1,
        loss_weighting: str = "fixed",
    ) -> None:
        super().__init__()
        _check_choice("pooling", pooling, POOLINGS)
        _check_choice("head_type", head_type, ("linear", "mlp"))
        _check_choice("loss_weighting", loss_weighting, ("fixed", "uncertainty"))
        if not tasks:
            raise ModelError("a model must have at least one task, but got none.")
        self.tasks = tuple(tasks)
        self.head_settings = {
            "pooling": pooling,
            "head_type": head_type,
            "head_hidden_size": head_hidden_size,
            "head_dropout": head_dropout,
            "loss_weighting": loss_weighting,
        }
        self.encoder = encoder
        self.passes_type_ids = takes_type_ids(encoder)
        config: Any = encoder.config
        hidden_size: int = config.hidden_size
        self.pool = _PLAIN_POOLINGS.get(pooling) or AttentionPooling(hidden_size)
        # Lists in the order of the tasks: a dictionary of modules refuses names such as `type` or `a.b`.
        self.heads = nn.ModuleList(
            _head(head_type, hidden_size, task.num_outputs, head_hidden_size, head_dropout) for task in tasks
        )
        init_std = getattr(config, "initializer_range", 0.02)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and not name.startswith("encoder."):
                nn.init.normal_(module.weight, std=init_std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        heads: Any = self.heads
        with torch.no_grad():
            for task, head in zip(self.tasks, heads, strict=True):
                head[-1].bias.copy_(initial_bias(task))
        self.log_variances = nn.ParameterList(
            nn.Parameter(torch.zeros(())) for _ in tasks if loss_weighting == "uncertainty"
        )

    @property
    def log_variance(self) -> dict[str, nn.Parameter] | None:
        """The learnt log variance s of each task, or None where losses have fixed weights.

        A task's loss L enters as exp(-s) L plus a term that grows with s: Kendall, Gal and Cipolla 2018,
        arXiv 1705.07115.
        """
        if not len(self.log_variances):
            return None
        return dict(zip((task.name for task in self.tasks), self.log_variances, strict=True))

    def forward(
        self, input_ids_BL: Tensor, attention_mask_BL: Tensor, type_ids_BL: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return each task's logits: [B, K] of sequence tasks, [B, L, K] of token tasks.

        `attention_mask_BL` is 1 at real tokens and 0 at padding. `type_ids_BL` is left out for encoders
        that know no segments.
        """
        inputs = {"input_ids": input_ids_BL, "attention_mask": attention_mask_BL}
        if type_ids_BL is not None and self.passes_type_ids:
            inputs["token_type_ids"] = type_ids_BL
        hidden_BLD = self.encoder(**inputs).last_hidden_state
        pooled_BD = None
        logits = {}
        for task, head in zip(self.tasks, self.heads, strict=True):
            if task.level == "token":
                logits[task.name] = head(hidden_BLD)
            else:
                if pooled_BD is None:
                    pooled_BD = self.pool(hidden_BLD, attention_mask_BL)
                logits[task.name] = head(pooled_BD)
        return logits


def pool_cls(hidden_BLD: Tensor, _mask_BL: Tensor) -> Tensor:
    """The first token's hidden state, [B, D]."""
    return hidden_BLD[:, 0]


def pool_mean(hidden_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """The mean over real tokens, [CLS] and [SEP] included as sentence-transformers does, [B, D]."""
    mask_BL1 = mask_BL.unsqueeze(-1).to(_reduction_dtype(hidden_BLD))
    sum_BD = (hidden_BLD.to(mask_BL1.dtype) * mask_BL1).sum(dim=1)
    return (sum_BD / mask_BL1.sum(dim=1).clamp(min=1)).to(hidden_BLD.dtype)


def pool_max(hidden_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """The largest value of each dimension over real tokens, [B, D]."""
    lowest = torch.finfo(hidden_BLD.dtype).min
    return hidden_BLD.masked_fill(mask_BL.unsqueeze(-1) == 0, lowest).amax(dim=1)


class AttentionPooling(nn.Module):
    """A mean weighted by a learnt score of each real token: softmax(w . h) (Yang et al. 2016, NAACL)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.score = nn.Linear(hidden_size, 1, bias=False)  # a bias would drop out of the softmax

    def forward(self, hidden_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        dtype = _reduction_dtype(hidden_BLD)
        score_BL = self.score(hidden_BLD).squeeze(-1).to(dtype)
        weight_BL = score_BL.masked_fill(mask_BL == 0, torch.finfo(dtype).min).softmax(dim=-1)
        # Not a matrix product: autocast would run that in the low precision.
        pooled_BD: Tensor = (hidden_BLD.to(dtype) * weight_BL.unsqueeze(-1)).sum(dim=1)
        return pooled_BD.to(hidden_BLD.dtype)


_PLAIN_POOLINGS = {"cls": pool_cls, "mean": pool_mean, "max": pool_max}
POOLINGS = (*_PLAIN_POOLINGS, "attention")


def build_model(
    encoder: str | Mapping[str, Any],
    tasks: Sequence[Task],
    *,
    max_length: int,
    pooling: str = "mean",
    head_type: str = "linear",
    head_hidden_size: int = 256,
    dropout: float | None = None,
    attention_dropout: float | None = None,
    head_dropout: float = 0.1,
    freeze_layers: int = 0,
    gradient_checkpointing: bool = False,
    attention: str = "sdpa",
    loss_weighting: str = "fixed",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> MultitaskModel:
    """Return the model of one trial, in fp32 on the CPU, in training mode.

    New weights (heads, a fresh encoder) come from torch's global generator: call `torch.manual_seed`
    before. `max_length` is the longest window in tokens. `freeze_layers=n` keeps the embeddings and the
    lowest n layers as they are; 0 trains everything.

    Raises ModelError where the encoder cannot be loaded or cannot do what a setting asks.
    """
    module: Any = load_encoder(
        encoder,
        attention=attention,
        dropout=dropout,
        attention_dropout=attention_dropout,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    name = type(module).__name__
    positions = max_positions(module)
    if positions is not None and max_length > positions:
        raise ModelError(
            f"max_length must be at most the {positions} positions of this {name}, but it is {max_length}. "
            f"Shorten it and set `data.long_text: window` to lose no text, or use a longer encoder."
        )
    if gradient_checkpointing:
        if not getattr(module, "supports_gradient_checkpointing", False):
            raise ModelError(
                f"gradient_checkpointing: {name} does not support it. Set it to false; a smaller "
                f"micro_batch_size saves memory too."
            )
        # transformers renamed it between 5.17 and 5.23, and the old name warns.
        enable = getattr(module, "activation_checkpointing_enable", None)
        (enable or module.gradient_checkpointing_enable)({"use_reentrant": False})
    model = MultitaskModel(
        module,
        tasks,
        pooling=pooling,
        head_type=head_type,
        head_hidden_size=head_hidden_size,
        head_dropout=head_dropout,
        loss_weighting=loss_weighting,
    )
    freeze(model, freeze_layers)
    use_bit_dropout(model)
    return model.train()


def parameter_depths(model: MultitaskModel) -> dict[str, int]:
    """Return how high each parameter sits: 0 embeddings, 1 the lowest layer, N + 1 above the N layers.

    Embeddings are also tables that a model keeps beside its layers, such as DeBERTa's relative positions.
    N + 1 are the heads, a norm after the last layer, and log variances.
    """
    layers = encoder_layers(model.encoder)
    layer_of = {
        id(parameter): number
        for number, layer in enumerate(layers, start=1)
        for parameter in layer.parameters()
    }

    def depth(name: str, parameter: nn.Parameter) -> int:
        if id(parameter) in layer_of:
            return layer_of[id(parameter)]
        embeds = "embed" in name or "relative_attention_bias" in name
        return 0 if name.startswith("encoder.") and embeds else len(layers) + 1

    return {name: depth(name, parameter) for name, parameter in model.named_parameters()}


def freeze(model: MultitaskModel, freeze_layers: int) -> None:
    """Stop gradients at the embeddings and the lowest `freeze_layers` layers; 0 freezes nothing.

    Dropout in frozen layers stays on. Raises ModelError where there are fewer layers.
    """
    if freeze_layers == 0:
        return
    num_layers = len(encoder_layers(model.encoder))
    if not 0 < freeze_layers <= num_layers:
        raise ModelError(
            f"freeze_layers must be between 0 and the encoder's {num_layers} layers, but it is "
            f"{freeze_layers}."
        )
    depths = parameter_depths(model)
    for name, parameter in model.named_parameters():
        if depths[name] <= freeze_layers:
            parameter.requires_grad_(False)


def apply_compile(
    model: MultitaskModel, mode: str, scope: str = "model", dynamic: bool | None = None
) -> MultitaskModel:
    """Let `torch.compile` take the whole forward (`model`) or each transformer block (`layers`).

    Works in place, so parameter names and checkpoints stay as they are; `compiled_modules` tells what was
    done. Compilation itself happens at the first call of each shape (`dynamic` as torch.compile's).
    Blocks share one kernel, so `layers` compiles in the time of one block. `none` does nothing.
    """
    _check_choice("compile", mode, COMPILE_MODES)
    _check_choice("compile_scope", scope, ("model", "layers"))
    if mode == "none":
        return model
    for module in [model] if scope == "model" else encoder_layers(model.encoder):
        module.compile(mode=mode, dynamic=dynamic)
    return model


def compiled_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules that run compiled; "" is the model itself, [] means none."""
    return [name for name, module in model.named_modules() if module._compiled_call_impl is not None]


def training_flops(model: MultitaskModel, num_tokens: int, num_sequences: int) -> float | None:
    """Floating-point operations of forward and backward over `num_tokens` in `num_sequences` windows.

    The estimate of PaLM's appendix B (Chowdhery et al. 2022, arXiv 2204.02311): 6 N a token for N
    parameters outside the embeddings, 12 D L for a layer's attention over L tokens. A frozen layer only
    goes forward, a third of that. Recomputation by gradient checkpointing is not counted, nor is padding;
    every layer is taken to attend to the whole window, of mean length. None where the layers are not
    known.
    """
    if not num_sequences:
        return 0.0
    try:
        layers = encoder_layers(model.encoder)
    except ModelError:
        return None
    config: Any = model.encoder.config
    mean_length = num_tokens / num_sequences
    flops = 0.0
    for layer in layers:
        passes = 3 if any(parameter.requires_grad for parameter in layer.parameters()) else 1
        per_token = 2 * _num_parameters(layer) + 4 * config.hidden_size * mean_length
        flops += passes * per_token * num_tokens
    for task, head in zip(model.tasks, model.heads, strict=True):
        flops += 6 * _num_parameters(head) * (num_tokens if task.level == "token" else num_sequences)
    return flops


def export_model(
    model: MultitaskModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: str | Path,
    *,
    max_length: int,
    attention: str,
    precision: str,
    decisions: Mapping[str, Any] | None = None,
) -> Path:
    """Write a folder that `transformers.AutoModel` (the encoder) and `load_exported` (all of it) load.

        config.json, model.safetensors, tokenizer.json ...    the encoder and its tokenizer
        heads.safetensors                                     pooling, heads, log variances
        hpo.json                                              tasks, head settings, decisions, max_length

    Weights keep their dtype. `precision` and `attention`, those of the trial, are recorded, not applied.
    The folder appears at once or not at all. Raises ModelError where `directory` holds anything but an
    earlier export.
    """
    directory = Path(directory)
    if directory.exists() and any(directory.iterdir()) and not (directory / "hpo.json").is_file():
        raise ModelError(f"{directory}: an export needs a folder of its own, but this one holds other files.")
    staging = directory.with_name(f".{directory.name}-{os.getpid()}")
    staging.mkdir(parents=True)
    try:
        encoder: Any = model.encoder
        encoder.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        save_file(_head_state(model), staging / "heads.safetensors")
        metadata = {
            "format": EXPORT_FORMAT,
            "tasks": [asdict(task) for task in model.tasks],
            **model.head_settings,
            "attention": attention,
            "max_length": max_length,
            "precision": precision,
            "decisions": {
                name: asdict(decision)
                if is_dataclass(decision) and not isinstance(decision, type)
                else decision
                for name, decision in (decisions or {}).items()
            },
        }
        (staging / "hpo.json").write_text(json.dumps(metadata, indent=2) + "\n")
        # safetensors writes files that only their owner can read, whatever the umask.
        for file in staging.iterdir():
            file.chmod((staging / "hpo.json").stat().st_mode)
        if directory.exists():
            shutil.rmtree(directory)
        staging.rename(directory)
    except BaseException:
        with contextlib.suppress(OSError):
            shutil.rmtree(staging)
        raise
    return directory


def load_exported(
    directory: str | Path, *, attention: str | None = None, trust_remote_code: bool = False
) -> tuple[MultitaskModel, PreTrainedTokenizerBase, dict[str, Any]]:
    """Return model (fp32, evaluation mode), tokenizer and the content of hpo.json.

    `attention` replaces the one that the model was trained with, for a machine that lacks it. Logits are
    those of the exported model, bit for bit, on the same machine in the same precision.

    Raises ModelError where the folder is no intact export.
    """
    directory = Path(directory).resolve()
    try:
        metadata = json.loads((directory / "hpo.json").read_text())
        heads = load_file(directory / "heads.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"{directory} must be a folder written by `hpo best --export`, but reading it failed: {error}."
        ) from error
    if metadata.get("format") != EXPORT_FORMAT:
        raise ModelError(
            f"{directory}/hpo.json must have format {EXPORT_FORMAT}, but it has {metadata.get('format')!r}. "
            f"Use the version of hpo that wrote it."
        )
    tasks = [Task(**{**task, "labels": tuple(task["labels"])}) for task in metadata["tasks"]]
    encoder = load_encoder(
        str(directory), attention=attention or metadata["attention"], trust_remote_code=trust_remote_code
    )
    model = MultitaskModel(encoder, tasks, **{key: metadata[key] for key in HEAD_SETTINGS})
    expected = _head_state(model)
    differing = [
        name
        for name in sorted(expected.keys() | heads)
        if name not in expected or name not in heads or expected[name].shape != heads[name].shape
    ]
    if differing:
        raise ModelError(
            f"{directory}: heads.safetensors must fit hpo.json, but these differ: {differing[:3]}."
        )
    model.load_state_dict(heads, strict=False)
    tokenizer = load_tokenizer(str(directory), trust_remote_code=trust_remote_code)
    return model.eval(), tokenizer, metadata


def _head(
    head_type: str, hidden_size: int, num_outputs: int, head_hidden_size: int, dropout: float
) -> nn.Module:
    if head_type == "linear":
        return nn.Sequential(nn.Dropout(dropout), nn.Linear(hidden_size, num_outputs))
    return nn.Sequential(
        nn.Dropout(dropout),
        nn.Linear(hidden_size, head_hidden_size),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(head_hidden_size, num_outputs),
    )


def _head_state(model: MultitaskModel) -> dict[str, Tensor]:
    """All of the state that is not the encoder's: pooling, heads, log variances."""
    state = model.state_dict()
    return {name: value.contiguous() for name, value in state.items() if not name.startswith("encoder.")}


def _reduction_dtype(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _check_choice(setting: str, value: str, known: Sequence[str] | Mapping[str, Any]) -> None:
    if value not in known:
        raise ModelError(f"{setting}: unknown `{value}`.{did_you_mean(value, list(known))}")
