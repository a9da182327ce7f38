"""`hpo` with a fault in one of several processes that train together, as a program.

    torchrun ... tests/support/rank_faults.py FAULT,FAULT RANK COMMAND ...

The n-th fault is at work in the n-th trial of that rank, from a step on, and leaves a file `fault` in the
working folder.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch

from hpo.training import distributed, loop
from hpo.training.losses import MultitaskLoss

AFTER_STEPS = 3
"""The steps that a trial makes before its fault."""


def fail() -> NoReturn:
    raise ValueError("a bug")


def hang() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # or torchrun waits for 30 s before it kills
    threading.Event().wait()


def run_out_of_memory() -> NoReturn:
    raise torch.OutOfMemoryError("CUDA out of memory.")


FAULTS: dict[str, Callable[[], Any]] = {
    "raises": fail,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": hang,
    "memory": run_out_of_memory,
    "nan": lambda: torch.nan,
}
"""What happens in place of a loss, or a factor of it."""


def main(faults: str, rank: str, *command: str) -> None:
    from hpo.cli.commands import main as hpo
    from hpo.trial.run import TrialRun

    run, apply_gradients, compute = TrialRun.run, loop.apply_gradients, MultitaskLoss.__call__
    fault, steps = "", 0
    of_trials = iter(faults.split(",") if os.environ["RANK"] == rank else ())

    def run_with_fault(*args: Any) -> Any:
        nonlocal fault, steps
        fault, steps = next(of_trials, ""), 0
        return run(*args)

    def count_step(*args: Any) -> None:
        nonlocal steps
        steps += 1
        apply_gradients(*args)

    def loss_with_fault(*args: Any) -> Any:
        if fault and steps >= AFTER_STEPS:
            Path("fault").touch()
            return FAULTS[fault]() * compute(*args)
        return compute(*args)

    TrialRun.run = run_with_fault  # type: ignore[method-assign]
    loop.apply_gradients = count_step
    MultitaskLoss.__call__ = loss_with_fault  # type: ignore[method-assign]
    distributed.TIMEOUT = timedelta(seconds=15)
    sys.argv = ["hpo", *command]
    hpo()


if __name__ == "__main__":
    main(*sys.argv[1:])
