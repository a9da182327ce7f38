"""The folders of TensorBoard and W&B, each with a note of the trial's state in it. A run whose note is out of
date is written anew, since a file does not tell what a killed command left in it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from hpo.track.runs import Run

NOTE = "hpo.json"


def is_noted(folder: Path, run: Run) -> bool:
    return _note(folder / NOTE) == _content(run)


def note(folder: Path, run: Run) -> None:
    temporary = folder / f".{NOTE}"
    temporary.write_text(json.dumps(_content(run)))
    temporary.replace(folder / NOTE)


def forget_other_studies(folder: Path, token: str) -> None:
    """Remove the runs of a study of another token, which had the same name and was deleted."""
    for path in folder.glob(f"*/{NOTE}"):
        if not str(_note(path).get("key")).startswith(f"{token}-"):
            shutil.rmtree(path.parent)


def _content(run: Run) -> dict[str, Any]:
    return {"key": run.key, "digest": run.digest}


def _note(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
