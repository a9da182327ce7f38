"""A study from Python, from notebooks, and for the commands.

    study = hpo.Study("studies/own_data.yaml")
    study.run(hours=2)
    study.trials_dataframe()

The commands about a study call its methods, so both do the same in the same database, and `hpo worker` may
join.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from hpo.api.messages import progress_shown
from hpo.api.opening import (
    RUNS,
    check_positive,
    check_workers,
    existing_database,
    find_study,
    is_path,
    load_file,
    make_runs_folder,
    study_of,
    to_run,
    trust,
)
from hpo.code import use_code
from hpo.config.comparison import Question
from hpo.config.study_config import StudyConfig, load_study, stored_study
from hpo.device import probe_device
from hpo.errors import InputError, NoDatabaseError, RunError
from hpo.json_safe import json_safe
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import StudyRecord, TrialRecord, best_trials
from hpo.study.running.stopping import Stop, end_of_job, stop_on_signals
from hpo.study.store.database import storage_url
from hpo.study.store.storage import Storage
from hpo.trial.callbacks import Callbacks

if TYPE_CHECKING:
    import pandas as pd

    from hpo.api.running import RunResult
    from hpo.report.data_check import DataCheck
    from hpo.report.plan import Plan
    from hpo.trial.diagnosis import Diagnosis
    from hpo.trial.telemetry import ScoredEvaluation, TrialResult
    from hpo.trial.verify import PrecisionCheck


class Study:
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

    def __init__(
        self,
        study: str | Path | Mapping[str, Any],
        *,
        storage: str | None = None,
        trust_code: str | Sequence[str] = (),
        trust_remote_code: bool = False,
        quiet: bool = False,
    ) -> None:
        for code in [trust_code] if isinstance(trust_code, str) else trust_code:
            trust(code)
        self._word = "" if isinstance(study, Mapping) else str(study)
        self._file = study_of(study) if isinstance(study, Mapping) else load_file(self._word)
        self._storage, self._trusts, self._quiet = storage, trust_remote_code, quiet

    @property
    def file(self) -> StudyConfig:
        """The study of its file or mapping. Raises StudyFileError where there is none."""
        file = self._file if self._file is not None else load_study(self._word)
        use_code(file.code, f"The study `{file.name}`")  # another study's may be in use
        return file

    @property
    def config(self) -> StudyConfig:
        """The study of its file, else as in the database. Raises InputError if there is none, or its code
        is not trusted."""
        if self._file is not None:
            return self.file
        config, _ = find_study(self._word, storage_url(self._storage))
        self._check_trust(config, None)
        return config

    @property
    def record(self) -> StudyRecord:
        """All that the database has of the study, as of now. Raises StorageError where it has nothing."""
        with self.opened() as (_, record):
            return record

    @contextmanager
    def opened(self) -> Iterator[tuple[Storage, StudyRecord]]:
        """The database and what it has of the study. Raises StorageError if it has nothing.

        A name is that of a study in the database, if there is one, whatever lies in `studies/`.
        """
        with existing_database(self._storage) as database:
            yield database, read_study(database, self._name_in(database))

    @property
    def name(self) -> str:
        """Of the study in the database, or of its file where there is no database yet."""
        try:
            with existing_database(self._storage) as database:
                return self._name_in(database)
        except NoDatabaseError:
            if self._file is None:
                raise
            return self._file.name

    def _name_in(self, database: Storage) -> str:
        is_stored = self._word and not is_path(self._word) and database.has_study(self._word)
        return self._word if is_stored or self._file is None else self._file.name

    def config_of(self, record: StudyRecord) -> StudyConfig:
        """The study as in its file; as stored if there is no file, or it is of another study.

        Raises StudyChangedError if the file differs from the stored study, and InputError as `check_trust`
        does.
        """
        given = self._file if self._file is not None and self._file.name == record.name else None
        stored = record.definition
        config = stored_study(record.name, stored) if given is None else given.resumed(stored)
        self._check_trust(config, given)
        return config

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
        from hpo.api.running import run_here, worker_processes

        # Before anything is made.
        check_positive(timeout=timeout)
        check_workers(workers, workers_per_device)
        end_of_job(until)
        config = to_run(self.file, n_trials, hours)
        processes = worker_processes(config, self._storage, workers, workers_per_device)
        with self._stopping(until, timeout) as stop:
            return run_here(config, processes, stop, self._storage, quiet=self._quiet)

    def init(self, *, n_trials: int | None = None, hours: float | None = None) -> StudyRecord:
        """Check the study of the file, and make the tables and the study, before workers start."""
        from hpo.study.running.run import OpenOptions, open_study

        options = OpenOptions(trials_run="elsewhere", is_file=True)
        config, url = to_run(self.file, n_trials, hours), storage_url(self._storage)
        with progress_shown(quiet=self._quiet), open_study(config, url, RUNS, options) as opened:
            return read_study(opened.storage, config.name)

    def train(
        self, params: Mapping[str, Any], show: Callable[[ScoredEvaluation], None] = lambda _: None
    ) -> TrialResult:
        """Run one trial with `params` without a database or checkpoint; `show` is called with each
        evaluation."""
        from hpo.trial.executor import Executor

        config = to_run(self.file)
        with self._stopping() as stop:
            executor = Executor(config, probe_device(config.device), RUNS)
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
        from hpo.trial.executor import Executor
        from hpo.trial.verify import check_precision, verify

        check_positive(repeats=repeats)
        config = to_run(self.config)
        with progress_shown(quiet=self._quiet):
            executor = Executor(config, probe_device(config.device), RUNS)
            return verify(executor.device, lambda name, _: check_precision(executor, name, repeats))

    def plan(
        self, *, n_trials: int | None = None, hours: float | None = None, workers: int | None = None
    ) -> Plan:
        """Estimate the trials of the study or its budget: hours, starts, and how many go on to the end.

        By its complete trials; in a precision of which there is none, some steps are trained here. `n_trials`
        and `hours` replace the study's; `workers` defaults to the live ones, or one.
        """
        from hpo.api.planning import comparison_limit, measured_plan
        from hpo.data.dataset import load_data
        from hpo.trial.trial_parts import fit_pruner

        check_positive(workers=workers)
        config, record, data, why = to_run(self.config, n_trials, hours), None, None, ""
        try:
            with existing_database(self._storage) as database:
                if database.has_study(config.name):
                    record = read_study(database, config.name)
        except NoDatabaseError:
            pass  # nothing has run yet
        with progress_shown(quiet=self._quiet):
            if record is None:
                data = load_data(config.data)
                config, why = fit_pruner(config, data)
            else:
                config = config.resumed(record.definition)
            plan = measured_plan(config, record, workers, why)
            return replace(plan, limit=comparison_limit(config, data))

    def status(self) -> dict[str, Any]:
        """How far it is: what `hpo status --json` prints."""
        from hpo.report.status import study_status

        return study_status(self.record)

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
        if split is None and folder is None:
            return self.record, {}
        from hpo.api.models import use_best

        with progress_shown(quiet=self._quiet), self.opened() as (database, record):
            return use_best(database, record, self.config_of, split, folder, merge)

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
        from hpo.api.comparing import planned_comparison, run_look
        from hpo.api.running import worker_processes
        from hpo.compare.looks import run_looks
        from hpo.compare.planning import Request

        request, url, quiet = Request(question, **options), self._storage, self._quiet
        if question not in get_args(Question):
            raise InputError(
                f"`question` must be one of {', '.join(get_args(Question))}, but got {question}."
            )
        check_positive(
            top=request.top, seeds=request.seeds, max_seeds=request.max_seeds, margin=request.margin
        )
        with (
            stop_on_signals(end_of_job(until)) as stop,
            progress_shown(quiet=quiet),
            self.opened() as (database, record),
        ):
            config = self.config_of(record)
            companion, data, in_advance = planned_comparison(database, record, config, request)
            processes = worker_processes(companion, url, workers)
            make_runs_folder(companion.name)
            result = run_looks(
                database,
                companion,
                record,
                data.tasks,
                lambda look: run_look(look, processes, stop, url, quiet=quiet),
                in_advance,
            )
        content: Mapping[str, Any] = json_safe(result.content)
        return content

    def deploy(self, folder: str | Path | None = None, **options: Any) -> dict[str, Any]:
        """Find the fastest form of the best model that is as good as fp32, as `hpo deploy` does.

        An interrupt ends the search with the forms that are scored by then. `folder` defaults to
        `runs/NAME/deploy`; `options` are those of `DeploymentOptions`. Returns the content of deploy.json,
        `folder` and `was_stopped`.
        """
        from hpo.api.deploying import DeploymentOptions, deploy_best

        wanted = DeploymentOptions(**{name: value for name, value in options.items() if value is not None})
        check_positive(timeout=wanted.timeout, max_drop=wanted.max_drop, threads=wanted.threads)
        with (
            progress_shown(quiet=self._quiet),
            stop_on_signals(end_of_job(None), wanted.timeout) as stop,
            self.opened() as (database, record),
        ):
            to = Path(folder or RUNS / record.name / "deploy")
            stored = deploy_best(database, record, self.config_of, wanted, stop, to)
            return stored | {"folder": str(to), "was_stopped": stop.is_set()}

    def report(self, folder: str | Path | None = None) -> Path:
        """Write the page and its tables into a folder (default: `runs/NAME/report`); returns the page."""
        from hpo.report.report import write_report

        record = self.record
        file = self._word if self._word and self._file is not None else None
        return write_report(record, Path(folder or RUNS / record.name / "report"), file)

    def _repr_html_(self) -> str:
        """Show in a notebook how far the study is, and the table by precision."""
        from hpo.report.formats import trials_done
        from hpo.report.tables import StudyTables, brief_summary

        record = self.record
        counts = trials_done(record.counts, has_budget=record.definition.get("budget") is not None)
        summary = brief_summary(StudyTables(record)).to_html(index=False)
        return f"<b>{record.name}</b>: {counts}{summary}"

    def _check_trust(self, config: StudyConfig, of_file: StudyConfig | None) -> None:
        from hpo.study.running.run import check_trust  # not for those that only look

        check_trust(config, of_file, self._trusts)

    def _use_best(self, **use: Any) -> dict[str, Any]:
        record, used = self.use_best(**use)
        if not used:
            raise RunError(f"The study `{record.name}` has no complete trial.")
        return used

    @contextmanager
    def _stopping(self, until: str | None = None, timeout: float | None = None) -> Iterator[Stop]:
        """Around trials in this process: stopped by a signal, in several ranks where torchrun began them."""
        from hpo.api.running import ranks_of_torchrun

        with (
            progress_shown(quiet=self._quiet),
            stop_on_signals(end_of_job(until), timeout) as stop,
            ranks_of_torchrun(),
        ):
            yield stop
