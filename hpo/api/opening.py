"""Find the study and the database that a user names, and the folder for the output."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import typer

from hpo import code as codes
from hpo.config.sections import BUDGET_TRIALS, MAX_TRIALS, BudgetConfig
from hpo.config.study_config import StudyConfig, load_study, stored_study
from hpo.errors import (
    InputError,
    NoDatabaseError,
    NoStudyError,
    NoStudyFileError,
    StudyFileError,
    printable,
)
from hpo.json_safe import is_number
from hpo.study.running.stopping import Stop
from hpo.study.store.database import URL_FROM_FILE, shown_url
from hpo.study.store.storage import existing_database

TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Environment variable of the processes that torchrun starts."""
RUNS = Path("runs")
"""Folder for all output, in the working folder."""


def to_run(config: StudyConfig, n_trials: int | None = None, hours: float | None = None) -> StudyConfig:
    """Replace the study's number of trials or device-hours if given, and make its output folder."""
    make_runs_folder(config.name)
    check_positive(n_trials=n_trials, hours=hours)
    if n_trials is not None and (n_trials % 1 or n_trials > MAX_TRIALS):
        raise InputError(f"`n_trials` must be a whole number <= {MAX_TRIALS}, but got {n_trials}.")
    if hours is not None:
        config = config.with_values(budget=BudgetConfig(hours=hours), n_trials=BUDGET_TRIALS)
    return config if n_trials is None else config.with_values(n_trials=n_trials)


def trust(code: str) -> None:
    """Let studies and models use this code. Raises InputError if there is none."""
    try:
        codes.trust(code)
    except ValueError as error:
        raise InputError(f"The code `{code}` {error}") from None


def check_positive(**given: float | None) -> None:
    """Raise InputError if a given number is not above 0."""
    for name, value in given.items():
        if value is not None and not (is_number(value) and value > 0):
            raise InputError(f"`{name}` must be > 0, but got {value}.")


def check_workers(workers: int | None, per_device: int | None) -> None:
    """Raise InputError if the numbers of worker processes contradict each other or torchrun."""
    check_positive(workers=workers, workers_per_device=per_device)
    if workers and per_device:
        raise InputError(
            f"--workers {workers} counts all processes on this machine and --workers-per-device "
            f"{per_device} the processes for each device. Give one of them."
        )
    if TORCHRUN in os.environ and (workers or per_device):
        raise InputError(
            "the processes of torchrun are one worker: --workers and --workers-per-device must be left out."
        )


def file_given(storage: str | None) -> str | None:
    """Return the URL if it has the form `@FILE`: other processes receive no more than that."""
    return storage if storage and storage.startswith(URL_FROM_FILE) else None


def load_to_work(
    study: str, url: str, stop: Stop | None = None, n_trials: int | None = None
) -> tuple[StudyConfig, bool]:
    """Call `find_study`, replace its number of trials if given, and make its output folder."""
    config, is_file = find_study(study, url, stop)
    return to_run(config, n_trials), is_file


def find_study(study: str, url: str, stop: Stop | None = None) -> tuple[StudyConfig, bool]:
    """Return the study for a worker, and whether it comes from the user's own file.

    A name means the study in the database, if there is one, even if `studies/` has such a file. `stop` as in
    `existing_database`.
    """
    unknown = f"There is no study `{study}` in {shown_url(url)}."
    if not is_path(study):
        try:
            with existing_database(url, stop) as storage:
                if storage.has_study(study):
                    return stored_study(study, storage.read_definition(study)), False
        except NoDatabaseError as error:
            unknown = str(error)
    try:
        return load_study(study), True
    except NoStudyFileError as error:
        if is_path(study):
            raise
        raise InputError(f"{unknown} As a file, {error}") from None


def is_path(study: str) -> bool:
    """Tell the path of a study file from a name."""
    return Path(study).suffix in (".yaml", ".yml") or "/" in study


def make_runs_folder(study_name: str) -> None:
    """Make the output folder of a study. Raises InputError if it cannot be written."""
    folder = RUNS / study_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise InputError(
            f"hpo writes to {RUNS}/ in the working folder, so {folder.absolute()} must be a writable folder, "
            f"but: {error.strerror}. Run hpo in another folder."
        ) from None


def load_file(study: str) -> StudyConfig | None:
    """Return the study of a file; None if STUDY can only be a name in the database."""
    try:
        return load_study(study)
    except StudyFileError:
        if is_path(study):
            raise
        return None


@contextmanager
def file_error_first(study: str) -> Iterator[None]:
    """Raise the error of an invalid study file, if the database does not have the study."""
    try:
        yield
    except (NoDatabaseError, NoStudyError):
        with suppress(NoStudyFileError):
            _ = study and load_study(study)
        raise


class _Stderr(logging.Handler):
    """Writes to the present `sys.stderr`, which a test or a notebook may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(printable(self.format(record)), err=True)


@contextmanager
def progress_shown(*, quiet: bool) -> Iterator[None]:
    """Show the library's log messages on stderr during the block; only warnings if `quiet`."""
    logger, handler = logging.getLogger("hpo"), _Stderr(logging.WARNING if quiet else logging.INFO)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(handler.level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
