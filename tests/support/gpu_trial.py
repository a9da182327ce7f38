"""A trial that is killed with -9 in the middle, and what it would have done: for the checks of `tests/gpu`.

As a program it runs the trial of STUDY and kills itself after a step:
tests/support/gpu_trial.py STUDY FOLDER STEP
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.extend(map(str, Path(__file__).parents[1:3]))  # where this file is the program

from hpo.config.resolved_study import resolve_study
from hpo.config.study_config import load_study
from hpo.device import probe_device
from hpo.outcome import TrialResult
from hpo.trial.executor import Executor
from hpo.trial.telemetry import Callbacks


def run_trial(study: Path, folder: Path, killed_after: int | None = None) -> tuple[TrialResult, list[float]]:
    """Run the trial, or go on with it from the checkpoint in `folder`; also return its losses by evaluation.

    A step has been given to the device when the process dies, but a GPU may still compute it.
    """
    config = load_study(str(study))
    executor = Executor(resolve_study(config, probe_device(config.device)), study.parent / "runs")
    losses: list[float] = []

    def note(scored: Any) -> None:
        losses.append(scored.train_loss)

    def die(progress: Any) -> None:
        if progress.step == killed_after:
            os.kill(os.getpid(), signal.SIGKILL)

    callbacks = Callbacks(on_evaluation=note, on_progress=die)
    return executor.run({}, folder, "trial", callbacks), losses


if __name__ == "__main__":
    run_trial(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
