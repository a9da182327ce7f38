"""Tokenise once, share by all trials and workers.

A tokenised split lies in a folder, one file for each array, named by a hash of everything that it depends
on: the examples, the tasks, the tokenizer, and how long texts are cut. The folder is written under another
name and renamed when it is whole and on the disk, so it is there whole or not at all; one that is damaged
all the same (a copy that was cut short) is noticed by its sizes and made again. The files are mapped, not
read, so eight workers hold one copy in memory. A large split is tokenised and written chunk by chunk, so that
no more than one chunk is in memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock

from hpo.data.dataset import DataSet
from hpo.data.examples import Example
from hpo.data.progress import logged
from hpo.data.tokenization import tokenize_chunks
from hpo.data.tokenized_split import AnyArray, TokenizedSplit, Windowing, WindowSpans
from hpo.errors import RunError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT_VERSION = 3
"""To be raised when the arrays, or how they are made, change their meaning."""
_CONTENTS = "contents.json"
_FLAT = tuple(field.name for field in fields(TokenizedSplit) if field.name.endswith(("_T", "_W", "_W1")))
"""The arrays over all tokens or windows of a split, whatever its tasks."""


def load_tokenized(
    dataset: DataSet, split: str, tokenizer: PreTrainedTokenizerBase, windowing: Windowing, cache_dir: Path
) -> TokenizedSplit:
    """Return a split of the data set in tokens, from the cache where it is there.

    Several processes may ask at once: one does the work, the others wait. Raises what `tokenize_chunks`
    raises, and RunError when the cache cannot be written.
    """
    examples = dataset.splits[split]
    folder = cache_dir / _key(dataset, split, tokenizer, windowing)
    if (cached := _read(folder, examples)) is not None:
        return cached
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if _read(folder, examples) is None:
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
    contents: dict[str, Any] = {"totals": {}, "arrays": {}}
    try:
        for appended, totals in _appended(chunks):
            contents["totals"] = totals
            for name, array in appended.items():
                _, shape = contents["arrays"].setdefault(name, (array.dtype.str, [0, *array.shape[1:]]))
                shape[0] += len(array)
                with (unfinished / name).open("ab") as file:
                    file.write(array.tobytes())
        (unfinished / _CONTENTS).write_text(json.dumps(contents))
        for path in unfinished.iterdir():
            with path.open("ab") as file:
                os.fsync(file.fileno())
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _appended(chunks: Iterable[TokenizedSplit]) -> Iterator[tuple[dict[str, AnyArray], dict[str, Any]]]:
    """Of each chunk, which counts from 0, the arrays to append to those before it, and the totals so far."""
    num_examples = num_cut = 0
    num_lost = Counter[str]()
    ends: dict[str, int] = {}
    for chunk in chunks:
        arrays = {name: array for name in _FLAT if (array := getattr(chunk, name)) is not None}
        for task, spans in chunk.spans.items():
            arrays |= {f"span_rows.{task}": spans.rows_S4, f"span_start.{task}": spans.start_W1}
        arrays |= {f"target.{task}": array for task, array in chunk.targets.items()}
        arrays |= {f"annotated.{task}": array for task, array in chunk.annotated.items()}
        for name in ("window_start_W1", *(f"span_start.{task}" for task in chunk.spans)):
            start_W1 = arrays[name] + ends.get(name, 0)
            # The first start of a chunk is the last end of the one before.
            arrays[name] = start_W1[1:] if name in ends else start_W1
            ends[name] = int(start_W1[-1])
        arrays["window_example_W"] = arrays["window_example_W"] + np.int32(num_examples)
        num_examples += len(chunk.examples)
        num_cut += chunk.num_cut_examples
        num_lost.update(chunk.num_lost_spans)
        yield (
            arrays,
            {"max_length": chunk.max_length, "num_cut_examples": num_cut, "num_lost_spans": num_lost},
        )


def _read(folder: Path, examples: Sequence[Example]) -> TokenizedSplit | None:
    """Map the arrays of a cached split; None where it is not there or not whole."""
    try:
        contents = json.loads((folder / _CONTENTS).read_bytes())
        in_files = contents["arrays"].items()
        arrays: dict[str, Any] = {name: _map(folder / name, *of_array) for name, of_array in in_files}

        def of_tasks(kind: str) -> dict[str, AnyArray]:
            return {name.removeprefix(kind): arrays[name] for name in arrays if name.startswith(kind)}

        start_W1 = of_tasks("span_start.")
        return TokenizedSplit(
            examples=examples,
            spans={task: WindowSpans(rows, start_W1[task]) for task, rows in of_tasks("span_rows.").items()},
            targets=of_tasks("target."),
            annotated=of_tasks("annotated."),
            **{name: arrays[name] for name in _FLAT if name in arrays},
            **contents["totals"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _map(path: Path, dtype: str, shape: list[int]) -> AnyArray:
    if np.dtype(dtype).kind not in "biuf":  # objects would be addresses in this process
        raise ValueError(f"{path} must hold numbers, but the cache says {dtype}")
    num_bytes = path.stat().st_size
    if num_bytes != math.prod(shape) * np.dtype(dtype).itemsize:
        raise ValueError(f"{path} does not hold what the cache says")
    if not num_bytes:
        return np.zeros(shape, dtype)  # An empty file cannot be mapped.
    return np.memmap(path, dtype, "r", shape=tuple(shape)).view(np.ndarray)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of all that decides how text becomes tokens, as a key for cached token files."""
    backend = tokenizer.backend_tokenizer
    # These two hold what the last call asked for, not what the tokenizer is. They are taken out before it
    # becomes text, whose vocabulary is in the order of its ids: to parse and sort it takes 100 times as long.
    truncation, padding = backend.truncation, backend.padding
    backend.no_truncation()
    backend.no_padding()
    definition = backend.to_str()
    if truncation is not None:
        backend.enable_truncation(**truncation)
    if padding is not None:
        backend.enable_padding(**padding)
    return hashlib.sha256(definition.encode()).hexdigest()[:16]
