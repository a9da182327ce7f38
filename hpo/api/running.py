"""Trials on this machine: in this process, in several, or in the ranks of torchrun."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpo.api.opening import RUNS, TORCHRUN, check_workers, file_given
from hpo.api.progress import shown
from hpo.config.study_config import StudyConfig
from hpo.study.reading.reader import read_study
from hpo.study.running.run import OpenOptions, open_study, run_study
from hpo.study.running.stopping import Stop
from hpo.study.running.supervisor import WorkerProcesses, share_devices
from hpo.study.running.worker import RunSummary
from hpo.study.store.database import storage_url
from hpo.track.beside import tracked

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpo.study.reading.study_record import StudyRecord


@dataclass(frozen=True, kw_only=True)
class RunResult(RunSummary):
    """What a run on this machine was."""

    record: StudyRecord = field(repr=False)
    left_out: Mapping[str, str]
    """Precisions of the study that no trial drew here, with the reason."""


def worker_processes(
    config: StudyConfig, storage: str | None, workers: int | None = None, per_device: int | None = None
) -> WorkerProcesses:
    """The processes that run a study's trials, see `share_devices`. Raises InputError for contradictions."""
    check_workers(workers, per_device)
    return WorkerProcesses(share_devices(config, workers, per_device), storage_as_given=file_given(storage))


@contextmanager
def ranks_of_torchrun() -> Iterator[None]:
    """Connect the processes of torchrun, which train each trial together, if it started this one.

    The first of them runs the block. The others follow it until it leaves, and exit then.
    """
    if TORCHRUN not in os.environ:
        yield
        return
    from hpo.training.distributed import connected_ranks, rank
    from hpo.trial.executor import follow

    with connected_ranks():
        if rank():
            logging.getLogger("hpo").setLevel(logging.ERROR)  # the first one says it
            follow(RUNS)
            raise SystemExit
        yield


def run_here(
    config: StudyConfig, processes: WorkerProcesses, stop: Stop, storage: str | None, *, quiet: bool
) -> RunResult:
    """Make or resume a study of a study file and run its trials on this machine, as `run_study` does.

    Without `processes.shares` they run in this process. `quiet` shows no progress.
    """
    options = OpenOptions(trials_run="in workers" if processes.shares else "in this process", is_file=True)
    with open_study(config, storage_url(storage), RUNS, options) as opened:
        url = processes.storage_as_given or opened.storage.url
        with tracked(config.name, config.tracker, url, RUNS), shown(opened, quiet=quiet):
            summary = run_study(opened, processes, stop=stop)
        record = read_study(opened.storage, config.name)
        return RunResult(**vars(summary), record=record, left_out=opened.left_out)
