"""What the commands share: their options, where the study is, and what they print."""

from __future__ import annotations

import inspect
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hpo.errors import InputError, printable

if TYPE_CHECKING:
    from hpo.config.study_config import StudyConfig
    from hpo.study.reading.study_record import StudyRecord, TrialRecord
    from hpo.study.running.stopping import Stop
    from hpo.study.running.supervisor import WorkerProcesses
    from hpo.study.store.storage import Storage
    from hpo.trial.executor import Executor

RUNS = Path("runs")
"""In the working folder: all that a run makes."""

app = typer.Typer(
    help="Hyperparameter search for multitask transformer encoders, with precision as a searched dimension.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _positive_seconds(value: float | None) -> float | None:
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise typer.BadParameter(f"must be a number of seconds > 0, but got {value:g}.")
    return value


StudyArgument = Annotated[str, typer.Argument(metavar="STUDY", help="A name in studies/, or a YAML file.")]
StoredStudyArgument = Annotated[str, typer.Argument(metavar="STUDY", help="A name in the database.")]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run the code that comes with an encoder, where the study asks for that in the database.",
    ),
]


def _trust(files: list[str]) -> list[str]:
    from hpo.code import name_code

    for file in files:
        try:
            name_code(file)
        except ValueError as error:
            raise InputError(f"--trust-code {file}: {error}") from None
    return files


TrustCodeOption = Annotated[
    list[str],
    typer.Option(
        "--trust-code",
        metavar="FILE",
        callback=_trust,
        help="Run this code, a file or module of this machine, where a study or model needs it. Repeatable.",
    ),
]
StorageOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        envvar="HPO_STORAGE",
        help="Database of the study: sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME.",
        show_default="sqlite:///runs/hpo.db, in the working folder",
    ),
]
NumTrialsOption = Annotated[
    int | None,
    typer.Option(min=1, max=100_000, metavar="N", help="Total of the study, over all workers and runs."),
]
HoursOption = Annotated[
    float | None,
    typer.Option(min=0.001, metavar="H", help="Budget of the study in device-hours, in place of its trials."),
]
ParamOption = Annotated[
    list[str],
    typer.Option("--param", "-p", metavar="NAME=VALUE", help="A setting of the trial. Repeatable."),
]
UntilOption = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="When this job ends: 18:30, 2026-11-22T18:30 or +3600 (seconds from now). No trial begins that "
        "would not reach its next evaluation, and the trial in hand is checkpointed before.",
        show_default="SLURM_JOB_END_TIME",
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1000,
        metavar="W",
        help="Processes on this machine, spread over its GPUs.",
        show_default="1",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
WORK_OPTIONS: Mapping[str, Any] = {
    "workers": WorkersOption,
    "workers_per_device": Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100,
            metavar="K",
            help="Processes for each GPU of this machine, or on its CPU; not with --workers.",
        ),
    ],
    "timeout": Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", callback=_positive_seconds, help="No further trial begins after so long."
        ),
    ],
    "until": UntilOption,
}
"""Of the commands that run workers on this machine."""


def with_options(*tables: Mapping[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command that takes `**options` those of the tables, None where they are not given."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        named = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for table in tables
            for name, annotation in table.items()
        ]
        command.__signature__ = signature.replace(parameters=named + more)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in named + more}
        return command

    return decorate


def trials_done(slots: Mapping[str, int], *, has_budget: bool = False) -> str:
    """How far a study is, by its slots; one that has a budget may end with fewer."""
    paused = f", {slots['paused']} paused" if slots.get("paused") else ""
    at_most = "at most " if has_budget else ""
    return f"{slots['done']} of {at_most}{sum(slots.values())} trials done{paused}"


def print_json(value: Any) -> None:
    """Print `value` as the only output of a command with `--json`."""
    from hpo.json_safe import json_safe

    typer.echo(json.dumps(json_safe(value), indent=2, default=str))


def answer(value: Any, text: str, *, as_json: bool) -> None:
    """Print what a command has done: as JSON, or in words, which may come from a database."""
    print_json(value) if as_json else typer.echo(printable(text))


class _Stderr(logging.Handler):
    """Writes to `sys.stderr` as it is now: a progress bar has its own."""

    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(printable(self.format(record)), err=True)


@contextmanager
def progress_shown(*, quiet: bool) -> Iterator[None]:
    """Show on stderr what the library logs of steps that may take long; warnings alone if `quiet`."""
    logger, handler = logging.getLogger("hpo"), _Stderr(logging.WARNING if quiet else logging.INFO)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(handler.level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def stop_signals(until: str | None = None, timeout: float | None = None) -> Iterator[Stop]:
    """`stop_on_signals`; a SIGINT that ends the command at once does so with a word on what that means."""
    from hpo.study.running.stopping import end_of_job, stop_on_signals

    try:
        with stop_on_signals(end_of_job(until), timeout) as stop:
            yield stop
    except KeyboardInterrupt:
        typer.echo(
            "Ended at once. A trial goes on from its last checkpoint when its study is run again.", err=True
        )
        raise typer.Exit(130) from None


def load_to_run(study: str, n_trials: int | None = None, hours: float | None = None) -> StudyConfig:
    """The study's file, with so many trials or device-hours if given, and a folder for what a run makes.

    Raises InputError where that cannot be made.
    """
    from hpo.config.study_config import load_study

    return _to_run(load_study(study), n_trials, hours)


def _to_run(config: StudyConfig, n_trials: int | None, hours: float | None = None) -> StudyConfig:
    make_runs_folder(config.name)
    return resized(config, n_trials, hours)


def resized(config: StudyConfig, n_trials: int | None, hours: float | None = None) -> StudyConfig:
    """The study with so many trials or device-hours, where they are given."""
    from hpo.config.budget import MAX_TRIALS, BudgetConfig

    if hours is not None:
        config = config.with_values(budget=BudgetConfig(hours=hours), n_trials=MAX_TRIALS)
    return config if n_trials is None else config.with_values(n_trials=n_trials)


def load_to_check(study: str, storage: str | None, trust_remote_code: bool) -> StudyConfig:
    """The study's file, or where there is none the study of that name in the database.

    Raises InputError as `load_to_run` and `check_trust` do.
    """
    from hpo.study.running.run import check_trust
    from hpo.study.store.database import storage_url

    if (given := load_file(study)) is not None:
        return _to_run(given, None)
    config, _ = load_to_work(study, storage_url(storage))
    check_trust(config, None, trust_remote_code)
    return config


def check_work_options(options: Mapping[str, Any]) -> None:
    """Raise InputError where `WORK_OPTIONS` contradict each other, before anything is made."""
    from hpo.study.running.stopping import end_of_job

    end_of_job(options["until"])
    workers, per_device = options["workers"], options["workers_per_device"]
    if workers and per_device:
        raise InputError(
            f"--workers {workers} counts all processes of this machine and --workers-per-device "
            f"{per_device} those of each device. Give one of them."
        )
    if "TORCHELASTIC_RUN_ID" in os.environ and (workers or per_device):
        raise InputError(
            "the processes of torchrun are one worker: --workers and --workers-per-device must be left out."
        )


def worker_processes(config: StudyConfig, storage: str | None, options: Mapping[str, Any]) -> WorkerProcesses:
    """Those of a study that `WORK_OPTIONS` ask for; without shares, the one worker is this process."""
    from hpo.study.running.supervisor import WorkerProcesses, share_devices

    shares = share_devices(config, options["workers"], options.get("workers_per_device"))
    return WorkerProcesses(shares, storage_as_given=file_given(storage))


def file_given(storage: str | None) -> str | None:
    """`@FILE`, where the user named the database so: processes elsewhere get no more than that."""
    from hpo.study.store.database import URL_FROM_FILE

    return storage if storage and storage.startswith(URL_FROM_FILE) else None


def load_to_work(
    study: str, url: str, stop: Stop | None = None, n_trials: int | None = None
) -> tuple[StudyConfig, bool]:
    """The study as a worker runs it, and whether it is that of the user's own file.

    `stop` as in `existing_database`, `n_trials` as in `load_to_run`.

    A name is that of a study in the database, if there is one, whatever lies in studies/; a path, and a name
    that the database does not have, are of a study file.
    """
    from hpo.config.study_config import stored_study
    from hpo.errors import NoDatabaseError, StudyFileError
    from hpo.study.store.database import place

    unknown = ""
    if not is_path(study):
        try:
            with existing_database(url, stop) as storage:
                if storage.has_study(study):
                    return _to_run(stored_study(study, storage.read_definition(study)), n_trials), False
        except NoDatabaseError as error:
            unknown = str(error)
    try:
        return load_to_run(study, n_trials), True
    except StudyFileError as error:
        if is_path(study):
            raise
        nowhere = unknown or f"There is no study `{study}` in {place(url)}."
        raise InputError(f"{nowhere} As a file, {error}") from None


def is_path(study: str) -> bool:
    """Whether STUDY is the path of a study file, and no name."""
    return Path(study).suffix in (".yaml", ".yml") or "/" in study


def make_runs_folder(study_name: str) -> None:
    """Make the folder of a study for what a run makes. Raises InputError where it cannot be written."""
    folder = RUNS / study_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise InputError(
            f"hpo writes to {RUNS}/ in the working folder, so {folder.absolute()} must be a folder that may "
            f"be written, but: {error.strerror}. Run hpo in another folder."
        ) from None


def load_file(study: str) -> StudyConfig | None:
    """The study file; None where STUDY can only be a name in the database."""
    from hpo.config.study_config import load_study
    from hpo.errors import StudyFileError

    try:
        return load_study(study)
    except StudyFileError:
        if is_path(study):
            raise
        return None


@contextmanager
def existing_database(storage: str | None, stop: Stop | None = None) -> Iterator[Storage]:
    """The database at --storage. Raises NoDatabaseError where there is none.

    With `stop` it waits for a database that is away, until that is set.
    """
    from hpo.study.store.database import storage_url
    from hpo.study.store.storage import open_storage

    with open_storage(storage_url(storage), create=False, stop=stop) as database:
        yield database


@contextmanager
def existing_study(study: str, storage: str | None) -> Iterator[tuple[Storage, StudyRecord]]:
    """The database at --storage and what it has of STUDY, for commands that only read.

    A name is that of a study in the database, if there is one, as in `load_to_work`. Raises StorageError
    where there is none.
    """
    from hpo.study.reading.reader import read_study

    config = load_file(study)
    with existing_database(storage) as database:
        is_stored = not is_path(study) and database.has_study(study)
        yield database, read_study(database, study if is_stored or config is None else config.name)


def config_of(study: str, record: StudyRecord, trust_remote_code: bool) -> StudyConfig:
    """The study as in its file, or as stored without one, or where the file is of another study.

    Raises StudyChangedError when the file says something else than the study was made with, and InputError as
    `check_trust` does.
    """
    from hpo.config.study_config import stored_study
    from hpo.study.running.run import check_trust

    given, stored = load_file(study), record.definition
    if given is not None and given.name != record.name:
        given = None
    config = given.resumed(stored) if given else stored_study(record.name, stored)
    check_trust(config, given, trust_remote_code)
    return config


def checkpoint_of(
    config: StudyConfig,
    database: Storage,
    trial: TrialRecord,
    *,
    device: str | None = None,
    kind: Literal["best", "step"] = "best",
) -> tuple[Executor, Path]:
    """An executor of the study, on `device` in place of the study's, and the folder with the newest
    checkpoint of that kind of one of its trials, brought here.

    Raises InputError where the trial has parameters that are not of the study, such as the encoder of whoever
    writes to the database.
    """
    from hpo.config.search_space import refusal
    from hpo.device import probe_device
    from hpo.study.checkpoints.remote_store import open_remote_store
    from hpo.study.store.studies import check_data
    from hpo.trial.executor import Executor

    if said := refusal(config.search_space, trial.params):
        raise InputError(f"Trial {trial.number} is none of the study `{config.name}`: {said}")
    make_runs_folder(config.name)
    executor = Executor(config, probe_device(device or config.device), RUNS)
    check_data(database, config.name, executor.dataset.fingerprint)
    folder = executor.trial_folder(database.study_token(config.name), trial.origin)
    if (remote := open_remote_store(config.checkpoint)) is not None:
        remote.fetch_newest(kind, folder)
    return executor, folder
