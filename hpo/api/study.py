"""A study from Python, from notebooks, and for the commands.

    study = hpo.Study("studies/own_data.yaml")
    study.run(hours=2)
    study.trials_dataframe()

The commands about a study call its methods, so both do the same in the same database, and `hpo worker` may
join.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.api.messages import progress_shown
from hpo.api.named import NamedStudy
from hpo.api.opening import RUNS, check_positive, check_workers, to_run
from hpo.api.running import RunResult, WorkResult, run_result, shown, work_result, worker_processes
from hpo.cluster.batch.slurm import requeue_this_job
from hpo.config.resolved_study import resolve_study
from hpo.config.sections import NOT_SHARED
from hpo.device import probe_device
from hpo.errors import InputError, RunError, StoppedError
from hpo.memory import collector_paused
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import StudyRecord, TrialRecord, best_trials
from hpo.study.running.open_study import OpenOptions, open_study
from hpo.study.running.stopping import WORKERS_ON_DEVICE, Stop
from hpo.study.running.supervisor import WorkerProcesses
from hpo.study.running.worker import run_study
from hpo.study.store.database import parse_url, sqlite_path, storage_url
from hpo.study.store.storage import open_storage
from hpo.track.background import track_in_background
from hpo.trial.executor import Executor
from hpo.trial.own_executor import build_executor
from hpo.trial.telemetry import Callbacks, TrialResult
from hpo.trial.verify import PrecisionCheck, check_precision, verify

if TYPE_CHECKING:
    import pandas as pd

    from hpo.api.lifecycle import Copied, Deleted, Enqueued, StateChange
    from hpo.api.tracking import Tracked
    from hpo.config.choices import Question, TrackerName
    from hpo.config.study_config import StudyConfig
    from hpo.report.dashboard import Dashboard
    from hpo.report.data_check import DataCheck
    from hpo.report.plan import Plan
    from hpo.study.store.lifecycle import StudyState
    from hpo.training.evaluate import Evaluation
    from hpo.trial.diagnosis import Diagnosis
    from hpo.trial.reproduction import Reproduction

_logger = logging.getLogger(__name__)


class Study(NamedStudy):
    """A study file, or a mapping with its keys, and what its database has of it.

    Args:
        study: a name in `studies/`, the path of a YAML file, the name of a study in the database, or a
            mapping; paths in a mapping are relative to the working folder.
        storage: the URL of the database; None: `HPO_STORAGE`, else `sqlite:///runs/hpo.db`.
        trust_code: files or modules of this machine that may run where the study in the database needs them.
        trust_remote_code: whether the code that comes with an encoder may run, where the study in the
            database asks for it.
        quiet: show no progress.

    Raises:
        InputError: the study is not valid; the message lists every problem. A name of which there is no valid
            file is looked for in the database when it is used.
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
        """Create or resume the study of the file and run its trials here until its budget is used up.

        An interrupt (Ctrl-C, or a notebook's stop) checkpoints the trial in hand and returns; a second one
        ends at once. Of the processes of torchrun all but the first exit when it is done.

        Args:
            n_trials: in place of the study's, in this call.
            hours: of device time, a budget in place of a number of trials; to go on, give it again.
            workers: processes on this machine, spread over its GPUs; None or 1: this one.
            workers_per_device: processes for each GPU, in place of `workers`.
            until: when this job ends, as `hpo run --until` takes it.
            timeout: seconds after which no further trial begins.

        Raises:
            InputError: data, model or device cannot be used.
            StudyChangedError: the database has another study of this name.
        """
        check_workers(workers, workers_per_device)  # before anything is made
        with self._stopping(until, timeout) as stop:
            config = to_run(self.file, n_trials, hours)
            return self._run(
                config, worker_processes(config, self._storage, workers, workers_per_device), stop
            )

    def _run(self, config: StudyConfig, processes: WorkerProcesses, stop: Stop) -> RunResult:
        """Create or resume a study and run its trials in this process, or in `processes` if there are any."""
        how = OpenOptions(trials_run="in workers" if processes.shares else "in this process", is_file=True)
        with open_study(config, storage_url(self._storage), RUNS, how) as opened:
            url = processes.storage_as_given or opened.storage.url
            with (
                track_in_background(config.name, config.tracker, url, RUNS),
                shown(opened, quiet=self._quiet, stop=stop),
            ):
                summary = run_study(opened, processes, stop=stop)
            return run_result(opened, summary)

    def work(
        self,
        *,
        workers: int | None = None,
        workers_per_device: int | None = None,
        until: str | None = None,
        timeout: float | None = None,
    ) -> WorkResult:
        """Join the study as one or more workers until it is done, as `hpo worker` does.

        A name means the study in the database, if there is one. The arguments are those of `run`.
        """
        check_workers(workers, workers_per_device)
        with self._stopping(until, timeout) as stop:
            try:
                config, is_file = self._to_work(stop)
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
        how = OpenOptions(
            resize=False,
            trials_run="in this process" if here else "in workers",
            is_file=is_file,
            trust_remote_code=self._trusts,
            stop=stop,
        )
        with (
            open_study(config, storage_url(self._storage), RUNS, how) as opened,
            shown(opened, quiet=self._quiet, stop=stop, own=here),
        ):
            summary = run_study(opened, processes, stop=stop)
            if WORKERS_ON_DEVICE in os.environ:  # the supervisor counts the trials of all workers
                summary = replace(summary, outcomes={})
            return work_result(opened, summary)

    def init(self, *, n_trials: int | None = None, hours: float | None = None) -> StudyRecord:
        """Check the study of the file, and make the tables and the study, before workers start."""
        options = OpenOptions(trials_run="elsewhere", is_file=True)
        config, url = to_run(self.file, n_trials, hours), storage_url(self._storage)
        with progress_shown(quiet=self._quiet), open_study(config, url, RUNS, options) as opened:
            if config.checkpoint.location is None and sqlite_path(parse_url(url)) is None:
                _logger.warning("%s", NOT_SHARED)
            return read_study(opened.storage, config.name)

    def train(
        self, params: Mapping[str, Any], show: Callable[[Evaluation], None] = lambda _: None
    ) -> TrialResult:
        """Run one trial with `params` without a database or checkpoint; `show` is called with each
        evaluation."""
        config = to_run(self.file)
        with self._stopping() as stop:
            executor = build_executor(resolve_study(config, probe_device(config.device)), RUNS)
            stop.can_checkpoint = True
            return executor.run(params, None, uuid.uuid4().hex, Callbacks(show, stop.is_set))

    def check(self) -> DataCheck:
        """What the data of the study hold and what to change, without training."""
        from hpo.report.data_check import check_data

        with progress_shown(quiet=self._quiet):
            return check_data(to_run(self.config), RUNS)

    def verify(self, repeats: int = 3) -> list[PrecisionCheck]:
        """Check each precision on this device: support, errors, speed and memory against fp32.

        `repeats` passes of each precision are timed; the fastest counts.
        """
        check_positive(repeats=repeats)
        config = to_run(self.config)
        with progress_shown(quiet=self._quiet):
            executor = Executor(resolve_study(config, probe_device(config.device)), RUNS)
            return verify(executor.device, lambda name, _: check_precision(executor, name, repeats))

    def plan(
        self, *, n_trials: int | None = None, hours: float | None = None, workers: int | None = None
    ) -> Plan:
        """Estimate the trials of the study or its budget: hours, starts, and how many go on to the end.

        By its complete trials; in a precision of which there is none, some steps are trained here. `n_trials`
        and `hours` replace the study's; `workers` defaults to the live ones, or one.
        """
        from hpo.api.planning import plan_study

        check_positive(workers=workers)
        config = to_run(self.config, n_trials, hours)
        with progress_shown(quiet=self._quiet):
            return plan_study(config, self._record_of(config.name), workers)

    def status(self) -> dict[str, Any]:
        """How far it is: what `hpo status --json` prints."""
        from hpo.report.status import study_status

        return study_status(self.outline)

    def trials_dataframe(self) -> pd.DataFrame:
        """A row for each trial: outcome, precision that was asked for and that ran, speed, memory, values as
        `objective.NAME`, parameters as `param.NAME`; seconds and bytes."""
        from hpo.report.tables import StudyTables

        return StudyTables(self.record).trials.copy()

    def best(self) -> list[TrialRecord]:
        """The best complete trial, or with several objectives the front; [] if none is complete."""
        return best_trials(self.record)

    def evaluate(self, split: str = "validation") -> dict[str, Any]:
        """Evaluate the checkpoint of the best trial on `train`, `validation` or `test` in detail, and store
        that.

        Returns `trial`, `split`, `metrics` by task, and `detailed`. Raises RunError if no trial is complete.
        """
        evaluation: dict[str, Any] = self._use_best(split=split)["evaluation"]
        return evaluation

    def export(self, folder: str | Path, *, merge: bool = False) -> Path:
        """Write the model of the best trial, which transformers and `hpo.load` read; returns the folder.

        `merge` adds an adapter to the weights of the encoder. Raises RunError if no trial is complete or
        meets the limits, ModelError or InputError if the folder cannot be used.
        """
        return Path(self._use_best(folder=Path(folder), merge=merge)["export"])

    def use_best(
        self, *, split: str | None = None, folder: Path | None = None, merge: bool = False
    ) -> tuple[StudyRecord, dict[str, Any]]:
        """Evaluate the best trial on a split and export it to a folder, as `hpo best` does.

        With several objectives the best trial by the first of them is used. Returns the record with the
        evaluation, and what was done: `evaluation`, `export`; {} where no trial is complete.
        """
        if merge and folder is None:
            raise InputError("--merge is how a model is exported: give --export DIR, too.")
        if split is None and folder is None:
            return self.outline, {}
        from hpo.api.models import use_best

        with progress_shown(quiet=self._quiet), self.opened() as (database, record):
            return use_best(database, record, self.config_of, split, folder, merge)

    def reproduce(self, folder: str | Path | None = None) -> Reproduction:
        """Train the best trial again from its record, and compare all metrics and the best weights.

        The study is not changed. `folder`, which must be new or empty, takes the checkpoints; left out, they
        are removed. Raises RunError if no trial is complete, InputError if the data or the code have changed.
        """
        from hpo.api.models import check_new_folder, reproduce_in, trial_to_reproduce

        check_new_folder(folder)
        with progress_shown(quiet=self._quiet):
            with self.opened() as (database, record):
                executor, trial = trial_to_reproduce(database, record, self.config_of)
            return reproduce_in(folder, executor, trial)

    def diagnose(self, trial: int) -> Diagnosis:
        """Name the operator that broke trial number `trial` and what helps; changes nothing in the study."""
        from hpo.api.models import diagnose_checkpoint

        with progress_shown(quiet=self._quiet), self.opened() as (database, record):
            return diagnose_checkpoint(database, record, self.config_of, trial)

    def compare(
        self,
        question: Question = "precisions",
        *,
        workers: int | None = None,
        until: str | None = None,
        **options: Any,
    ) -> Mapping[str, Any]:
        """Train the best configurations with new seeds, and judge, as `hpo compare` does; it goes on where it
        was.

        Args:
            question: `precisions`, `base_precision`, `optimizer_state`: is each as good as fp32?
                `configurations` shows the best ones, each in its own precision, and takes `top` and `seeds`.
            workers: processes on this machine.
            until: when this job ends, as `hpo compare --until` takes it.
            **options: `precisions` (names, fp32 among them), `top`, `seeds`, `max_seeds`, `margin`.

        Returns what `hpo compare --json` prints.

        Raises:
            RunError: it was interrupted; what has ended is kept.
        """
        from hpo.api.comparing import run_comparison
        from hpo.compare.planning import Request

        request = Request(question, **options)
        with self._stopping(until) as stop, self.opened() as (database, record):

            def run(companion: StudyConfig) -> RunResult:
                return self._run(companion, worker_processes(companion, self._storage, workers), stop)

            return run_comparison(database, record, self.config_of(record), request, run)

    def deploy(self, folder: str | Path | None = None, **options: Any) -> dict[str, Any]:
        """Find the fastest form of the best model that is as good as fp32, as `hpo deploy` does.

        An interrupt ends the search with the forms that are scored by then. `folder` defaults to
        `runs/NAME/deploy`; `options` are those of `DeploymentOptions`. Returns the content of deploy.json,
        `folder` and `was_stopped`.
        """
        from hpo.api.deploying import DeploymentOptions, deploy_best

        wanted = DeploymentOptions(**options)
        with self._stopping(timeout=wanted.timeout) as stop, self.opened() as (database, record):
            to = Path(folder or RUNS / record.name / "deploy")
            stored = deploy_best(database, record, self.config_of, wanted, stop, to)
            return stored | {"folder": str(to), "was_stopped": stop.is_set()}

    @contextmanager
    def dashboard(self, port: int = 8080, host: str = "127.0.0.1") -> Iterator[Dashboard]:
        """Have optuna-dashboard listen during the block, with our notes and plots in the study.

        Port 0 takes a free one. `Dashboard.serve_forever` answers requests until it is interrupted.
        """
        from hpo.report.dashboard import open_dashboard

        with self.opened() as (database, record), open_dashboard(database, record, port, host) as served:
            yield served

    def enqueue(self, params: Mapping[str, Any] | Sequence[str], *, whole: bool = False) -> Enqueued:
        """Have the next free worker try a configuration. The sampler draws the settings that are left out.

        The trial is one of those that the study has left to begin.

        Args:
            params: searched settings by name, or texts such as `learning_rate=3e-5`.
            whole: run the trial to its end; it is neither paused nor pruned.

        Raises InputError if a setting is not searched or out of range, or no trial is left to begin.
        """
        from hpo.api.lifecycle import enqueue

        with self._stored() as (database, name):
            return enqueue(database, name, params, whole=whole)

    def pause(self) -> StateChange:
        """Stop the study for now: its workers checkpoint their trials and leave.

        Raises RunError if a worker has not left after three minutes.
        """
        return self._set_state("paused")

    def resume(self) -> StateChange:
        """Open the study again after `pause` or `cancel`. It starts no worker."""
        return self._set_state("open")

    def cancel(self) -> StateChange:
        """Stop the study for good: pause it, and end its unfinished trials. Raises RunError as `pause`."""
        return self._set_state("cancelled")

    def delete(self, confirm: Callable[[str], object] = lambda _: None) -> Deleted:
        """Remove the study from the database, and its checkpoints from where this machine finds them.

        `confirm` receives a description of the study before anything is removed; an exception stops the
        removal. Raises InputError if the study has workers.
        """
        from hpo.api.lifecycle import delete

        with self._stored() as (database, name):
            return delete(database, name, confirm)

    def copy(self, to: str) -> Copied:
        """Copy the study with its trials to the database at the URL `to`; it keeps its checkpoints.

        Raises InputError if the study has workers, or `to` has a study of this name.
        """
        from hpo.api.lifecycle import copy_study

        with self._stored() as (source, name), open_storage(storage_url(to)) as target:
            return copy_study(source, target, name)

    def track(
        self, to: TrackerName, *, follow: bool = False, folder: Path | None = None, with_parent: bool = False
    ) -> Tracked:
        """Show each trial as a run of a tracker. Called again, it adds new trials and changes.

        Args:
            to: `mlflow`, `tensorboard` or `wandb`.
            follow: keep the tracker up to date until the study ends.
            folder: the folder for the files of tensorboard, and of wandb before it sends them.
            with_parent: end when the standard input does.
        """
        from hpo.api.tracking import track

        if folder is not None and to == "mlflow":
            raise InputError("--folder must be left out with `--to mlflow`, which writes no files.")
        with self._stopping() as stop, self.opened() as (database, record):
            return track((database, record), to, stop, follow=follow, folder=folder, with_parent=with_parent)

    def report(self, folder: str | Path | None = None) -> Path:
        """Write the page and its tables into a folder (default: `runs/NAME/report`); returns the page."""
        with collector_paused():
            from hpo.report.report import write_report

        record = self.record
        file = self._word if self._word and self._file is not None else None
        return write_report(record, Path(folder or RUNS / record.name / "report"), file)

    def _set_state(self, state: StudyState) -> StateChange:
        from hpo.api.lifecycle import set_state

        with self._stored() as (database, name):
            return set_state(database, name, state)

    def _use_best(self, **use: Any) -> dict[str, Any]:
        record, used = self.use_best(**use)
        if not used:
            raise RunError(f"The study `{record.name}` has no complete trial.")
        return used
