"""`hpo` that waits where a test wants it to, as a program: tests/held_hpo.py COMMAND ...

A file `hold-20` in the working folder lets no step after the 20th begin; with a file `no-uploads`, the upload
of a checkpoint begins, makes a file `uploading`, and does not end.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from hpo.cli.commands import main
from hpo.study.artifact_store import ArtifactStore
from hpo.training import loop
from hpo.training.loop import TrainState

accumulate_gradients, write = loop.accumulate_gradients, ArtifactStore.write


def accumulate_when_free(*args: Any) -> Any:
    [state] = (arg for arg in args if isinstance(arg, TrainState))
    while any(state.step >= int(path.name.removeprefix("hold-")) for path in Path().glob("hold-*")):
        time.sleep(0.01)
    return accumulate_gradients(*args)


def write_when_free(*args: Any) -> None:
    if Path("no-uploads").exists():
        Path("uploading").touch()
        threading.Event().wait()
    write(*args)


if __name__ == "__main__":
    loop.accumulate_gradients = accumulate_when_free
    ArtifactStore.write = write_when_free  # type: ignore[method-assign]
    main()
