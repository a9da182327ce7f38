"""What the commands share: their options, the place of the study, and what they print."""

from __future__ import annotations

import inspect
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpo.errors import InputError

if TYPE_CHECKING:
    from hpo.config.study_config import StudyConfig
    from hpo.study.stopping import Stop
    from hpo.study.storage import Storage
    from hpo.study.study_record import StudyRecord
    from hpo.trial.executor import Executor

RUNS = Path("runs")
"""In the working folder: all that a run makes."""

MAX_RESTARTS = 10
"""So often a worker process that dies is started again within an hour, by default."""

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
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS", callback=_positive_seconds, help="No further trial begins after so long."
    ),
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
WorkersPerDeviceOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=100,
        metavar="K",
        help="Processes for each GPU of this machine, or on its CPU; not with --workers.",
    ),
]
MaxRestartsOption = Annotated[
    int,
    typer.Option(
        min=0,
        max=1000,
        metavar="N",
        help="A worker process that dies is started again, at most so often an hour.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def with_options(*tables: Mapping[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command that takes `**options` those of the tables, None where they are not given."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [found for found in signature.parameters.values() if found.kind is not found.VAR_KEYWORD]
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for table in tables
            for name, annotation in table.items()
        ]
        command.__signature__ = signature.replace(parameters=own + more)  # type: ignore[attr-defined]
        command.__annotations__ = {found.name: found.annotation for found in own + more}
        return command

    return decorate


def print_json(value: Any) -> None:
    """Print `value` as the only output of a command with `--json`."""
    from hpo.json_safe import json_safe

    typer.echo(json.dumps(json_safe(value), indent=2, default=str))


class _Stderr(logging.Handler):
    """Writes to `sys.stderr` as it is now: a progress bar has its own."""

    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(self.format(record), err=True)


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
def stop_signals(until: float | None = None) -> Iterator[Stop]:
    """`stop_on_signals`; a second SIGINT ends the command at once, with a word on what that means."""
    from hpo.study.stopping import stop_on_signals

    try:
        with stop_on_signals(until) as stop:
            yield stop
    except KeyboardInterrupt:
        typer.echo("Ended at once. A study goes on from the last checkpoint when it is run again.", err=True)
        raise typer.Exit(130) from None


def load_to_run(study: str, **options: Any) -> StudyConfig:
    """The study's file, with options that were given in place of its keys, and a folder for what a run makes.

    Raises InputError where that cannot be made.
    """
    from hpo.config.study_config import load_study

    config = load_study(study)
    make_runs_folder(config.name)
    return config.with_values(**{key: value for key, value in options.items() if value is not None})


def file_given(storage: str | None) -> str | None:
    """`@FILE`, where the user named the database so: processes elsewhere get no more than that."""
    from hpo.study.database import URL_FROM_FILE

    return storage if storage and storage.startswith(URL_FROM_FILE) else None


def load_to_work(study: str, url: str, stop: Stop | None = None, **options: Any) -> tuple[StudyConfig, bool]:
    """The study as a worker runs it, and whether the user's own file trusts the encoder's code.

    With `stop` it waits for a database that is away, until that is set.

    A name is that of a study in the database, if there is one, whatever lies in studies/; a path, and a name
    that the database does not have, are of a study file. `options` as in `load_to_run`.
    """
    from hpo.config.study_config import stored_study
    from hpo.errors import NoDatabaseError, StudyFileError
    from hpo.study.storage import open_storage

    is_path = Path(study).suffix in (".yaml", ".yml") or "/" in study
    config, unknown = None, ""
    if not is_path:
        try:
            with open_storage(url, create=False, stop=stop) as storage:
                if storage.has_study(study):
                    config = stored_study(study, storage.read_definition(study))
        except NoDatabaseError as error:
            unknown = str(error)
    if config is None:
        try:
            config = load_to_run(study, **options)
        except StudyFileError as error:
            if is_path:
                raise
            from hpo.study.database import place

            nowhere = unknown or f"There is no study `{study}` in {place(url)}."
            raise InputError(f"{nowhere} As a file, {error}") from None
        return config, config.model.trust_remote_code
    make_runs_folder(config.name)
    return config.with_values(**{key: value for key, value in options.items() if value is not None}), False


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
        if Path(study).suffix in (".yaml", ".yml") or "/" in study:
            raise
        return None


@contextmanager
def existing_study(study: str, storage: str | None) -> Iterator[tuple[Storage, StudyRecord]]:
    """The database at --storage and what it has of STUDY, for commands that only read.

    Raises StorageError where there is none.
    """
    from hpo.study.database import storage_url
    from hpo.study.storage import open_storage

    config = load_file(study)
    with open_storage(storage_url(storage), create=False) as database:
        yield database, database.read_study(config.name if config else study)


def config_of(study: str, record: StudyRecord, trust_remote_code: bool) -> StudyConfig:
    """The study as in its file, or as stored without one.

    Raises StudyChangedError when the file says something else than the study was made with, InputError where
    the encoder's code is to run and neither the file nor the option trusts it.
    """
    from hpo.config.study_config import stored_study
    from hpo.study.run import check_trust

    given, stored = load_file(study), record.definition
    config = given.completed(stored) if given else stored_study(record.name, stored)
    check_trust(config, trust_remote_code or bool(given and given.model.trust_remote_code))
    return config


def checkpoint_of(
    config: StudyConfig,
    database: Storage,
    number: int,
    executor: Executor | None = None,
    *,
    device: str | None = None,
) -> tuple[Executor, Path]:
    """An executor of the study (that given, or a new one, on `device` in place of the study's), and the
    folder with the checkpoint of one of its trials, brought here."""
    from hpo.device import probe_device
    from hpo.study.artifact_store import open_artifact_store
    from hpo.study.checkpoint_artifacts import fetch_newest
    from hpo.trial.executor import Executor

    if executor is None:
        make_runs_folder(config.name)
        executor = Executor(config, probe_device(device or config.device), RUNS)
        database.check_data(config.name, executor.dataset.fingerprint)
    folder = executor.trial_folder(database.study_token(config.name), number)
    if (artifacts := open_artifact_store(config.checkpoint)) is not None:
        fetch_newest("best", artifacts, database, config.name, number, folder)
    return executor, folder
