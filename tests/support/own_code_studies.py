"""A study with a file of code of its own, for tests."""

from pathlib import Path
from typing import Any

from support.command_line import ROOT
from support.jsonl_sets import write_set
from support.tiny import write_study

EXAMPLE = (ROOT / "studies/examples/own_kind/own_kind.py").read_text()
NOTED = "\nwith open(__file__ + '.ran', 'a') as note:\n    note.write('x')  # each time it is run\n"
TASKS = {"times": {"kind": "count"}, "tone": {"kind": "single_label", "classes": ["no", "yes"]}}
TRAINING = {"max_steps": 60, "batch_size": 8, "max_length": 16, "dropout": 0.0, "fp_precision": "fp32"}


def count_rows(split: str, size: int) -> list[dict[str, Any]]:
    """Posts in which a word occurs 0 to 4 times, which is what is counted."""
    times = [number * number % 5 for number in range(size)]
    return [
        {
            "id": f"{split}-{number}",
            "text": "it hurts " * count + "today",
            "labels": {"times": count, "tone": "yes" if count else "no"},
        }
        for number, count in enumerate(times)
    ]


def write(folder: Path, source: str = EXAMPLE + NOTED, **changes: Any) -> Path:
    """The tiny study with a task of an own kind, beside the file of its code."""
    (folder / "own_kind.py").write_text(source)
    data = write_set(
        folder / "rows",
        TASKS,
        train=count_rows("train", 40),
        validation=count_rows("v", 20),
        test=count_rows("t", 20),
    )
    (data / "tasks.json").unlink()
    named = {"source": "jsonl", "path": "rows", "tasks": TASKS}
    given = {"data": named, "code": "own_kind.py", "training": TRAINING, "objective": {"metric": "times/r2"}}
    return write_study(folder, **(given | changes))
