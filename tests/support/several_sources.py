"""Two small sources: each has a task of its own, and both have the task `tone`."""

from pathlib import Path
from typing import Any

from support.jsonl_sets import write_set

TONE = {"kind": "single_label", "classes": ["bad", "good"]}
TASKS: dict[str, dict[str, Any]] = {
    "news": {"topic": {"kind": "single_label", "classes": ["art", "sport"]}, "tone": TONE},
    "mail": {"size": {"kind": "regression"}, "tone": TONE},
}
SIZES = {"news": {"train": 24, "validation": 8, "test": 6}, "mail": {"train": 12, "validation": 4, "test": 4}}


def _rows(source: str, split: str) -> list[dict[str, Any]]:
    first = {"train": 0, "validation": 100, "test": 200}[split]
    rows = []
    for n in range(first, first + SIZES[source][split]):
        own = {"topic": ("art", "sport")[n % 2]} if source == "news" else {"size": float(n % 5)}
        tone = ("bad", "good")[n % 3 > 0]
        text = f"{source} word{n % 7} about {' '.join(map(str, own.values()))} is {tone} {'x ' * (n % 9)}"
        rows.append({"id": f"{n}", "text": text, "group": f"g{n}", "labels": {**own, "tone": tone}})
    return rows


def write_sources(folder: Path, **of_mail: Any) -> dict[str, Any]:
    """Write both sources. Returns the section `data` of their study; `of_mail` are more keys of `mail`."""
    for name, tasks in TASKS.items():
        splits = {split: _rows(name, split) for split in SIZES[name]}
        write_set(folder / name, {"tasks": tasks}, **splits)
    news, mail = ({"name": name, "source": "jsonl", "path": str(folder / name)} for name in TASKS)
    return {"sources": [news, mail | of_mail]}
