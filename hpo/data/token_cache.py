"""Tokenised splits on disk, shared by all trials and workers.

A split is a folder with one file for each array. A hash of all inputs names the folder. It gets this name
when it is complete; a damaged one is made again. The files are memory-mapped, so workers share one copy.
"""

import hashlib
import json
import logging
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from hpo.data.dataset import DataSet
from hpo.data.tokenization import tokenize_chunks
from hpo.errors import RunError
from hpo.tasks.example import Example
from hpo.tasks.kind import KINDS
from hpo.tasks.tokenized_split import WHOLE_TEXTS, AnyArray, TokenizedSplit, Windowing, WindowSpans

_logger = logging.getLogger("hpo.data")

FORMAT_VERSION = 6
"""Raise it with every change of the arrays or of their meaning."""
_CONTENTS = "contents.json"
_FLAT = tuple(field.name for field in fields(TokenizedSplit) if field.name.endswith(("_T", "_W", "_W1")))
"""Names of the arrays over all tokens or windows of a split."""


def load_tokenized(
    dataset: DataSet, split: str, tokenizer: PreTrainedTokenizerBase, windowing: Windowing, cache_dir: Path
) -> TokenizedSplit:
    """Return a tokenised split of the data set, from the cache if possible.

    If several processes ask at once, one does the work and the others wait. Raises RunError if the cache
    cannot be written, and the errors of `tokenize_chunks`.
    """
    examples = dataset.splits[split]
    folder = cache_dir / _key(dataset, split, tokenizer, windowing)
    if (cached := _read(folder, examples)) is not None:
        return cached
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if _read(folder, examples) is None:
                length = windowing.max_length
                how = "whole" if length == WHOLE_TEXTS else f"max_length {length}"
                _logger.info("tokenising %d texts of the %s split (%s)", len(examples), split, how)
                _write(folder, tokenize_chunks(examples, dataset.tasks, tokenizer, windowing))
    except OSError as error:
        raise RunError(
            f"the token cache could not be written: {error}. Free space or make {cache_dir} writable."
        ) from error
    if (written := _read(folder, examples)) is None:
        raise RunError(f"the token cache {folder} was written but cannot be read. Check its disk.")
    return written


def _key(dataset: DataSet, split: str, tokenizer: PreTrainedTokenizerBase, windowing: Windowing) -> str:
    parts = (
        FORMAT_VERSION,
        dataset.fingerprint,
        dataset.tasks,
        [KINDS.hash_of(task.kind) for task in dataset.tasks],
        split,
        tokenizer_fingerprint(tokenizer),
        tokenizer.model_input_names,
        windowing if windowing.long_text == "window" else replace(windowing, stride=0),
    )
    return f"{split}-{hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()}"


def _write(folder: Path, chunks: Iterable[TokenizedSplit]) -> None:
    arrays, totals = _joined(chunks)
    unfinished = folder.with_name(f"{folder.name}.unfinished")  # Ours alone: the lock is held.
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        for name, parts in arrays.items():
            np.save(unfinished / name, np.concatenate(parts))
        (unfinished / _CONTENTS).write_text(json.dumps({"arrays": [*arrays], "totals": totals}))
        for path in unfinished.iterdir():
            with path.open("ab") as file:
                os.fsync(file.fileno())
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _joined(chunks: Iterable[TokenizedSplit]) -> tuple[dict[str, list[AnyArray]], dict[str, Any]]:
    """Return the parts of each array of a split, and its numbers; each chunk counts from 0."""
    arrays = defaultdict[str, list[AnyArray]](list)
    totals: dict[str, Any] = {"num_cut_examples": 0, "num_lost_spans": Counter()}
    num_examples = 0
    for chunk in chunks:
        chunk_arrays = {name: array for name in _FLAT if (array := getattr(chunk, name)) is not None}
        for task, spans in chunk.spans.items():
            chunk_arrays |= {f"span_rows.{task}": spans.rows_S4, f"span_start.{task}": spans.start_W1}
        chunk_arrays |= {f"target.{task}": array for task, array in chunk.targets.items()}
        chunk_arrays |= {f"annotated.{task}": array for task, array in chunk.annotated.items()}
        for name in ("window_start_W1", *(f"span_start.{task}" for task in chunk.spans)):
            if before := arrays[name]:  # The first start of a chunk is the last end of the one before.
                chunk_arrays[name] = chunk_arrays[name][1:] + before[-1][-1]
        chunk_arrays["window_example_W"] = chunk_arrays["window_example_W"] + np.int32(num_examples)
        for name, array in chunk_arrays.items():
            arrays[name].append(array)
        num_examples += len(chunk.examples)
        totals["max_length"] = chunk.max_length
        totals["num_cut_examples"] += chunk.num_cut_examples
        totals["num_lost_spans"].update(chunk.num_lost_spans)
    return arrays, totals


def _read(folder: Path, examples: Sequence[Example]) -> TokenizedSplit | None:
    """Map the arrays of a cached split; None if it is missing or damaged."""
    try:
        contents = json.loads((folder / _CONTENTS).read_bytes())
        arrays: dict[str, Any] = {
            name: np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in contents["arrays"]
        }

        def by_task(kind: str) -> dict[str, AnyArray]:
            return {name.removeprefix(kind): arrays[name] for name in arrays if name.startswith(kind)}

        start_W1 = by_task("span_start.")
        return TokenizedSplit(
            examples=examples,
            spans={task: WindowSpans(rows, start_W1[task]) for task, rows in by_task("span_rows.").items()},
            targets=by_task("target."),
            annotated=by_task("annotated."),
            **{name: arrays[name] for name in _FLAT if name in arrays},
            **contents["totals"],
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of a tokenizer's definition."""
    # The definition contains the truncation and padding of the last call, so this call resets them.
    probe = tokenizer("a", "b", truncation=False, padding=False)["input_ids"]
    definition = f"{tokenizer.backend_tokenizer.to_str()}{probe}"
    return hashlib.sha256(definition.encode()).hexdigest()[:16]
