"""Tokenise once, share by all trials and workers.

A tokenised split lies as .npy files in a folder named by a hash of everything that it depends on: the
examples, the tasks, the tokenizer, and how long texts are cut. The folder is written under another name and
renamed when it is whole and on the disk, so it is there whole or not at all; one that is damaged all the
same (a copy that was cut short) is noticed by its sizes and made again. The files are mapped, not read, so
eight workers hold one copy in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock

from hpo.data import DataSet
from hpo.encoder import tokenizer_fingerprint
from hpo.errors import RunError
from hpo.examples import Example
from hpo.tokenization import tokenize_split
from hpo.tokens import AnyArray, TokenizedSplit, Windowing, WindowSpans

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT_VERSION = 1
"""To be raised when the arrays, or how they are made, change their meaning."""
_FLAT = (
    "input_ids_T",
    "type_ids_T",
    "char_start_T",
    "char_end_T",
    "owned_T",
    "window_start_W1",
    "window_example_W",
)
_CONTENTS = "contents.json"


def load_tokenized(
    dataset: DataSet,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    windowing: Windowing,
    cache_dir: Path,
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
            made = tokenize_split(examples, dataset.tasks, tokenizer, windowing)
            _write(folder, made)
    except OSError as error:
        raise RunError(
            f"the token cache could not be written: {error}. Free space or make {cache_dir} writable."
        ) from error
    return _read(folder, examples) or made


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


def _write(folder: Path, split: TokenizedSplit) -> None:
    arrays: dict[str, AnyArray] = {name: getattr(split, name) for name in _FLAT}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    for task, spans in split.spans.items():
        arrays[f"span_rows.{task}"], arrays[f"span_start.{task}"] = spans.rows_S4, spans.start_W1
    arrays |= {f"target.{task}": array for task, array in split.targets.items()}
    arrays |= {f"annotated.{task}": array for task, array in split.annotated.items()}
    contents = {
        "max_length": split.max_length,
        "num_cut_examples": split.num_cut_examples,
        "num_lost_spans": dict(split.num_lost_spans),
        "arrays": {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()},
    }
    unfinished = folder.with_name(f"{folder.name}.unfinished")  # Ours alone: the lock is held.
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        for name, array in arrays.items():
            with (unfinished / f"{name}.npy").open("wb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        with (unfinished / _CONTENTS).open("w") as file:
            json.dump(contents, file)
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
        arrays = {
            name: _map(folder / f"{name}.npy", dtype, shape)
            for name, (dtype, shape) in contents["arrays"].items()
        }
        flat: dict[str, Any] = {name: arrays.get(name) for name in _FLAT}

        def of_tasks(kind: str) -> dict[str, AnyArray]:
            prefix = f"{kind}."
            return {n.removeprefix(prefix): array for n, array in arrays.items() if n.startswith(prefix)}

        starts = of_tasks("span_start")
        return TokenizedSplit(
            examples=examples,
            max_length=contents["max_length"],
            spans={task: WindowSpans(rows, starts[task]) for task, rows in of_tasks("span_rows").items()},
            targets=of_tasks("target"),
            annotated=of_tasks("annotated"),
            num_cut_examples=contents["num_cut_examples"],
            num_lost_spans=contents["num_lost_spans"],
            **flat,
        )
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _map(path: Path, dtype: str, shape: list[int]) -> AnyArray:
    array: AnyArray = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.dtype.str != dtype or list(array.shape) != shape:
        raise ValueError(f"{path} does not hold what the cache says")
    return array.view(np.ndarray)
