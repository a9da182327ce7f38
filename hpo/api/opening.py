"""Which study a name, a path or a definition in a database is, and where what belongs to it lies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpo.errors import InputError

if TYPE_CHECKING:
    from hpo.config.study_config import StudyConfig
    from hpo.study.running.stopping import Stop
    from hpo.study.store.storage import Storage

TORCHRUN = "TORCHELASTIC_RUN_ID"

RUNS = Path("runs")
"""In the working folder: all that a run makes."""


def to_run(config: StudyConfig, n_trials: int | None = None, hours: float | None = None) -> StudyConfig:
    """The study with so many trials or device-hours if given; its folder in `runs/` is made. Raises
    InputError."""
    from hpo.config.sections import MAX_TRIALS, BudgetConfig

    make_runs_folder(config.name)
    check_positive(n_trials=n_trials, hours=hours)
    if hours is not None:
        config = config.with_values(budget=BudgetConfig(hours=hours), n_trials=MAX_TRIALS)
    return config if n_trials is None else config.with_values(n_trials=n_trials)


def trust(code: str) -> None:
    """Let studies and models use this code. Raises InputError where there is none."""
    from hpo import code as codes

    try:
        codes.trust(code)
    except ValueError as error:
        raise InputError(f"The code `{code}` {error}") from None


def check_positive(**given: float | None) -> None:
    """Raise InputError where a number that is given is not above 0."""
    for name, value in given.items():
        if value is not None and not value > 0:
            raise InputError(f"`{name}` must be > 0, but got {value}.")


def check_workers(workers: int | None, per_device: int | None) -> None:
    """Raise InputError where the processes that a run on this machine shall have contradict each other."""
    check_positive(workers=workers, workers_per_device=per_device)
    if workers and per_device:
        raise InputError(
            f"--workers {workers} counts all processes of this machine and --workers-per-device "
            f"{per_device} those of each device. Give one of them."
        )
    if TORCHRUN in os.environ and (workers or per_device):
        raise InputError(
            "the processes of torchrun are one worker: --workers and --workers-per-device must be left out."
        )


def file_given(storage: str | None) -> str | None:
    """`@FILE`, where the user named the database so: processes elsewhere get no more than that."""
    from hpo.study.store.database import URL_FROM_FILE

    return storage if storage and storage.startswith(URL_FROM_FILE) else None


def load_to_work(
    study: str, url: str, stop: Stop | None = None, n_trials: int | None = None
) -> tuple[StudyConfig, bool]:
    """`find_study`, with so many trials if given, and a folder for what a run makes."""
    config, is_file = find_study(study, url, stop)
    return to_run(config, n_trials), is_file


def find_study(study: str, url: str, stop: Stop | None = None) -> tuple[StudyConfig, bool]:
    """Return the study as a worker runs it, and whether it is the one in the user's own file.

    A name is that of a study in the database, if there is one, whatever lies in studies/. A path, and a name
    that the database does not have, are a study file. `stop` as in `existing_database`.
    """
    from hpo.config.study_config import load_study, stored_study
    from hpo.errors import NoDatabaseError, NoStudyFileError
    from hpo.study.store.database import shown_url

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
def file_error_first(study: str) -> Iterator[None]:
    """Raise the error of a study file that is not valid, where the database does not have the study."""
    from hpo.errors import NoDatabaseError, NoStudyError, NoStudyFileError

    try:
        yield
    except (NoDatabaseError, NoStudyError):
        from hpo.config.study_config import load_study  # slow to import

        with suppress(NoStudyFileError):
            _ = study and load_study(study)
        raise


def existing_database(storage: str | None, stop: Stop | None = None) -> Storage:
    """The database, as `Study` takes its URL. Raises NoDatabaseError where there is none.

    With `stop` it waits for a database that is away, until that is set.
    """
    from hpo.study.store.database import storage_url
    from hpo.study.store.storage import open_storage

    return open_storage(storage_url(storage), create=False, stop=stop)
