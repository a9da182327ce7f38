"""Workers that serve all studies of a database, with trials that are not trained."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from worker_process import CONTEXT, note, notes, result

from hpo.study.serving import Served, ServingOptions, serve
from hpo.study.stopping import Stop

CONTEXT.set_forkserver_preload(["hpo.study.serving", "psycopg", "alembic.context", "torch"])


class GatedExecutor:
    """Stands for the executor: the n-th trial of a process lasts until the file `gate-n` is in the folder."""

    checkpoint_seconds = 0.0

    def __init__(self, config: Any, device: Any, runs_dir: Path) -> None:
        self.study, self.device, self.amp = config, device, config.amp
        self.folder = runs_dir
        self.dataset = SimpleNamespace(fingerprint="x")
        self.cache: Any = None

    def check_study(self) -> None:
        pass

    def known_tokens(self) -> list[Any]:
        return []

    def trial_folder(self, token: str, number: int) -> Path:
        return self.folder / f"{token}-{number}"

    def run(self, _params: Any, folder: Path, _key: str, _report: Any, should_stop: Any, **_: Any) -> Any:
        log = self.folder / "log"
        mine = [line for line in notes(log) if line["pid"] == os.getpid()]
        note(log, study=self.study.name, trial=folder.name, pid=os.getpid(), turn=len(mine))
        gate = self.folder / f"gate-{len(mine)}"
        while not (gate.exists() or (self.folder / "open").exists()):
            if should_stop():
                return result("preempted")
            time.sleep(0.01)
        return result("complete", telemetry={"device": {}})


class _Notes(logging.Handler):
    def __init__(self, log: Path) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        note(self._log, said=record.getMessage())


def be_worker(url: str, folder: Path, **options: Any) -> None:
    logging.getLogger("hpo").addHandler(_Notes(folder / "said"))
    served = serve_here(url, folder, **options)
    note(
        folder / "ended",
        pid=os.getpid(),
        ended=served.ended,
        outcomes=served.outcomes,
        left_out=served.left_out,
    )


def serve_here(url: str, folder: Path, stop: Stop | None = None, **options: Any) -> Served:
    """Serve in this process; `options` are those of `ServingOptions`."""
    sys.modules["hpo.trial.executor"] = SimpleNamespace(Executor=GatedExecutor)  # type: ignore[assignment]
    given = ServingOptions(**{"poll_seconds": 0.05, **options})
    return serve(url, folder, given, stop=stop or Stop())
