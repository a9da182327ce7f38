"""What can go wrong in one of several processes that train together; as a program, `hpo` with such a fault.

    torchrun ... tests/rank_faults.py FAULT,FAULT RANK COMMAND ...

The n-th fault is at work in the n-th trial of that rank, and leaves a file `fault` in the working folder.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import torch

from hpo.precision.amp import MixedPrecision
from hpo.training import evaluate, loop
from hpo.training.distributed import ConnectedRanks
from hpo.training.loop import TrainState
from hpo.training.losses import MultitaskLoss

AFTER_STEPS = 3
"""The steps that a trial makes before its fault."""


def fail() -> NoReturn:
    raise ValueError("a bug")


def run_out_of_memory() -> NoReturn:
    raise torch.OutOfMemoryError("no memory is left")


def run_out_of_memory_once_and_then_fail() -> NoReturn:
    """Here, and where all begin the step again with half the micro-batch."""
    start_step = MixedPrecision.start_step

    def fail_once(_: MixedPrecision) -> NoReturn:
        MixedPrecision.start_step = start_step  # type: ignore[method-assign]
        fail()

    MixedPrecision.start_step = fail_once  # type: ignore[method-assign]
    run_out_of_memory()


FAULTS: dict[str, tuple[str, Callable[[], object]]] = {
    "raises": ("step", fail),
    "killed": ("step", lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "stopped": ("step", lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    "hangs": ("step", lambda: threading.Event().wait()),
    "memory": ("loss", run_out_of_memory),
    "raises in the sum": ("sum", fail),
    "memory in the sum": ("sum", run_out_of_memory),
    "raises in the retry": ("loss", run_out_of_memory_once_and_then_fail),
    "raises in an evaluation": ("evaluation", fail),
    "memory in the update": ("update", run_out_of_memory),
    "nan": ("loss", lambda: torch.nan),
}
"""Where in a step, and what. From then on it happens every time; a number is a factor of the loss."""


def install(fault: Callable[[], str], on_fault: Callable[[], object] = lambda: None) -> None:
    """Let that fault of `FAULTS` happen in this process that `fault` returns; empty: none."""
    step = 0

    def with_fault(place: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal step
            if place == "step":
                step = next(arg.step for arg in args if isinstance(arg, TrainState))
            where, what = FAULTS.get(fault(), ("", fail))
            happens = where == place and (step >= AFTER_STEPS or place == "evaluation")
            ends = place in ("update", "evaluation")
            try:
                if happens:
                    on_fault()
                factor = what() if happens else None
                value = function(*args, **kwargs)
                return value if factor is None else factor * value
            except BaseException:
                ends = place not in ("loss", "sum")
                raise
            finally:
                step = 0 if ends else step  # what follows is of no step

        return called

    loop.accumulate_gradients = with_fault("step", loop.accumulate_gradients)
    loop.apply_gradients = with_fault("update", loop.apply_gradients)
    ConnectedRanks._take_buffer = with_fault("sum", ConnectedRanks._take_buffer)  # type: ignore[method-assign]
    evaluate.collate = with_fault("evaluation", evaluate.collate)
    MultitaskLoss.__call__ = with_fault("loss", MultitaskLoss.__call__)  # type: ignore[method-assign]


def main(faults: str, rank: str, *command: str) -> None:
    from hpo.cli.commands import main as hpo
    from hpo.trial.trial_run import TrialRun

    run, fault = TrialRun.run, ""
    of_trials = iter(faults.split(",") if os.environ["RANK"] == rank else ())

    def run_with_fault(*args: Any) -> Any:
        nonlocal fault
        fault = next(of_trials, "")
        return run(*args)

    TrialRun.run = run_with_fault  # type: ignore[method-assign]
    install(lambda: fault, Path("fault").touch)
    sys.argv = ["hpo", *command]
    hpo()


if __name__ == "__main__":
    main(*sys.argv[1:])
