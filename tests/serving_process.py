"""Workers that serve all studies of a database, with trials that are not trained."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from worker_process import note, notes, result

from hpo.outcome import Outcome
from hpo.study.running.run import OpenOptions
from hpo.study.running.serving import Server
from hpo.study.running.stopping import Stop
from hpo.trial.telemetry import TrialResult


class GatedExecutor:
    """Stands for the executor: the n-th trial of a process lasts until the file `gate-n` is in the folder."""

    def __init__(self, config: Any, device: Any, runs_dir: Path) -> None:
        self.study, self.device, self.amp = config, device, config.amp
        self.folder = runs_dir
        self.dataset = SimpleNamespace(fingerprint="x")
        self.cache: Any = None

    def check_study(self) -> None:
        pass

    def trial_folder(self, token: str, number: int) -> Path:
        return self.folder / f"{token}-{number}"

    def run(self, _params: Any, folder: Path, _key: str, callbacks: Any, **_: Any) -> Any:
        log = self.folder / "log"
        mine = [line for line in notes(log) if line["pid"] == os.getpid()]
        note(log, study=self.study.name, trial=folder.name, pid=os.getpid(), turn=len(mine))
        gate = self.folder / f"gate-{len(mine)}"
        while not (gate.exists() or (self.folder / "open").exists()):
            if callbacks.should_stop():
                return result("preempted")
            time.sleep(0.01)
        return TrialResult(Outcome.COMPLETE, values=(0.5,), telemetry={"device": {}})


class _Notes(logging.Handler):
    def __init__(self, log: Path) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        note(self._log, said=record.getMessage())


def be_worker(url: str, folder: Path, **options: Any) -> None:
    """Serve in this process; `options` are fields of `Server`."""
    logging.getLogger("hpo").addHandler(_Notes(folder / "said"))
    sys.modules["hpo.trial.executor"] = SimpleNamespace(Executor=GatedExecutor)  # type: ignore[assignment]
    how = OpenOptions(resize=False, stop=Stop())
    server = Server(url, folder, how, **{"poll_seconds": 0.05, **options})
    ended = server.serve()
    note(
        folder / "ended",
        pid=os.getpid(),
        ended=ended,
        outcomes=server.outcomes,
        left_out=server.left_out,
    )
