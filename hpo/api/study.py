"""A study from Python, from notebooks, and for the commands.

    study = hpo.Study("studies/own_data.yaml")
    study.run(hours=2)
    study.trials_dataframe()

The commands about a study call its methods. Both do the same in the same database, and `hpo worker` may join.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from hpo.api import comparing, deploying, models
from hpo.api.managed import ManagedStudy
from hpo.api.opening import (
    RUNS,
    check_positive,
    check_workers,
    find_study,
    is_path,
    load_to_work,
    progress_shown,
    to_run,
)
from hpo.api.planning import plan_study
from hpo.api.running import (
    RunResult,
    WorkResult,
    ranks_of_torchrun,
    run_result,
    shown,
    trial_shown,
    work_result,
    worker_processes,
)
from hpo.cluster.batch.slurm import requeue_this_job
from hpo.compare.planning import Request
from hpo.config.choices import Question, TrackerName
from hpo.config.resolved_study import resolve_study
from hpo.config.sections import NOT_SHARED
from hpo.config.study_config import StudyConfig, stored_study
from hpo.device import probe_device
from hpo.errors import InputError, NoDatabaseError, NoStudyFileError, RunError, StoppedError
from hpo.outcome import TrialResult
from hpo.redaction import redact
from hpo.report.data_check import DataCheck, check_data
from hpo.report.plan import Plan
from hpo.report.tables import StudyTables
from hpo.report.terminal import ShownDict
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import StudyRecord
from hpo.study.running.open_study import OpenOptions, TrialsRun, check_trust, open_study
from hpo.study.running.stopping import WORKERS_ON_DEVICE, Stop, end_of_job, stop_on_signals
from hpo.study.running.supervisor import WorkerProcesses
from hpo.study.running.worker import run_study
from hpo.study.store.database import parse_url, sqlite_path, storage_url
from hpo.study.store.storage import existing_database
from hpo.track.background import track_in_background
from hpo.training.evaluate import Evaluation
from hpo.trial.diagnosis import Diagnosis
from hpo.trial.executor import Executor, build_executor
from hpo.trial.reproduction import Reproduction
from hpo.trial.telemetry import Callbacks
from hpo.trial.verify import PrecisionCheck, check_precision, verify

if TYPE_CHECKING:  # `showing` loads plotly and optuna-dashboard. A worker needs neither.
    from hpo.api.showing import Tracked
    from hpo.report.dashboard import Dashboard

_logger = logging.getLogger(__name__)


class Study(ManagedStudy):
    """A study file, or a mapping with its keys, and the study's database.

    Args:
        study: a name in `studies/`, the path of a YAML file, the name of a study in the database, or a
            mapping; paths in a mapping are relative to the working folder.
        data: frames by split, `{"train": frame, "validation": frame}`, each a pandas DataFrame or a
            `datasets.Dataset`. `study` is then a mapping, and its `data` has `tasks` and `columns` alone. The
            rows are written to `runs/_data`.
        storage: the URL of the database; None: `HPO_STORAGE`, else `sqlite:///runs/hpo.db`.
        trust_code: files or modules of this machine that a study in the database may run.
        trust_remote_code: let a study in the database run the code of its encoder.
        quiet: show no progress.

    Raises:
        InputError: the study is not valid; the message lists every problem. A name without a valid file is
            searched in the database at its first use.
    """

    def run(
        self,
        *,
        n_trials: int | None = None,
        hours: float | None = None,
        workers: int | None = None,
        workers_per_device: int | None = None,
        until: str | None = None,
        timeout: float | None = None,
    ) -> RunResult:
        """Create or resume the study, or continue the stored one of this name, until its budget is used up.

        An interrupt (Ctrl-C, or a notebook's stop) checkpoints the running trial and returns; a second one
        ends at once. Of the processes of torchrun, all but the first exit at the end.

        Args:
            n_trials: replaces the study's, in this call.
            hours: budget in device-hours, in place of a number of trials; give it again to continue.
            workers: processes on this machine, spread over its GPUs; None or 1: this one.
            workers_per_device: processes for each GPU, in place of `workers`.
            until: end of this job, like `hpo run --until`.
            timeout: seconds after which no further trial begins.

        Raises:
            InputError: data, model or device cannot be used.
            StudyChangedError: the database has another study of this name.
        """
        check_workers(workers, workers_per_device)  # before anything is made
        with self._stopping(until, timeout) as stop:
            try:
                given, is_file = self.file, True
            except NoStudyFileError:
                if is_path(self._word):
                    raise
                given, is_file = find_study(self._word, storage_url(self._storage), stop)
            config = to_run(given, n_trials, hours)
            processes = worker_processes(config, self._storage, workers, workers_per_device)
            resize = is_file or config is not given
            options = OpenOptions(resize=resize, is_file=is_file, trust_remote_code=self._trusts)
            return self._run(config, processes, stop, options)

    def _run(
        self, config: StudyConfig, processes: WorkerProcesses, stop: Stop, options: OpenOptions
    ) -> RunResult:
        """Create or resume a study and run its trials in this process, or in `processes` if there are any."""
        trials_run: TrialsRun = "in workers" if processes.shares else "in this process"
        options = replace(options, trials_run=trials_run)
        with open_study(config, storage_url(self._storage), RUNS, options) as opened:
            url = processes.storage_as_given or opened.storage.url
            with (
                track_in_background(config.name, config.tracker, url, RUNS),
                shown(opened, quiet=self.quiet),
            ):
                summary = run_study(opened, processes, stop=stop)
            storage = ("--storage", redact(self._storage)) if self._storage else ()
            return run_result(opened, summary, self._word or config.name, *storage)

    def work(
        self,
        *,
        workers: int | None = None,
        workers_per_device: int | None = None,
        until: str | None = None,
        timeout: float | None = None,
    ) -> WorkResult:
        """Join the study as one or more workers until it is done; takes the arguments of `run`.

        A name means the study in the database, if there is one.
        """
        check_workers(workers, workers_per_device)
        with self._stopping(until, timeout) as stop:
            try:
                if self._word:
                    config, is_file = load_to_work(self._word, storage_url(self._storage), stop)
                else:
                    config, is_file = to_run(self.file), True
                processes = worker_processes(config, self._storage, workers, workers_per_device)
                result = self._work(config, processes, stop, is_file=is_file)
            except StoppedError:  # while the database was away
                requeue_this_job("stopped", stop)
                raise
            requeue_this_job(result.ended, stop)
            return result

    def _work(
        self, config: StudyConfig, processes: WorkerProcesses, stop: Stop, *, is_file: bool
    ) -> WorkResult:
        """Be one or more workers of a study, and keep its number of trials."""
        here = not processes.shares
        options = OpenOptions(
            resize=False,
            trials_run="in this process" if here else "in workers",
            is_file=is_file,
            trust_remote_code=self._trusts,
            stop=stop,
        )
        with (
            open_study(config, storage_url(self._storage), RUNS, options) as opened,
            shown(opened, quiet=self.quiet, own=here),
        ):
            summary = run_study(opened, processes, stop=stop)
            if WORKERS_ON_DEVICE in os.environ:  # the supervisor counts the trials of all workers
                summary = replace(summary, outcomes={})
            return work_result(opened, summary)

    def init(self, *, n_trials: int | None = None, hours: float | None = None) -> StudyRecord:
        """Check the study of the file, and make the tables and the study, before workers start."""
        options = OpenOptions(trials_run="elsewhere", is_file=True)
        config, url = to_run(self.file, n_trials, hours), storage_url(self._storage)
        with progress_shown(quiet=self.quiet), open_study(config, url, RUNS, options) as opened:
            if config.checkpoint.location is None and sqlite_path(parse_url(url)) is None:
                _logger.warning("%s", NOT_SHARED)
            return read_study(opened.storage, config.name)

    def train(
        self, params: Mapping[str, Any], show: Callable[[Evaluation], None] = lambda _: None
    ) -> TrialResult:
        """Run one trial without a database or checkpoint; call `show` with each evaluation."""
        config = to_run(self.file)
        with self._stopping() as stop:
            executor = build_executor(resolve_study(config, probe_device(config.device)), RUNS)
            stop.can_checkpoint = True
            with trial_shown(config, quiet=self.quiet) as note:
                return executor.run(params, None, uuid.uuid4().hex, Callbacks(show, stop.is_set, note))

    def check(self) -> DataCheck:
        """Describe the study's data and their faults, without training."""
        with progress_shown(quiet=self.quiet):
            return check_data(to_run(self.config), RUNS)

    def verify(self, repeats: int = 3) -> list[PrecisionCheck]:
        """Check each precision on this device: support, errors, speed and memory against fp32.

        `repeats`: number of timed passes of each precision; their median counts.
        """
        check_positive(repeats=repeats)
        config = to_run(self.config)
        with progress_shown(quiet=self.quiet):
            executor = Executor(resolve_study(config, probe_device(config.device)), RUNS)
            return verify(executor.device, lambda name, _: check_precision(executor, name, repeats))

    def plan(
        self, *, n_trials: int | None = None, hours: float | None = None, workers: int | None = None
    ) -> Plan:
        """Estimate the cost of the study: hours, starts, and the number of trials that reach the end.

        The estimate uses its complete trials. For a precision without one, some steps are trained here.
        `n_trials` and `hours` replace the study's; `workers` defaults to the live ones, or one.
        """
        check_positive(workers=workers)
        config = to_run(self.config, n_trials, hours)
        with progress_shown(quiet=self.quiet):
            return plan_study(config, self._stored_record(config.name), workers)

    def trials_dataframe(self) -> pd.DataFrame:
        """Return a row for each trial: outcome, requested and effective precision, speed, memory, values as
        `objective.NAME`, parameters as `param.NAME`; in seconds and bytes."""
        return StudyTables(self.record).trials.copy()

    def evaluate(self, split: str = "validation") -> dict[str, Any]:
        """Evaluate the best trial's checkpoint on a split in detail; store the result.

        Returns `trial`, `split`, `metrics` by task, and `detailed`. Raises RunError if no trial is complete.
        """
        evaluation: dict[str, Any] = self._use_best(split=split)["evaluation"]
        return evaluation

    def export(self, folder: str | Path, *, merge: bool = False) -> Path:
        """Write the model of the best trial, for transformers and `hpo.load`; return the folder.

        `merge` adds an adapter to the weights of the encoder. Raises RunError if no trial is complete or
        meets the limits, ModelError or InputError if the folder cannot be used.
        """
        return Path(self._use_best(folder=Path(folder), merge=merge)["export"])

    def use_best(
        self, *, split: str | None = None, folder: Path | None = None, merge: bool = False
    ) -> tuple[StudyRecord, dict[str, Any]]:
        """Evaluate the best trial on a split and export it to a folder, like `hpo best`.

        Several objectives are ranked by the first. Returns the record with the evaluation, and `evaluation`
        and `export` as far as they were asked for; {} if no trial is complete.
        """
        if merge and folder is None:
            raise InputError("--merge is an option of --export: give --export DIR, too.")
        if split is None and folder is None:
            return self.record, {}
        with progress_shown(quiet=self.quiet), self.opened() as (database, record):
            return models.use_best(database, record, self.config_of, split, folder, merge)

    def reproduce(self, folder: str | Path | None = None) -> Reproduction:
        """Train the best trial again from its record, and compare all metrics and the best weights.

        The study is not changed. `folder` must be new or empty and keeps the checkpoints; without it they are
        removed. Raises RunError if no trial is complete, InputError if the data or the code have changed.
        """
        models.check_new_folder(folder)
        with progress_shown(quiet=self.quiet):
            with self.opened() as (database, record):
                executor, trial = models.trial_to_reproduce(database, record, self.config_of)
            return models.reproduce_in(folder, executor, trial)

    def diagnose(self, trial: int) -> Diagnosis:
        """Name the operator that broke trial number `trial`, and the remedy. Changes nothing in the study."""
        with progress_shown(quiet=self.quiet), self.opened() as (database, record):
            return models.diagnose_checkpoint(database, record, self.config_of, trial)

    def compare(
        self,
        question: Question = "precisions",
        *,
        workers: int | None = None,
        until: str | None = None,
        **options: Any,
    ) -> ShownDict:
        """Train the best configurations with new seeds, and judge them. A later call continues.

        Args:
            question: `precisions`, `base_precision`, `optimizer_state`: is each as good as fp32?
                `configurations` shows the best ones, each in its own precision, and takes `top` and `seeds`.
            workers: processes on this machine.
            until: end of this job, like `hpo compare --until`.
            **options: `precisions` (names, fp32 among them), `top`, `seeds`, `max_seeds`, `margin`, `anyway`.

        Returns the content of `hpo compare --json`.

        Raises:
            RunError: it was interrupted; the ended trials are kept.
        """
        request = Request(question, **options)
        comparing.check_request(request)
        with self._stopping(until) as stop, self.opened() as (database, record):

            def run(config: StudyConfig) -> RunResult:
                processes = worker_processes(config, self._storage, workers)
                return self._run(config, processes, stop, OpenOptions(is_file=True))

            return comparing.run_comparison(database, record, self.config_of(record), request, run)

    def deploy(self, folder: str | Path | None = None, **options: Any) -> dict[str, Any]:
        """Find the fastest form of the best model that is as good as fp32, like `hpo deploy`.

        An interrupt ends the search with the scored forms. `folder` defaults to `runs/NAME/deploy`; for
        `options` see `DeploymentOptions`. Returns the content of deploy.json, `folder` and `was_stopped`.
        """
        chosen = deploying.DeploymentOptions(**options)
        with self._stopping(timeout=chosen.timeout) as stop, self.opened() as (database, record):
            to = Path(folder or RUNS / record.name / "deploy")
            stored = deploying.deploy_best(database, record, self.config_of, chosen, stop, to)
            return stored | {"folder": str(to), "was_stopped": stop.is_set()}

    def dashboard(self, port: int = 8080, host: str = "127.0.0.1") -> AbstractContextManager[Dashboard]:
        """Let optuna-dashboard listen during the block, with our notes and plots in the study.

        Port 0 takes a free one. `Dashboard.serve_forever` answers requests until it is interrupted.
        """
        from hpo.api import showing

        return showing.dashboard(self, port, host)

    def track(self, to: TrackerName, *, follow: bool = False, folder: Path | None = None) -> Tracked:
        """Show each trial as a run of a tracker. A later call adds new trials and changes.

        Args:
            to: `mlflow`, `tensorboard` or `wandb`.
            follow: update the tracker until the study ends or has had no worker for 10 minutes.
            folder: the folder for the files of tensorboard, and of wandb before it sends them.
        """
        from hpo.api import showing

        return showing.track(self, to, follow=follow, folder=folder)

    def report(self, folder: str | Path | None = None) -> Path:
        """Write the page and its tables into a folder (default: `runs/NAME/report`); return the page."""
        from hpo.api import showing

        return showing.report(self, folder)

    @property
    def config(self) -> StudyConfig:
        """The study of its file, else of the database. Raises InputError if there is none, or its code is not
        trusted."""
        if self._file is not None:
            return self.file
        config, _ = find_study(self._word, storage_url(self._storage))
        check_trust(config, None, self._trusts)
        return config

    def config_of(self, record: StudyRecord) -> StudyConfig:
        """Return the study of its file; without a file, or if the file has another name, the stored study.

        Raises StudyChangedError if the file differs from the stored study, InputError like `check_trust`.
        """
        given = self._file if self._file is not None and self._file.name == record.name else None
        stored = record.definition
        config = stored_study(record.name, stored) if given is None else given.resumed(stored)
        check_trust(config, given, self._trusts)
        return config

    def _stored_record(self, name: str) -> StudyRecord | None:
        """Read the study of this name; None if the database does not have it."""
        try:
            with existing_database(self._storage) as database:
                return read_study(database, name) if database.has_study(name) else None
        except NoDatabaseError:
            return None

    @contextmanager
    def _stopping(self, until: str | None = None, timeout: float | None = None) -> Iterator[Stop]:
        """Stop the trials of the block at a signal. The other ranks of torchrun follow this process."""
        check_positive(timeout=timeout)
        with (
            progress_shown(quiet=self.quiet),
            stop_on_signals(end_of_job(until), timeout) as stop,
            ranks_of_torchrun(),
        ):
            yield stop

    def _use_best(self, **use: Any) -> dict[str, Any]:
        record, used = self.use_best(**use)
        if not used:
            raise RunError(f"The study `{record.name}` has no complete trial.")
        return used
