"""Files in the folder of a model: whether they are complete, and which of them is broken."""

from __future__ import annotations

import json
from pathlib import Path
from zipfile import is_zipfile

from safetensors import SafetensorError, safe_open

_TOKENIZER_FILES = ("tokenizer.json", "vocab.*", "*.model")


def has_tokenizer_and_weights(folder: Path) -> bool:
    """Return True if the folder holds a tokenizer and weights, with all shards of them."""
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
    """Name the first file of a model's folder that cannot be read, and say why; empty if all can be."""
    for path in sorted(folder.glob("*.json")):
        try:
            is_object = isinstance(json.loads(path.read_bytes()), dict)
        except ValueError as error:
            return f"{path.name} is no valid JSON: {error}"
        if not is_object:
            return f"{path.name} must hold a JSON object"
    for path in (*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("*.bin"))):
        with path.open("rb") as file:
            is_pointer = file.read(20) == b"version https://git-"
        if is_pointer:
            return f"{path.name} is a pointer of Git LFS. Run `git lfs pull` there"
        try:
            if path.suffix == ".safetensors":
                safe_open(path, "pt")
            elif not is_zipfile(path):
                return f"{path.name} is damaged, or of a PyTorch before 1.6"
        except SafetensorError as error:
            return f"{path.name} is damaged: {error}"
    return ""
