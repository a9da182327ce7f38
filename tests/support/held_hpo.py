"""`hpo` that waits where a test wants it to, as a program: tests/support/held_hpo.py COMMAND ...

A file `hold-20` in the working folder lets no step after the 20th begin; with a file `no-uploads`, the upload
of a checkpoint makes a file `uploading` when all but its last file is there, and does not end.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from hpo.cli.commands import main
from hpo.study.checkpoints.remote_store import RemoteStore
from hpo.training import loop
from hpo.training.budget import TrainState
from hpo.training.checkpoint import FILES

accumulate_gradients, make_store = loop.accumulate_gradients, RemoteStore.__init__


def accumulate_when_free(*args: Any) -> Any:
    [state] = (arg for arg in args if isinstance(arg, TrainState))
    while any(state.step >= int(path.name.removeprefix("hold-")) for path in Path().glob("hold-*")):
        time.sleep(0.01)
    return accumulate_gradients(*args)


def make_held_store(self: RemoteStore, location: str, filesystem: Any, root: str) -> None:
    make_store(self, location, filesystem, root)
    put_file = filesystem.put_file

    def put_when_free(source: str, target: str) -> None:
        if source.endswith(FILES[-1]) and Path("no-uploads").exists():
            Path("uploading").touch()
            threading.Event().wait()
        put_file(source, target)

    filesystem.put_file = put_when_free


if __name__ == "__main__":
    loop.accumulate_gradients = accumulate_when_free
    RemoteStore.__init__ = make_held_store  # type: ignore[method-assign]
    main()
