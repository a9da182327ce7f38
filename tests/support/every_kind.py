"""Small data sets with tasks of every kind, some texts longer than a window, and a study file of each."""

import random
import re
from pathlib import Path
from typing import Any

from hpo.trial.executor import Executor
from support.jsonl_sets import write_set
from support.tiny import executor_of, write_study

TASKS: dict[str, Any] = {
    "topic": {"kind": "single_label", "classes": ["delivery", "price", "other"]},
    "tags": {"kind": "multi_label", "classes": ["late", "rude", "broken"]},
    "urgency": {"kind": "regression", "target": "log1p"},
    "reason": {"kind": "token_classification", "span_names": ["reason", "person"]},
    "places": {"kind": "token_classification", "span_names": ["city", "street"], "spans_may_overlap": True},
    "evidence": {"kind": "span_per_label", "evidence_for": "tags"},
    "name": {"kind": "span_extraction", "span_names": ["name"]},
}
PAIR_TASKS: dict[str, Any] = {
    "verdict": {"kind": "single_label", "classes": ["yes", "no"]},
    "answer": {"kind": "span_extraction", "span_names": ["answer"], "inside_segment": "context"},
}
TEXT = "late again the parcel came to Rome and Ann paid too much for it in Via Appia today , broken !"
WORDS = {"late": "late", "rude": "much", "broken": "broken", "reason": "again", "person": "Ann"}
WORDS |= {"city": "Rome", "street": "Via", "name": "parcel"}
"""Words that have the labels and spans of `TASKS`."""
WINDOWS = {"max_steps": 80, "batch_size": 8, "max_length": 24, "dropout": 0.0}


def _text(rng: random.Random, longest: int = 60) -> str:
    return " ".join(rng.choice(TEXT.split()) for _ in range(rng.randint(2, longest)))


def _words(text: str, word: str) -> list[list[int]]:
    """Where a word stands in the text, so that a small model can learn it."""
    return [list(match.span()) for match in re.finditer(rf"\b{word}\b", text)]


def row(number: int, rng: random.Random) -> dict[str, Any]:
    """A row that is annotated for all tasks of `TASKS`."""
    text = _text(rng)
    found = {name: _words(text, word) for name, word in WORDS.items()}
    found["name"] = found["name"][:1]
    tags = [tag for tag in TASKS["tags"]["classes"] if found[tag]]
    topic = "delivery" if found["late"] else "price" if found["rude"] else "other"
    labels = {"topic": topic, "tags": tags, "urgency": len(text) / 10}
    return {"id": f"{number}", "text": text, "labels": labels, "spans": {k: v for k, v in found.items() if v}}


def pair_row(number: int, rng: random.Random) -> dict[str, Any]:
    """A question and its context in one text, as `PAIR_TASKS` have them."""
    question, context = _text(rng, 6), _text(rng)
    text, at = f"{question} ? {context}", len(question) + 3
    answers = [[start, end] for start, end in _words(text, "Rome") if start >= at]
    return {
        "id": f"{number}",
        "text": text,
        "segments": {"question": [0, len(question)], "context": [at, len(text)]},
        "labels": {"verdict": "yes" if answers else "no"},
        "spans": {"answer": answers[:1]} if answers else {},
    }


def write_every_kind(folder: Path, *, pairs: bool = False, **changes: Any) -> Path:
    """The study `tiny` on such a set, with windows of 24 tokens; `changes` replace its top-level keys."""
    rng, make, number = random.Random(0), pair_row if pairs else row, iter(range(1000))
    sizes = {"train": 120, "validation": 24, "test": 24}
    splits = {split: [make(next(number), rng) for _ in range(size)] for split, size in sizes.items()}
    write_set(folder / "data", PAIR_TASKS if pairs else TASKS, **splits)
    data: dict[str, Any] = {"source": "jsonl", "path": "data", "long_text": "window", "stride": 6}
    if pairs:
        data |= {"pair_segments": ["question", "context"]}
    defaults = {"data": data, "training": WINDOWS, "amp": {"preset": "basic"}, "n_trials": 1}
    return write_study(folder, **{**defaults, "checkpoint": {"top_k": 1}, **changes})


def every_kind_executor(folder: Path, **changes: Any) -> Executor:
    return executor_of(write_every_kind(folder, **changes))
