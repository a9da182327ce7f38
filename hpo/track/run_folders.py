"""The folders in which TensorBoard and W&B keep a run, each with a note of what of the trial is in it.

Neither says what a file holds that a command left when it was killed. So a run whose note is not that of the
trial as it is, is written anew, and nothing is in it twice. What goes on is added to an open file.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from hpo.track.runs import Run

NOTE = "hpo.json"


def is_noted(folder: Path, run: Run) -> bool:
    """Whether the folder holds the trial as it is."""
    return _note(folder / NOTE) == _content(run)


def note(folder: Path, run: Run) -> None:
    """Say that the folder holds the trial as it is."""
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
