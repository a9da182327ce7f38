"""`hpo` with a planted fault, as a program: tests/support/faulty_hpo.py FAULT COMMAND ...

held                    A file `hold-20` in the working folder lets no step after the 20th begin. With a file
                        `no-uploads`, the upload of a checkpoint makes a file `uploading` before its last
                        file, and does not end.
lost                    The process loses its CUDA context in the third step, but only the first time: it
                        leaves a file `lost`.
killed,FLAW,PLACE,AT    The encoder has this flaw (`planted_encoder`), and the process is killed at the AT-th
                        `step` of training or `judged` look.
ranks,RANK,FAULT,...    The n-th fault is at work in the n-th trial of that rank, after some steps, and leaves
                        a file `fault`.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from hpo import lost_device
from hpo.cli.commands import main
from hpo.study.checkpoints.remote_store import RemoteStore
from hpo.study.store.storage import Storage
from hpo.training import distributed, loop
from hpo.training.budget import TrainState
from hpo.training.checkpoint import FILES
from hpo.training.losses import MultitaskLoss
from hpo.trial.run import TrialRun
from support.lost_gpu import LostGpu
from support.planted_encoder import planted
from support.worker_process import killer

AFTER_STEPS = 3
"""Steps of a trial before the fault of a rank."""


def before(owner: Any, name: str, action: Callable[..., object]) -> None:
    """Call `action` with the same arguments before each call of a function."""
    function = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        action(*args)
        return function(*args, **options)

    setattr(owner, name, call)


def held() -> None:
    def wait_while_held(*args: Any) -> None:
        [state] = (arg for arg in args if isinstance(arg, TrainState))
        while any(state.step >= int(path.name.removeprefix("hold-")) for path in Path().glob("hold-*")):
            time.sleep(0.01)

    def wait_before_last_file(source: str, _target: str) -> None:
        if source.endswith(FILES[-1]) and Path("no-uploads").exists():
            Path("uploading").touch()
            threading.Event().wait()

    def hold_uploads(_store: RemoteStore, _location: str, filesystem: Any, _root: str) -> None:
        before(filesystem, "put_file", wait_before_last_file)

    before(loop, "accumulate_gradients", wait_while_held)
    before(RemoteStore, "__init__", hold_uploads)


def lost() -> None:
    if not Path("lost").exists():
        gpu = LostGpu(setattr, "step", at=3)
        lost_device.is_lost = lambda _: gpu.is_lost and (Path("lost").touch() or True)


def killed(flaw: Any, place: str, at: str) -> None:
    owner, name = {"step": (loop, "accumulate_gradients"), "judged": (Storage, "store_comparison")}[place]
    die = killer(int(at))
    before(owner, name, lambda *_: die())
    planted(flaw).start()


def raise_error() -> NoReturn:
    raise ValueError("a bug")


def hang() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # or torchrun waits for 30 s before it kills
    threading.Event().wait()


def run_out_of_memory() -> NoReturn:
    raise torch.OutOfMemoryError("CUDA out of memory.")


FAULTS: dict[str, Callable[[], Any]] = {
    "raises": raise_error,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": hang,
    "memory": run_out_of_memory,
    "nan": lambda: torch.nan,
}
"""Replacements of a loss, or factors of it."""


def ranks(rank: str, *faults: str) -> None:
    compute, now = MultitaskLoss.__call__, SimpleNamespace(fault="", steps=0)
    of_trials = iter(faults if os.environ["RANK"] == rank else ())

    def begin(*_: Any) -> None:
        now.fault, now.steps = next(of_trials, ""), 0

    def count_step(*_: Any) -> None:
        now.steps += 1

    def loss_with_fault(*args: Any) -> Any:
        if now.fault and now.steps >= AFTER_STEPS:
            Path("fault").touch()
            return FAULTS[now.fault]() * compute(*args)
        return compute(*args)

    before(TrialRun, "run", begin)
    before(loop, "apply_gradients", count_step)
    MultitaskLoss.__call__ = loss_with_fault
    distributed.TIMEOUT = timedelta(seconds=15)


if __name__ == "__main__":
    fault, *given = sys.argv.pop(1).split(",")
    {"held": held, "lost": lost, "killed": killed, "ranks": ranks}[fault](*given)
    main()
