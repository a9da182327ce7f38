"""Opening a study: read or make it in its database, once it is known to work.

Data, tokenizer, model and a batch through all heads are tried before anything is written. A fault in them
leaves no study behind, so the corrected file finds none that differs from it.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hpo.code import use_code
from hpo.config.allowed import check_allowed, paths_of
from hpo.config.limits import check_energy
from hpo.config.resolved_study import ResolvedStudy, resolve_study
from hpo.config.search_space import choices_without
from hpo.config.study_config import StudyConfig, stored_study
from hpo.device import EnergyCounter, probe_device
from hpo.errors import InputError, NoDatabaseError, StorageError
from hpo.memory import release_free_memory
from hpo.precision.table import BASE_PRECISION, PRECISION, lacking_choices
from hpo.study.checkpoints.remote_store import open_remote_store
from hpo.study.running.stopping import WORKERS_ON_DEVICE, Stop
from hpo.study.running.supervisor import share_memory
from hpo.study.sampling.samplers import check_named
from hpo.study.store.database import check_folder
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import StudyEntry, create_or_resume_study, read_stored
from hpo.training.distributed import world_size
from hpo.trial.executor import Executor, build_executor
from hpo.trial.parts import fit_pruner

TrialsRun = Literal["in this process", "in workers", "elsewhere"]
"""Processes of the trials of an open study; `in workers`: in the processes of `run_workers`."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenStudy:
    config: StudyConfig  # with `n_trials` as stored
    storage: Storage
    runs_dir: Path
    stored: StudyEntry  # before anything of it runs here
    lacking: Mapping[str, str]
    """Precisions of the study without support on this device, with the reason; {} for a finished study."""
    executor: Executor | None
    """Runs trials in this process; None if they run in others, or the study is finished or not open."""

    @property
    def left_out(self) -> Mapping[str, str]:
        """The precisions of `lacking`, unless trials draw them here all the same."""
        return self.lacking if self.config.amp.on_unsupported == "skip" else {}


@dataclass(frozen=True)
class OpenOptions:
    resize: bool = True  # false for a joining worker: the stored `n_trials` stays
    trials_run: TrialsRun = "in this process"
    is_file: bool = False
    """True if the study is from the user's file, and not from the database (`check_trust`)."""
    trust_remote_code: bool = False
    stop: Stop | None = None  # A worker's stop: it waits during an outage of the database


@contextmanager
def open_study(
    config: StudyConfig, url: str, runs_dir: Path, options: OpenOptions = OpenOptions()
) -> Iterator[OpenStudy]:
    """Open the study of `config` in the database at `url`. Both are made if they are missing.

    A study is checked first (`Executor.check_study`) until one of its trials has trained. A paused or
    cancelled study is neither checked nor changed. Raises StudyChangedError for another search space or
    definition, InputError if this machine cannot run the study or its code is not trusted.
    """
    resize, trials_run = options.resize, options.trials_run
    user_study = config if options.is_file else None
    with ExitStack() as databases:
        storage = _open_existing(url, options.stop)
        stored = None
        if storage is not None:
            stored = read_stored(databases.enter_context(storage), config.name)
        if storage is not None and stored is not None:
            config = config.resumed(stored.definition)
            if stored.state != "open":
                yield OpenStudy(config, storage, runs_dir, stored, {}, None)
                return
        check_trust(config, user_study, options.trust_remote_code)
        check_named(config, user_study)
        trains_here = trials_run == "in this process"
        executor: Executor | None = None
        lacking: Mapping[str, str] = {}
        num_trials = config.num_trials if resize or stored is None else sum(stored.counts.values())
        if stored is None or stored.counts["done"] < num_trials:
            resolved, lacking = _resolve_here(config, trials_run)
            must_check = not (stored and stored.has_trained) and WORKERS_ON_DEVICE not in os.environ
            if trains_here or must_check:
                executor = _build_executor(resolved, runs_dir, checks_values=must_check)
                if stored is None:
                    config = _fit_pruner(executor)
                if must_check:
                    executor.check_study()
            if not trains_here:
                executor = None
                release_free_memory(resolved.device)
        before = stored.definition.get("checkpoint", {}).get("location") if stored else None
        if stored is None or (resize and before != config.checkpoint.location):
            open_remote_store(config.checkpoint, create=True)
        if storage is None:
            storage = databases.enter_context(open_storage(url, stop=options.stop))
        create_or_resume_study(storage, config, resize=resize)
        made = read_stored(storage, config.name)
        if made is None:
            raise StorageError(f"The study `{config.name}` was deleted while it was opened.")
        config = config.with_values(n_trials=sum(made.counts.values()))
        if trains_here and made.counts["done"] < config.n_trials:
            if executor is None:  # it was finished, and somebody raised `n_trials` meanwhile
                resolved, lacking = _resolve_here(config, trials_run)
                executor = _build_executor(resolved, runs_dir, checks_values=False)
            executor.cache = storage
        yield OpenStudy(config, storage, runs_dir, made, lacking, executor)


def check_trust(config: StudyConfig, user_study: StudyConfig | None, trust_remote_code: bool) -> None:
    """Raise InputError if a study of the database lacks a permission of this machine's user.

    Permissions concern its code, the code of its encoder, and folders to read and write. `user_study`, the
    study in the user's own file, gives permissions.
    """
    check_allowed(config.name, paths_of(config), paths_of(user_study) if user_study else {})
    if user_study is not None:
        trust_remote_code = trust_remote_code or user_study.model.trust_remote_code
    if config.model.trust_remote_code and not trust_remote_code:
        raise InputError(
            f"The study `{config.name}` of the database runs the code that comes with its encoder "
            "(`model.trust_remote_code: true`). Anybody who writes to the database can change that. Read the "
            "code, then give the option --trust-remote-code (`trust_remote_code=True` of hpo.Study), or the "
            "study's own file."
        )
    use_code(config.code, f"The study `{config.name}` of the database")
    if config.code:
        stored_study(config.name, config.definition())  # its names, as they are known now


def _open_existing(url: str, stop: Stop | None) -> Storage | None:
    try:
        return open_storage(url, create=False, stop=stop)
    except NoDatabaseError:
        check_folder(url)
        return None


def _resolve_here(config: StudyConfig, trials_run: TrialsRun) -> tuple[ResolvedStudy, dict[str, str]]:
    """Resolve the study for this machine's device, or for a CPU if the trials run elsewhere; check
    precisions.
    """
    try:
        device = probe_device(config.device)
        resolved = resolve_study(config, device)
        lacking = check_precisions(resolved)
        counter = EnergyCounter(device, shared=_num_on_device() > 1, num_ranks=world_size())
        check_energy(config.named_metrics, counter)
        return resolved, lacking
    except InputError as error:
        if trials_run != "elsewhere":
            raise
        _logger.warning("No trial can run on this machine: %s", error)
        return resolve_study(config, probe_device("cpu")), {}


def check_precisions(study: ResolvedStudy) -> dict[str, str]:
    """Return the study's precisions without support on its device, by `choice_name`, with the reasons.

    Raises InputError if it supports none, unless `amp.on_unsupported` is `fallback`.
    """
    config, device, precisions = study.config, study.device, study.precisions
    lacking = lacking_choices({PRECISION: precisions}, device, config.amp)
    if len(lacking) == len(precisions) and config.amp.on_unsupported != "fallback":
        raise InputError(
            "fp_precision: this device must be able to run a precision of the study, but it runs none of "
            f"{', '.join(lacking)}. {' '.join(dict.fromkeys(lacking.values()))} Choose another precision, or "
            "set `amp.on_unsupported: fallback` to run the nearest that works, or `amp.allow_emulated: true` "
            "where it is emulated."
        )
    searched = config.search_space.get(BASE_PRECISION)
    bases = searched.grid() if searched else (config.training.base_precision,)
    no_base = lacking_choices({BASE_PRECISION: bases}, device, config.amp)
    if len(no_base) == len(bases) and not (searched and choices_without(config.search_space, searched)):
        raise InputError(" ".join(dict.fromkeys(no_base.values())))
    return lacking | no_base


def _build_executor(resolved: ResolvedStudy, runs_dir: Path, *, checks_values: bool) -> Executor:
    amp = share_memory(resolved.amp, resolved.device, _num_on_device())
    return build_executor(replace(resolved, amp=amp), runs_dir, checks_values=checks_values)


def _fit_pruner(executor: Executor) -> StudyConfig:
    config, reason = fit_pruner(executor.study, executor.dataset)
    executor.resolved = replace(executor.resolved, config=config)
    _logger.info("pruner %s: %s.", config.pruner.name, reason)
    return config


def _num_on_device() -> int:
    return int(os.environ.get(WORKERS_ON_DEVICE, "1"))
