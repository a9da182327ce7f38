"""A study from its first trial to its last, in this process or in several."""

from __future__ import annotations

import math
import os
import sys
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from hpo.config.study_config import StudyConfig
from hpo.device import CUDA_CONTEXT_BYTES, DeviceInfo, cuda_devices, memory_limit, memory_share, probe_device
from hpo.errors import InputError
from hpo.memory import gc_frozen_imports
from hpo.study.processes import (
    WORKERS_ON_DEVICE,
    check_memory_fraction,
    place_workers,
    run_workers,
    stop_on_signals,
)
from hpo.study.storage import Storage
from hpo.study.worker import OnEvent, RunSummary, keep_best_checkpoints, run_worker, trial_runner


def run_study(
    config: StudyConfig,
    storage: Storage,
    runs_dir: Path,
    *,
    workers: int = 1,
    workers_per_device: int | None = None,
    worker_number: int = 0,
    resize: bool = True,
    study_name: str = "",
    on_event: OnEvent | None = None,
    stop: threading.Event | None = None,
) -> RunSummary:
    """Run the study's trials on this machine until its budget is used up or `stop` is set.

    Args:
        workers: more than one are processes of their own, `hpo worker STUDY`, spread over the GPUs of this
            machine in turn.
        workers_per_device: so many for each GPU of this machine, or on its CPU, in place of `workers`.
        worker_number: of this worker, for the sampler's seed.
        resize: False for a worker that joins: the stored `n_trials` stays as it is.
        study_name: STUDY as the user named it, for the processes.
        stop: from `stop_on_signals`, which is used where none is given.

    Raises:
        StudyChangedError: the stored study has another search space or definition, or had other data.
        InputError: the data, the model or the objective cannot be used, or the workers of one GPU may take
            more than its memory.
        RunError: the workers ended before the study did.
    """
    storage.create_or_resume_study(config, resize=resize)
    config = storage.completed(config)
    counts = storage.slot_counts(config.name)
    if not counts["open"] and not counts["running"]:
        return RunSummary("finished")
    with nullcontext(stop) if stop else stop_on_signals() as stop:
        if workers > 1 or workers_per_device is not None:
            devices = cuda_devices(config.device)
            if workers_per_device is not None:
                workers = workers_per_device * max(1, len(devices))
            places = place_workers(workers, devices)
            if devices:
                check_memory_fraction(config.amp.memory_fraction, places)
        if workers > 1:
            return run_workers(
                config, storage, runs_dir, places, study_name=study_name, on_event=on_event, stop=stop
            )
        with nullcontext() if "hpo.trial.executor" in sys.modules else gc_frozen_imports():
            import torch

            from hpo.trial.executor import Executor

        if config.device != "cpu" and (num_devices := torch.cuda.device_count()) > 1:
            torch.cuda.set_device(worker_number % num_devices)
        num_on_device = int(os.environ.get(WORKERS_ON_DEVICE, "1"))
        device = probe_device(config.device)
        executor = Executor(
            share_memory(config, device, num_on_device),
            device,
            runs_dir,
            storage,
            shared_device=num_on_device > 1,
        )
        storage.bind_data(config.name, executor.dataset.fingerprint)
        study = storage.load_study(config.name)
        folder = partial(executor.trial_folder, storage.study_token(config.name))
        return run_worker(
            config,
            storage,
            trial_runner(executor, storage, stop, on_event),
            worker_number=worker_number,
            device=device.device_id,
            memory_bytes=memory_limit(device, executor.amp.memory_fraction),
            on_event=on_event,
            stop=stop,
            after_trial=lambda: keep_best_checkpoints(study, folder, config.checkpoint.top_k),
        )


def share_memory(config: StudyConfig, device: DeviceInfo, num_workers: int) -> StudyConfig:
    """Bound a worker to its share of a GPU's memory, or to what the study says that it may take.

    Raises InputError where the workers and their CUDA contexts may together take more than there is.
    """
    if device.type != "cuda" or num_workers == 1:
        return config
    share = memory_share(device, num_workers)
    given = config.amp.memory_fraction
    if given is None:
        amp = config.amp.model_copy(update={"memory_fraction": share})
        return config.model_copy(update={"amp": amp})
    if given > share:
        raise InputError(
            f"amp.memory_fraction must be <= {math.floor(share * 1e4) / 1e4:g} for {num_workers} workers on "
            f"one {device.name}, where each needs {CUDA_CONTEXT_BYTES / 2**30:g} GiB more for its CUDA "
            f"context, but got {given:g}. Lower it, run fewer workers, or leave it out: each worker then "
            f"gets its share."
        )
    return config
