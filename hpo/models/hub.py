"""Models on the Hugging Face hub: downloaded once, from then on read from the cache without the hub; and
exports, uploaded.

So all trials of a study start from the same weights, a worker needs no network, and a name that is
neither cached nor in reach fails at once and not after minutes of retries.
"""

from __future__ import annotations

import fnmatch
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils._validators import validate_repo_id

from hpo.errors import ModelError, shorten

TIMEOUT_SECONDS = 10.0
_logger = logging.getLogger("hpo.models")
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
_TOKENIZER_FILES = ("tokenizer.json", "vocab.*", "*.model")


def download(name: str, revision: str | None = None) -> Path:
    """Return the folder with the model's config, tokenizer and weights, fetched if it is not cached.

    Raises ModelError where the hub is out of reach or does not give the model.
    """
    try:
        config = try_to_load_from_cache(name, "config.json", revision=revision)
        if isinstance(config, str) and _has_tokenizer_and_weights(Path(config).parent):
            return Path(config).parent
        # One question with a short timeout: transformers would retry each of several files for 20 s.
        info = HfApi().model_info(name, revision=revision, timeout=TIMEOUT_SECONDS)
        _logger.info("downloading the encoder %s", name)
        # One set of weights: repositories often hold them in five formats.
        top = [file.rfilename for file in info.siblings or () if "/" not in file.rfilename]
        weights = next((pattern for pattern in _WEIGHTS if fnmatch.filter(top, pattern)), _WEIGHTS[0])
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=["*.json", "*.txt", "*.model", "*.py", "README.md", "LICENSE*", weights],
                ignore_patterns="*/*",
                etag_timeout=TIMEOUT_SECONDS,
            )
        )
    except Exception as error:
        raise ModelError(_message(name, revision, error)) from error


def check_push(repo: str) -> None:
    """Raise ModelError unless `repo` names a repository, and the hub is in reach and knows the user."""
    with _as_push_error(repo):
        validate_repo_id(repo)
        HfApi().whoami()


def push_folder(folder: Path, repo: str) -> str:
    """Upload an export to the hub as it is, and return where it is; a repository that is made is private.

    Raises ModelError where the hub does not take it.
    """
    with _as_push_error(repo):
        api = HfApi()
        url = api.create_repo(repo, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=url.repo_id, folder_path=folder, commit_message="Upload a model exported by hpo"
        )
    return str(url)


@contextmanager
def _as_push_error(repo: str) -> Iterator[None]:
    """Turn what the hub's client raises (its own errors, those of HTTP, OSError) into one clear message."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OfflineModeIsEnabled):
            why = "HF_HUB_OFFLINE forbids asking the hub. Unset it"
        elif isinstance(error, LocalTokenNotFoundError):
            why = "the hub must know who you are. Set HF_TOKEN, or run `hf auth login`"
        elif isinstance(error, HFValidationError):
            why = f"it must be a repository, OWNER/NAME: {shorten(str(error), 200)}"
        else:
            why = f"the hub did not take it ({type(error).__name__}: {shorten(str(error), 200)})"
        raise ModelError(f"--push {repo}: {why}.") from error


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
        f"the hub could not be reached ({shorten(str(error), 200)}). Check the network, or name a local "
        f"folder or `minilm`."
    )


def _has_tokenizer_and_weights(folder: Path) -> bool:
    """Whether the folder holds a tokenizer and weights, all shards of them."""
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        return False
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return True
        index = folder / f"{name}.index.json"
        if index.is_file():
            shards = json.loads(index.read_text())["weight_map"].values()
            return all((folder / shard).is_file() for shard in shards)
    return False
