"""A study from its file to its last trial: made once it is known to work, then run here.

Data, tokenizer, model and a batch through all heads are tried before anything is written, so what is wrong
with them leaves no study behind that the mended file would not fit.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.config.study_config import StudyConfig
from hpo.device import CUDA_CONTEXT_BYTES, DeviceInfo, cuda_devices, memory_limit, memory_share, probe_device
from hpo.errors import InputError, NoDatabaseError, StudyChangedError
from hpo.memory import gc_frozen_imports, release_free_memory
from hpo.precision.table import left_out
from hpo.study.database import check_folder
from hpo.study.processes import (
    WORKERS_ON_DEVICE,
    check_memory_fraction,
    place_workers,
    run_workers,
    stop_on_signals,
)
from hpo.study.storage import Storage, open_storage, refuse_changes
from hpo.study.study_record import StudyRecord
from hpo.study.worker import RunSummary, keep_best_checkpoints, run_worker, trial_runner

if TYPE_CHECKING:
    from hpo.trial.executor import Executor

_logger = logging.getLogger(__name__)


class LateCache:
    """The compatibility cache of a database that is opened after the executor was made: see `open_study`."""

    def __init__(self) -> None:
        self._storage: Storage | None = None

    def open(self, storage: Storage) -> None:
        """Keep results in `storage` from now on."""
        self._storage = storage

    def get_compat(self, key: str) -> Mapping[str, Any] | None:
        """Return the stored result, if there is one."""
        return None if self._storage is None else self._storage.get_compat(key)

    def put_compat(self, key: str, result: Mapping[str, Any]) -> Mapping[str, Any]:
        """Store a result unless another worker was first; return the one that is stored."""
        return result if self._storage is None else self._storage.put_compat(key, result)


@dataclass(frozen=True)
class OpenStudy:
    """A study in its database that can be run on this machine."""

    config: StudyConfig
    """With `n_trials` as stored."""
    storage: Storage
    record: StudyRecord
    """What is stored before anything of it runs here."""
    left_out: Mapping[str, str]
    """Precisions of the study that no trial draws on this device, with the reason."""
    replaced: bool
    """Whether another definition of the study, of which no trial had trained, was stored before."""
    executor: Executor | None
    """With which the study was checked, if it was."""


@contextmanager
def open_study(
    config: StudyConfig, url: str, runs_dir: Path, *, resize: bool = True, keep_executor: bool = True
) -> Iterator[OpenStudy]:
    """Open the study of `config` in the database at `url`; both are made where they are missing.

    A study of which no trial has trained is checked first (`Executor.check_study`); the processes of
    `run_workers` leave that to their parent.

    Args:
        resize: False for a worker that joins: the stored `n_trials` stays as it is.
        keep_executor: False where trials run in other processes, which need its memory.

    Raises:
        StudyChangedError: the stored study has another search space or definition.
        InputError: the data, the model, the objective or every precision cannot be used here.
    """
    stored = _read_stored(config.name, url)
    replaced = stored is not None and not _is_same(config, stored)
    if stored is not None and replaced and _has_trained(stored):
        refuse_changes(config.name, stored.definition, _definition(config))
    executor, unused, cache = None, {}, LateCache()
    if stored is None or stored.slots["done"] < (config.n_trials if resize else sum(stored.slots.values())):
        device = probe_device(config.device)
        unused = check_precisions(config, device)
        if WORKERS_ON_DEVICE not in os.environ and (stored is None or not _has_trained(stored)):
            executor = build_executor(config, device, runs_dir, cache)
            executor.check_study()
            if not keep_executor:
                executor = None
                release_free_memory(device)
    with open_storage(url) as storage:
        cache.open(storage)
        storage.create_or_resume_study(config, resize=resize)
        record = storage.read_study(config.name)
        config = config.model_copy(update={"n_trials": sum(record.slots.values())})
        yield OpenStudy(config, storage, record, unused, replaced, executor)


def _read_stored(name: str, url: str) -> StudyRecord | None:
    try:
        with open_storage(url, create=False) as storage:
            return storage.read_study(name) if storage.has_study(name) else None
    except NoDatabaseError:
        check_folder(url)
        return None


def _definition(config: StudyConfig) -> dict[str, Any]:
    return dict(json.loads(json.dumps(config.definition())))


def _is_same(config: StudyConfig, stored: StudyRecord) -> bool:
    try:
        refuse_changes(config.name, stored.definition, _definition(config))
    except StudyChangedError:
        return False
    return True


def _has_trained(record: StudyRecord) -> bool:
    return any(trial.evaluations or trial.values for trial in record.trials)


def check_precisions(config: StudyConfig, device: DeviceInfo) -> dict[str, str]:
    """Return which of the study's precisions are not run on `device`, with the reason.

    Raises InputError when that is all of them, unless `amp.on_unsupported` is `fallback`.
    """
    skip = config.amp.model_copy(update={"on_unsupported": "skip"})
    lacking = left_out(config.precisions, device, skip)
    if lacking and len(lacking) == len(config.precisions) and config.amp.on_unsupported != "fallback":
        raise InputError(
            "fp_precision: this device must be able to run a precision of the study, but it runs none of "
            f"{', '.join(lacking)}. {' '.join(dict.fromkeys(lacking.values()))} Choose another precision, or "
            "set `amp.on_unsupported: fallback` to run the nearest that works, or `amp.allow_emulated: true` "
            "where it is emulated."
        )
    return left_out(config.precisions, device, config.amp)


def build_executor(
    config: StudyConfig, device: DeviceInfo, runs_dir: Path, cache: LateCache | Storage | None = None
) -> Executor:
    """Read the data, and return what runs the study's trials in this process.

    Raises InputError as `Executor` does.
    """
    with nullcontext() if "hpo.trial.executor" in sys.modules else gc_frozen_imports():
        from hpo.trial.executor import Executor

    _logger.info("reading the data of the study %s", config.name)
    num_on_device = int(os.environ.get(WORKERS_ON_DEVICE, "1"))
    shared = share_memory(config, device, num_on_device)
    return Executor(shared, device, runs_dir, cache, shared_device=num_on_device > 1)


def run_study(
    config: StudyConfig,
    storage: Storage,
    runs_dir: Path,
    *,
    workers: int = 1,
    workers_per_device: int | None = None,
    executor: Executor | None = None,
    stop: threading.Event | None = None,
) -> RunSummary:
    """Run the study's trials on this machine until its budget is used up or `stop` is set.

    Args:
        workers: more than one are processes of their own, `hpo worker STUDY`, spread over the GPUs of this
            machine in turn.
        workers_per_device: so many for each GPU of this machine, or on its CPU, in place of `workers`.
        executor: of `build_executor`, which is called where none is given.
        stop: from `stop_on_signals`, which is used where none is given.

    Raises:
        StudyChangedError: the stored study has another search space or definition, or had other data.
        InputError: the data, the model or the objective cannot be used, or the workers of one GPU may take
            more than its memory.
        RunError: the workers ended before the study did.
    """
    storage.create_or_resume_study(config, resize=False)
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
            return run_workers(config, storage, runs_dir, places, stop=stop)
        if executor is None:
            executor = build_executor(config, probe_device(config.device), runs_dir, storage)
        storage.bind_data(config.name, executor.dataset.fingerprint)
        study = storage.load_study(config.name)
        folder = partial(executor.trial_folder, storage.study_token(config.name))
        return run_worker(
            config,
            storage,
            trial_runner(executor, storage, stop),
            device=executor.device.device_id,
            memory_bytes=memory_limit(executor.device, executor.amp.memory_fraction),
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
