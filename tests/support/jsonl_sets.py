"""Data sets in jsonl files, written and loaded for a test."""

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hpo.config.data_config import DataConfig
from hpo.data.dataset import DataSet, load_data


def write_set(folder: Path, tasks: object, **splits: Iterable[object]) -> Path:
    """Write `tasks.json` and a file for each split; rows that are strings are written as they are."""
    folder.mkdir(exist_ok=True)
    (folder / "tasks.json").write_text(json.dumps(tasks))
    for split, rows in splits.items():
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        (folder / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def write_moods(folder: Path, **texts: Iterable[str]) -> Path:
    """Write texts by split; their mood is `bad` if they have this word, else `good`.

    Each has a word of its own at its end: equal texts are one piece of evidence.
    """
    numbers = map(str, itertools.count())
    digits = str.maketrans("0123456789", "klmnopqrst")
    splits = {
        split: [
            {
                "id": (number := next(numbers)),
                "text": f"{text} z{number.translate(digits)}",
                "labels": {"mood": "bad" if "bad" in text else "good"},
            }
            for text in of_split
        ]
        for split, of_split in texts.items()
    }
    return write_set(folder, {"mood": {"kind": "single_label", "classes": ["good", "bad"]}}, **splits)


def load_set(folder: Path, source: str = "jsonl", **options: Any) -> DataSet:
    return load(source=source, path=str(folder), **options)


def load(**config: Any) -> DataSet:
    """The data of this section of a study file."""
    return load_data(DataConfig.model_validate(config))
