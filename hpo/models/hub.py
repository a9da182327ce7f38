"""Models on the Hugging Face hub: downloaded once, from then on read from the cache without the hub.

So all trials of a study start from the same weights, a worker needs no network, and a name that is
neither cached nor in reach fails at once and not after minutes of retries.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from hpo.errors import ModelError

TIMEOUT_SECONDS = 10.0
_logger = logging.getLogger("hpo.models")
SINGLE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_SHARDED_WEIGHTS = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
)


def download(name: str, revision: str | None = None) -> Path:
    """Return the folder with the model's config, tokenizer and weights, fetched if it is not cached.

    Raises ModelError where the hub is out of reach or does not give the model.
    """
    cached = try_to_load_from_cache(name, "config.json", revision=revision)
    if isinstance(cached, str) and _is_complete(Path(cached).parent):
        return Path(cached).parent
    try:
        # One question with a short timeout: transformers would retry each of several files for 20 s.
        info = HfApi().model_info(name, revision=revision, timeout=TIMEOUT_SECONDS)
        _logger.info("downloading the encoder %s", name)
        wanted = _wanted_files([file.rfilename for file in info.siblings or ()])
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=wanted, etag_timeout=TIMEOUT_SECONDS)
        )
    except Exception as error:
        raise ModelError(_message(name, revision, error)) from error


def _message(name: str, revision: str | None, error: Exception) -> str:
    where = f"encoder: `{name}` is no folder here and not in the Hugging Face cache, and "
    if isinstance(error, OfflineModeIsEnabled):
        return where + "HF_HUB_OFFLINE forbids asking the hub. Unset it, or name a local folder or `minilm`."
    if isinstance(error, GatedRepoError):
        return where + "the hub gives it only to those who accepted its terms. Accept them and set HF_TOKEN."
    if isinstance(error, RepositoryNotFoundError):
        return where + "the hub has no such public model. Check the name; a private one needs HF_TOKEN."
    if isinstance(error, RevisionNotFoundError):
        return f"encoder: `{name}` has no revision `{revision}` on the hub. Check model.revision."
    return where + (
        f"the hub could not be reached ({one_line(error)}). Check the network, or name a local folder "
        f"or `minilm`."
    )


def _wanted_files(names: list[str]) -> list[str]:
    """Config, tokenizer, code and one set of weights: repositories often hold the weights in five formats."""
    top = [name for name in names if "/" not in name]
    wanted = [name for name in top if name.endswith((".json", ".txt", ".model", ".py"))]
    for prefix, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        weights = [name for name in top if name.startswith(prefix) and name.endswith(suffix)]
        if weights:
            return wanted + weights
    return wanted


def has_weights(folder: Path) -> bool:
    """Whether the folder holds weights, all shards of them."""
    if any((folder / name).is_file() for name in SINGLE_WEIGHTS):
        return True
    for index in (folder / name for name in _SHARDED_WEIGHTS):
        if index.is_file():
            try:
                shards = set(json.loads(index.read_text())["weight_map"].values())
            except (ValueError, KeyError, TypeError, AttributeError):
                return False
            return all((folder / shard).is_file() for shard in shards)
    return False


def _is_complete(folder: Path) -> bool:
    has_tokenizer = any((folder / name).is_file() for name in _TOKENIZER_FILES)
    return (folder / "config.json").is_file() and has_weights(folder) and has_tokenizer


def one_line(error: Exception) -> str:
    """An error's text on one line, cut after 200 characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:200].rsplit(" ", 1)[0] + " ..."
