"""Tokenise once, share by all trials and workers.

A tokenised split lies in a folder, one file for each array, named by a hash of everything that it depends
on: the examples, the tasks, the tokenizer, and how long texts are cut. The folder is written under another
name and renamed when it is whole and on the disk, so it is there whole or not at all; one that is damaged
all the same (a copy that was cut short) is noticed by its sizes and made again. The files are mapped, not
read, so eight workers hold one copy in memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from filelock import FileLock

from hpo.data.dataset import DataSet
from hpo.data.examples import Example
from hpo.data.progress import logged
from hpo.data.tokenization import tokenize_chunks
from hpo.data.tokenized_split import AnyArray, Concatenation, TokenizedSplit, Windowing, split_of_arrays
from hpo.errors import RunError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT_VERSION = 3
"""To be raised when the arrays, or how they are made, change their meaning."""
_CONTENTS = "contents.json"


def load_tokenized(
    dataset: DataSet, split: str, tokenizer: PreTrainedTokenizerBase, windowing: Windowing, cache_dir: Path
) -> TokenizedSplit:
    """Return a split of the data set in tokens, from the cache where it is there.

    Several processes may ask at once: one does the work, the others wait. Raises what `tokenize_split`
    raises, and RunError when the cache cannot be written.
    """
    examples = dataset.splits[split]
    folder = cache_dir / _key(dataset, split, tokenizer, windowing)
    if (cached := _read(folder, examples)) is not None:
        return cached
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if (cached := _read(folder, examples)) is not None:
                return cached
            num = len(examples)
            what = f"tokenising {num:,} texts of the {split} split (max_length {windowing.max_length})"
            chunks = tokenize_chunks(examples, dataset.tasks, tokenizer, windowing)
            _write(folder, logged(chunks, what, num, size=lambda chunk: len(chunk.examples)))
    except OSError as error:
        raise RunError(
            f"the token cache could not be written: {error}. Free space or make {cache_dir} writable."
        ) from error
    if (written := _read(folder, examples)) is None:
        raise RunError(f"the token cache {folder} was written but cannot be read. Look after its disk.")
    return written


def _key(dataset: DataSet, split: str, tokenizer: PreTrainedTokenizerBase, windowing: Windowing) -> str:
    probe = tokenizer("a", "b", truncation=False, padding=False)
    parts = (
        FORMAT_VERSION,
        dataset.fingerprint,
        dataset.tasks,
        split,
        tokenizer_fingerprint(tokenizer),
        probe["input_ids"],
        tokenizer.model_input_names,
        windowing if windowing.long_text == "window" else replace(windowing, stride=0),
    )
    return f"{split}-{hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()}"


def _write(folder: Path, chunks: Iterable[TokenizedSplit]) -> None:
    unfinished = folder.with_name(f"{folder.name}.unfinished")  # Ours alone: the lock is held.
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    concatenation = Concatenation()
    files: dict[str, BinaryIO] = {}
    arrays: dict[str, tuple[str, list[int]]] = {}
    try:
        with ExitStack() as opened:
            for chunk in chunks:
                for name, array in concatenation.next(chunk).items():
                    if name not in files:
                        files[name] = opened.enter_context((unfinished / name).open("wb"))
                        arrays[name] = (array.dtype.str, [0, *array.shape[1:]])
                    if arrays[name] != (array.dtype.str, [arrays[name][1][0], *array.shape[1:]]):
                        raise ValueError(f"{name} holds {arrays[name]}, not {array.dtype} {array.shape}")
                    files[name].write(array.tobytes())
                    arrays[name][1][0] += len(array)
            files[_CONTENTS] = opened.enter_context((unfinished / _CONTENTS).open("wb"))
            files[_CONTENTS].write(json.dumps({"totals": concatenation.totals, "arrays": arrays}).encode())
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _read(folder: Path, examples: Sequence[Example]) -> TokenizedSplit | None:
    """Map the arrays of a cached split; None where it is not there or not whole."""
    try:
        contents = json.loads((folder / _CONTENTS).read_bytes())
        arrays = {name: _map(folder / name, *of_array) for name, of_array in contents["arrays"].items()}
        return split_of_arrays(examples, arrays, contents["totals"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _map(path: Path, dtype: str, shape: list[int]) -> AnyArray:
    num_bytes = path.stat().st_size
    if num_bytes != math.prod(shape) * np.dtype(dtype).itemsize:
        raise ValueError(f"{path} does not hold what the cache says")
    # Nothing cannot be mapped.
    return (
        np.memmap(path, dtype, "r", shape=tuple(shape)).view(np.ndarray)
        if num_bytes
        else np.zeros(shape, dtype)
    )


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of all that decides how text becomes tokens, as a key for cached token files."""
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    # These two hold what the last call asked for, not what the tokenizer is.
    for call_state in ("truncation", "padding"):
        definition.pop(call_state, None)
    return hashlib.sha256(json.dumps(definition, sort_keys=True).encode()).hexdigest()[:16]
