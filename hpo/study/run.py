"""A study from its file to its last trial: made once it is known to work, then run here.

Data, tokenizer, model and a batch through all heads are tried before anything is written, so what is wrong
with them leaves no study behind that the mended file would not fit.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hpo.config.study_config import StudyConfig, of_deployed
from hpo.device import (
    CUDA_CONTEXT_BYTES,
    DeviceInfo,
    cuda_devices,
    memory_limit,
    memory_share,
    probe_device,
)
from hpo.errors import InputError, NoDatabaseError, StudyChangedError
from hpo.memory import gc_frozen_imports, release_free_memory
from hpo.precision.table import apply_preset, left_out
from hpo.study.artifact_store import open_artifact_store
from hpo.study.checkpoint_artifacts import FINISH_SECONDS, LEAVE_SECONDS, drop_artifacts
from hpo.study.checkpoint_folders import note_database
from hpo.study.database import check_folder
from hpo.study.deaths import last_saved_step
from hpo.study.device_sampler import WorkerDevice
from hpo.study.final_evaluation import evaluate_best
from hpo.study.stopping import WORKERS_ON_DEVICE, Stop
from hpo.study.storage import Storage, open_storage
from hpo.study.study_record import StudyRecord
from hpo.study.supervisor import WorkerPlace, place_workers, run_workers
from hpo.study.time_left import TimeLeft
from hpo.study.worker import STAYS, RunSummary, Stint, keep_best_checkpoints, run_worker, trial_runner

if TYPE_CHECKING:
    from hpo.training.distributed import Ranks
    from hpo.trial.executor import Executor

TrialsRun = Literal["in this process", "in workers", "elsewhere"]
"""Where the trials of an open study run; `in workers`: in processes that this one starts (`run_workers`)."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenStudy:
    """A study in its database."""

    config: StudyConfig
    """With `n_trials` as stored."""
    storage: Storage
    runs_dir: Path
    record: StudyRecord
    """What is stored before anything of it runs here."""
    lacking: Mapping[str, str]
    """Precisions of the study that this device does not run, with the reason; {} for a finished study."""
    executor: Executor | None
    """Runs trials in this process; None where they run in others, and for a study that is finished, or not
    open."""
    trust_remote_code: bool = False
    """Whether the code that comes with the study's encoder may run here."""
    data_advice: Sequence[str] = ()
    """What is grave in the data of a study of which no trial has trained."""

    @property
    def left_out(self) -> Mapping[str, str]:
        """Those of `lacking` that no trial draws here."""
        return self.lacking if self.config.amp.on_unsupported == "skip" else {}


@contextmanager
def open_study(
    config: StudyConfig,
    url: str,
    runs_dir: Path,
    *,
    resize: bool = True,
    trials_run: TrialsRun = "in this process",
    trust_remote_code: bool = False,
    ranks: Ranks | None = None,
    stop: Stop | None = None,
) -> Iterator[OpenStudy]:
    """Open the study of `config` in the database at `url`; both are made where they are missing.

    A study of which no trial has trained is checked first (`Executor.check_study`), but not by the processes
    of `run_workers`, whose parent has done so. Of one that is paused or cancelled nothing is checked or
    changed.

    Args:
        resize: False for a worker that joins: the stored `n_trials` stays as it is.
        trust_remote_code: whether the code that comes with the study's encoder may run here. The database
            does not decide that: a user's own study file does, or an option.
        ranks: the processes of torchrun that train each trial together, of which this is the first.
        stop: of a worker: it waits for a database that is away.

    Raises:
        StudyChangedError: the stored study has another search space or definition.
        InputError: the data, the model or the objective cannot be used, or trials are to run on this machine
            and it has no precision of the study, or its code is not trusted.
    """
    stored = _read_stored(config.name, url, stop)
    if stored is not None and stored.state != "open":
        with open_storage(url, stop=stop) as storage:
            yield OpenStudy(config.completed(stored.definition), storage, runs_dir, stored, {}, None)
        return
    has_trained = stored is not None and any(trial.evaluations or trial.values for trial in stored.trials)
    if stored is not None:
        try:  # with the defaults that it was made with
            config = config.completed(stored.definition)
        except StudyChangedError:
            if has_trained or not resize:
                raise
    check_trust(config, trust_remote_code)
    trains_here = trials_run == "in this process"
    executor: Executor | None = None
    data_advice: Sequence[str] = ()
    lacking: Mapping[str, str] = {}
    if stored is None or stored.slots["done"] < (config.num_slots if resize else sum(stored.slots.values())):
        device, lacking = _check_device(config, trials_run)
        must_check = not has_trained and WORKERS_ON_DEVICE not in os.environ
        if trains_here or must_check:
            executor = _build_executor(config, device, runs_dir, ranks)
            if must_check:
                if of_deployed(config.objective):
                    from hpo.deploy.objective import check_export

                    executor.check_study(partial(check_export, executor))
                else:
                    executor.check_study()
                from hpo.data.advice import brief_advice  # imports NumPy, as the executor has by now

                data_advice = brief_advice(executor.dataset, executor.known_tokens(), config)
        if not trains_here:
            executor = None
            release_free_memory(device)
    if resize and (stored is None or _location(stored) != config.checkpoint.location):
        open_artifact_store(config.checkpoint, create=True)
    with open_storage(url, stop=stop) as storage:
        storage.create_or_resume_study(config, resize=resize)
        record = storage.read_study(config.name)
        config = config.with_values(n_trials=sum(record.slots.values()))
        if trains_here and record.slots["done"] < config.n_trials:
            if executor is None:  # it was finished, and somebody raised `n_trials` meanwhile
                device, lacking = _check_device(config, trials_run)
                executor = _build_executor(config, device, runs_dir, ranks)
            executor.cache = storage
        yield OpenStudy(config, storage, runs_dir, record, lacking, executor, trust_remote_code, data_advice)


def check_trust(config: StudyConfig, trust_remote_code: bool) -> None:
    """Raise InputError where the study runs code that comes with its encoder and that is not trusted."""
    if config.model.trust_remote_code and not trust_remote_code:
        raise InputError(
            f"The study `{config.name}` of the database asks to run the code that comes with its encoder "
            "(`model.trust_remote_code: true`), which whoever can write to the database can change. Read "
            "that code, then give the option --trust-remote-code, or the study's own file."
        )


def _location(stored: StudyRecord) -> str | None:
    """Where the checkpoints of a stored study are."""
    checkpoint: Mapping[str, str | None] = stored.definition.get("checkpoint", {})
    return checkpoint.get("location")


def _read_stored(name: str, url: str, stop: Stop | None) -> StudyRecord | None:
    try:
        with open_storage(url, create=False, stop=stop) as storage:
            return storage.read_study(name) if storage.has_study(name) else None
    except NoDatabaseError:
        check_folder(url)
        return None


def _check_device(config: StudyConfig, trials_run: TrialsRun) -> tuple[DeviceInfo, dict[str, str]]:
    """Return this machine's device and what `check_precisions` says of it.

    Where the trials run elsewhere, a device that is not there is no error: the study is checked on the CPU.
    """
    try:
        device = probe_device(config.device)
        return device, check_precisions(config, device)
    except InputError as error:
        if trials_run != "elsewhere":
            raise
        _logger.warning("No trial can run on this machine: %s", error)
        return probe_device("cpu"), {}


def check_precisions(config: StudyConfig, device: DeviceInfo) -> dict[str, str]:
    """Return which of the study's precisions `device` does not run, with the reason.

    Raises InputError when it can run none of them, unless `amp.on_unsupported` is `fallback`.
    """
    precisions = config.precisions or apply_preset(config.amp, device)[1:]
    lacking = left_out(precisions, device, config.amp)
    if len(lacking) == len(precisions) and config.amp.on_unsupported != "fallback":
        raise InputError(
            "fp_precision: this device must be able to run a precision of the study, but it runs none of "
            f"{', '.join(lacking)}. {' '.join(dict.fromkeys(lacking.values()))} Choose another precision, or "
            "set `amp.on_unsupported: fallback` to run the nearest that works, or `amp.allow_emulated: true` "
            "where it is emulated."
        )
    return lacking


def _build_executor(config: StudyConfig, device: DeviceInfo, runs_dir: Path, ranks: Ranks | None) -> Executor:
    with nullcontext() if "hpo.trial.executor" in sys.modules else gc_frozen_imports():
        from hpo.trial.executor import Executor

    executor = Executor(share_memory(config, device, _num_on_device()), device, runs_dir)
    if ranks is not None:
        executor.ranks = ranks
    return executor


def _num_on_device() -> int:
    """How many processes of this run, this one included, have this one's device."""
    return int(os.environ.get(WORKERS_ON_DEVICE, "1"))


def plan_workers(
    config: StudyConfig | None, workers: int, per_device: int | None = None
) -> list[WorkerPlace]:
    """Where each worker of a run on this machine is, in a process of its own; none: one in this process.

    Args:
        config: of the study; None for workers that serve all studies of a database.
        workers: how many, spread over the GPUs of this machine in turn; 1 is this process.
        per_device: so many for each GPU of this machine, or on its CPU, in place of `workers`; all of them
            are processes of their own.

    Raises InputError where the workers of one GPU and their contexts may take more than its memory: a trial
    that found none because of its neighbour would be stored as one that does not fit.
    """
    if workers == 1 and per_device is None:
        return []
    devices = cuda_devices(config.device if config else "auto")
    places = place_workers(workers if per_device is None else per_device * max(1, len(devices)), devices)
    if devices and config:
        most = max(place.workers_on_device for place in places)
        share_memory(config, probe_device(config.device), most)
    return places


def run_study(
    study: OpenStudy,
    places: Sequence[WorkerPlace] = (),
    *,
    stop: Stop | None = None,
    stint: Stint = STAYS,
    max_restarts: int = 0,
    storage_as_given: str | None = None,
) -> RunSummary:
    """Run the study's trials on this machine until its budget is used up or `stop` is set.

    Where the study is not open, or is paused or cancelled meanwhile, it `ended` as `halted`. After its last
    trial the best one is evaluated in detail (`evaluate_best`).

    Args:
        places: of `plan_workers`, where the trials run in processes of their own, `hpo worker STUDY`.
        stop: from `stop_on_signals`.
        stint: of a worker that serves other studies too.
        max_restarts: how often the worker of a place that dies is started again within an hour.
        storage_as_given: what the workers of `places` find the storage by (`run_workers`).

    Raises:
        StudyChangedError: the study had other data.
        InputError: the data cannot be used.
        RunError: the workers ended before the study did.
    """
    config, storage, executor = study.config, study.storage, study.executor
    stop = stop or Stop()
    if study.record.state != "open":
        return RunSummary("halted")
    if study.record.slots["done"] == config.n_trials:
        return RunSummary("finished")
    if executor is None:
        trust = ["--trust-remote-code"] if study.trust_remote_code else []
        summary = run_workers(
            config,
            storage,
            study.runs_dir,
            places,
            stop=stop,
            max_restarts=max_restarts,
            options=trust,
            storage_as_given=storage_as_given,
        )
        if summary.ended != "elsewhere":
            return summary
        return replace(summary, elsewhere=tuple(study.left_out) or config.precisions)
    from hpo.trial.compat import checked_on  # PyTorch, which a launcher does without

    storage.bind_data(config.name, executor.dataset.fingerprint)
    stored = storage.load_study(config.name)
    folder = partial(executor.trial_folder, storage.study_token(config.name))
    note_database(folder(0).parent, storage)
    artifacts = open_artifact_store(config.checkpoint)
    drop = partial(drop_artifacts, artifacts, storage, config.name) if artifacts else lambda _: None
    memory_bytes = memory_limit(executor.device, executor.amp.memory_fraction)
    time_left = TimeLeft(storage, config.name, stop)
    summary = run_worker(
        config,
        storage,
        trial_runner(
            executor, storage, stop, time_left, shared_device=_num_on_device() > 1, artifacts=artifacts
        ),
        device=WorkerDevice(
            executor.device.device_id,
            memory_bytes,
            study.lacking,
            executor.device.kind,
            checked_on(executor.device),
        ),
        stop=stop,
        saved_step=lambda number: last_saved_step(folder(number)),
        after_trial=lambda: keep_best_checkpoints(stored, folder, config.checkpoint.top_k, drop),
        stint=replace(stint, has_time=time_left.suffices),
    )
    if artifacts is not None:
        artifacts.settle(LEAVE_SECONDS if stop.is_set() else FINISH_SECONDS)
    if summary.ended in ("finished", "yielded") and config.comparison is None:
        evaluate_best(executor, storage, folder, stop, artifacts)
    return summary


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
