"""Notes in the run folders of TensorBoard and W&B: the shown state of the trial.

A folder with an outdated note is written anew, because files do not show what a killed command left in them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from hpo.track.runs import Run

NOTE = "hpo.json"


def is_noted(folder: Path, run: Run) -> bool:
    return _note(folder / NOTE) == {"key": run.key, "digest": run.digest}


def note(folder: Path, run: Run) -> None:
    temporary = folder / f".{NOTE}"
    temporary.write_text(json.dumps({"key": run.key, "digest": run.digest}))
    temporary.replace(folder / NOTE)


def forget_other_studies(folder: Path, token: str) -> None:
    """Remove the runs of a deleted study of the same name, which had another token."""
    for path in folder.glob(f"*/{NOTE}"):
        if not str(_note(path).get("key")).startswith(f"{token}-"):
            shutil.rmtree(path.parent)


def _note(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
