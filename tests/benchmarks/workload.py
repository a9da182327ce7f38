"""What every contender trains on: the same rows, tasks, encoder, batch size and optimiser.

long    dialogues of `sgd`, about 230 tokens (at most 320); without the set, generated posts of such lengths
short   sentences of `nlupp`, about 12 tokens; without the set, generated posts of one or two sentences

A workload is a folder with train.jsonl, validation.jsonl and tasks.json. The tasks are whole-text ones, so
that a peer needs no more than a linear layer on the mean of the tokens.
"""

import json
import multiprocessing
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from hpo.data.synthetic import TASKS_JSON, SyntheticRows

REAL_SETS = Path(os.environ.get("HPO_DATA_DIR", Path(__file__).parents[3] / "shared" / "data"))
"""Folder of the real, openly licensed sets: HPO_DATA_DIR, or a folder beside the project."""


@dataclass(frozen=True)
class Workload:
    """One kind of text and what is trained on it."""

    name: str
    real_set: str
    """Empty: generated posts."""
    tasks: tuple[str, ...]
    """Of the real set, or of the generated posts; of these empty: `SYNTHETIC_TASKS`."""
    max_length: int
    synthetic_sentences: tuple[int, int]
    num_train: int
    num_validation: int
    batch_size: int = 16
    encoder: str | dict[str, Any] = "minilm"
    """As in a study file: MiniLM, or the configuration of a fresh encoder."""
    synthetic_words: tuple[int, int] | None = None
    """Cut each generated post to this many words, at least and at most. The labels may not fit then."""
    device: str = "cpu"
    """`cpu` or `cuda`."""

    @property
    def tokenizer(self) -> str:
        """The name or the folder of the tokenizer that the contenders use."""
        return self.encoder.get("tokenizer", "minilm") if isinstance(self.encoder, dict) else "minilm"


WORKLOADS = {
    "long": Workload("long", "sgd", ("intents", "domains"), 320, (10, 34), 320, 160),
    "short": Workload("short", "nlupp", ("domain", "intents"), 64, (1, 2), 1600, 400),
}
SYNTHETIC_TASKS = ("criteria", "severity")
DROPOUT = 0.1
LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.01


def write_workload(workload: Workload, folder: Path) -> str:
    """Write the workload's rows into `folder` and say where they come from."""
    folder.mkdir(parents=True, exist_ok=True)
    source = REAL_SETS / workload.real_set
    is_real = bool(workload.real_set) and (source / "tasks.json").exists()
    specs = json.loads((source / "tasks.json").read_text()) if is_real else TASKS_JSON
    names = (workload.tasks if is_real or not workload.real_set else ()) or SYNTHETIC_TASKS
    for split, size in (("train", workload.num_train), ("validation", workload.num_validation)):
        if is_real:
            with (source / f"{split}.jsonl").open(encoding="utf-8") as lines:
                rows = [json.loads(line) for line in islice(lines, size)]
        else:
            low, high = workload.synthetic_sentences
            posts = SyntheticRows(split, size, min_sentences=low, max_sentences=high)
            rows = [{"id": post.id, "text": post.text, "labels": post.labels} for post in posts]
            if workload.synthetic_words:
                draw = random.Random(split)
                for row in rows:
                    row["text"] = " ".join(row["text"].split()[: draw.randint(*workload.synthetic_words)])
        kept = (
            {"id": row["id"], "text": row["text"], "labels": {name: row["labels"][name] for name in names}}
            for row in rows
        )
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in kept))
    tasks = {"tasks": {name: specs["tasks"][name] for name in names}}
    (folder / "tasks.json").write_text(json.dumps(tasks))
    return f"the set {workload.real_set}" if is_real else "generated posts"


def study_content(workload: Workload, folder: Path, precision: str) -> dict[str, Any]:
    """The study file that trains the workload with our settings set to the peers'."""
    return {
        "name": workload.name,
        "device": workload.device,
        "data": {"source": "jsonl", "path": str(folder)},
        "model": {"encoder": workload.encoder},
        "training": {
            "epochs": 1,
            "fp_precision": precision,
            "batch_size": workload.batch_size,
            "max_length": workload.max_length,
            "pooling": "mean",
            "dropout": DROPOUT,
            "attention_dropout": DROPOUT,
            "head_dropout": DROPOUT,
            "optimizer": "adamw",
            "learning_rate": LEARNING_RATE,
            "weight_decay": WEIGHT_DECAY,
            "schedule": "linear",
            "warmup_ratio": 0.0,
            "max_grad_norm": 1.0,
        },
        "compat": {"enabled": False},
        "sampler": {"name": "grid"},
        "pruner": {"name": "none"},
        "n_trials": 1,
    }


def spread(values: Sequence[float]) -> str:
    """The median, with minimum and maximum."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def mark(device: str) -> Any:
    """A point in time: of the host's clock, or an event in the work of a GPU, which waits for nothing."""
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Any, end: Any) -> float:
    """The seconds between two marks of one device. Waits for the second."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def run_apart(function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function in a new process: accelerate keeps the precision of a process's first Trainer."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=warnings.simplefilter, initargs=("ignore",)) as pool:
        return pool.submit(function, *arguments).result()
