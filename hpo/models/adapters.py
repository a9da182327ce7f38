"""Adapters by `peft`: small matrices trained in place of an encoder's weights, and their files.

    lora   W x + (alpha / rank) B A x, with W frozen (Hu et al. 2021, arXiv 2106.09685)
    dora   the same, with the length of each row of W + (alpha / rank) B A trained apart from its direction
           (Liu et al. 2024, arXiv 2402.09353)

B begins at 0, so a trial begins with the unchanged encoder. Checkpoints hold the trained weights alone: the
frozen ones come from the encoder again, and `base_digest` shows if they are the same.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hpo.errors import InputError, ModelError, did_you_mean, shorten
from hpo.precision.frozen import STORAGE_DTYPES, plain_linears, storage_facts
from hpo.precision.table import Precision
from hpo.versions import install_hint

ALL_LINEAR = "all-linear"
ADAPTER_FILES = ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""Prefix of names in peft's files."""
DIGEST_VALUES = 1024
"""Number of values of each tensor in its hash, evenly spread."""


@dataclass(frozen=True)
class AdapterSettings:
    """Settings of an adapter, by their names in the study file."""

    adapter: str = "none"
    lora_rank: int = 8
    lora_alpha: int = 16
    lora_dropout: float = 0.0
    lora_targets: str | tuple[str, ...] = ALL_LINEAR


def add_adapter(encoder: nn.Module, settings: AdapterSettings) -> nn.Module:
    """Freeze the encoder, and add an adapter in place. Its weights come from torch's global generator.

    Raises ModelError if a target is no linear layer, InputError if peft is missing.
    """
    _import_peft()
    from peft import LoraConfig, inject_adapter_in_model

    targets = _targets(encoder, settings.lora_targets)
    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=targets,
        fan_in_fan_out=all(isinstance(encoder.get_submodule(name), Conv1D) for name in targets),
        use_dora=settings.adapter == "dora",
    )
    adapted: Any = inject_adapter_in_model(config, encoder)
    adapted.base_digest = weights_digest(adapted)
    return cast(nn.Module, adapted)


def _import_peft() -> None:
    if find_spec("peft") is None:
        raise InputError(f"an adapter needs the package peft. {install_hint('adapters')}")


def _targets(encoder: nn.Module, targets: str | tuple[str, ...]) -> list[str]:
    """Return the full names of the linear layers to adapt. A target matches each layer with this ending.

    Layers of a pooler are left out: no head reads them.
    """
    linears = [
        name
        for name, module in encoder.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and not name.startswith("pooler.")
    ]
    if not linears:
        name = type(encoder).__name__
        raise ModelError(f"adapter: must have linear layers to adapt, but this {name} has none. Use none.")
    layers: set[str] = set()
    for target in (targets,) if isinstance(targets, str) else targets:
        matching = {name for name in linears if target == ALL_LINEAR or f".{name}".endswith(f".{target}")}
        if not matching:
            known = sorted({name.rpartition(".")[2] for name in linears})
            raise ModelError(
                f"lora_targets: `{target}` must end the name of a linear layer of this "
                f"{type(encoder).__name__}: {', '.join(known)}.{did_you_mean(target, known)}"
            )
        layers |= matching
    return sorted(layers)


def has_adapter(model: Any) -> bool:
    """Return True if the encoder of `model` has an adapter."""
    return hasattr(model.encoder, "peft_config")


def base_digest(model: Any) -> str:
    """Return the hash of the frozen weights in fp32, or "" without an adapter.

    A folder or the hub may change the weights under a name, and another PyTorch may draw others from a seed.
    """
    return str(getattr(model.encoder, "base_digest", ""))


def weights_digest(encoder: nn.Module) -> str:
    """Hash an encoder's weights, without those of an adapter."""
    digest = hashlib.blake2b(digest_size=8)
    for name, weight in encoder.named_parameters():
        if ".lora_" not in name:
            values = weight.detach().flatten()
            every = values[:: max(1, len(values) // DIGEST_VALUES)]
            digest.update(every.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def base_facts(model: Any, precision: Precision) -> dict[str, Any]:
    """Return the record of the frozen weights in a prepared model.

    `agrees` is true if all have the requested number of bits.
    """
    is_cast = precision.frozen == "fp32" and precision.weights == "bfloat16"
    effective = "bf16" if is_cast else precision.frozen
    observed = storage_facts(model.encoder)
    agrees = [*observed["storage_dtypes"]] == [STORAGE_DTYPES[effective]]
    reason = "" if agrees else "matrices outside of linear layers, such as those of experts, stay."
    return {
        "requested": precision.frozen,
        "effective": effective,
        "reason": f"{precision.name} has all weights in bf16." if is_cast else reason,
        "observed": observed,
        "agrees": agrees,
    }


def trained_state(model: Any) -> dict[str, Tensor]:
    """Return the weights for a checkpoint: all, or without the frozen ones under an adapter."""
    frozen = _frozen(model)
    return {name: value for name, value in model.state_dict().items() if name not in frozen}


def load_trained(model: Any, state: Mapping[str, Tensor]) -> None:
    """Load the weights of `trained_state`. Raises RuntimeError if another model wrote them."""
    missing, unexpected = model.load_state_dict(state, strict=False)
    if wrong := [*unexpected, *(name for name in missing if name not in _frozen(model))]:
        raise RuntimeError(f"the weights are of another model: {', '.join(wrong[:3])}")


def _frozen(model: Any) -> set[str]:
    if not has_adapter(model):
        return set()
    parameters = model.named_parameters(remove_duplicate=False)
    return {name for name, weight in parameters if not weight.requires_grad}


def merge_adapter(model: Any) -> None:
    """Decode the frozen weights to fp32 and add the adapter. The encoder becomes a plain one again."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    encoder = model.encoder
    plain_linears(encoder)
    for name, layer in list(encoder.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            if not name.endswith(".base_layer"):  # two matrices of experts have nested layers
                encoder.set_submodule(name, layer.get_base_layer())
    del encoder.peft_config


def save_adapter(encoder: Any, folder: Path, base: str | None) -> None:
    """Write the adapter for `peft.PeftModel.from_pretrained`. `base` is the encoder's hub id."""
    from peft import get_peft_model_state_dict

    (config,) = encoder.peft_config.values()
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.save_pretrained(str(folder))
    weights = {
        f"{_PREFIX}{name}": value.contiguous()
        for name, value in get_peft_model_state_dict(encoder, save_embedding_layers=False).items()
    }
    save_file(weights, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def load_adapter(encoder: nn.Module, folder: Path) -> nn.Module:
    """Add the adapter of `folder` to the encoder, in place. Raises ModelError if it does not fit."""
    _import_peft()
    from peft import PeftConfig, inject_adapter_in_model, set_peft_model_state_dict

    try:
        config = PeftConfig.from_pretrained(str(folder))
        config.inference_mode = False  # otherwise its weights would be frozen
        adapted: nn.Module = inject_adapter_in_model(config, encoder)
        stored = load_file(folder / ADAPTER_WEIGHTS)
        weights = {name.removeprefix(_PREFIX): value for name, value in stored.items()}
        keys: Any = set_peft_model_state_dict(adapted, weights)
        lost = [name for name in keys.missing_keys if ".lora_" in name] + keys.unexpected_keys
    except (RuntimeError, ValueError, KeyError, TypeError, OSError, SafetensorError) as error:
        raise ModelError(f"the adapter in {folder} cannot be read: {shorten(str(error), 200)}") from error
    if lost:
        raise ModelError(f"the adapter in {folder} must fit its encoder, but {lost[0]} does not.")
    return adapted
