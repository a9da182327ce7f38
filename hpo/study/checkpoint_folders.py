"""Which checkpoints of a study are kept, and which database a folder of them belongs to.

Several databases may share one `runs/`, and only its own knows whether a study is still there. After `hpo
copy` two of them have the same study with the same checkpoints. So the folder of a study's checkpoints says
in a file, without the password, which database has worked on the study last: that one alone removes them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import optuna
from optuna.study import StudyDirection
from optuna.trial import TrialState

from hpo.errors import RunError
from hpo.outcome import Outcome
from hpo.study.database import parse_url, sqlite_path

if TYPE_CHECKING:
    from hpo.study.storage import Storage

_NOTE = "database"
NUM_NONFINITE = 2
"""Trials that were not finite whose checkpoints stay, with the optimiser's state; no more than the best."""


def noted_database(storage: Storage) -> str:
    """Return what says which database this is.

    PostgreSQL is known by the number that its files were given when they were made: the host and port of a
    private one change.
    """
    url = parse_url(storage.url)
    path = sqlite_path(url)
    if path is not None:
        return str(path.resolve())
    number = storage.persist(lambda: _system_identifier(storage))
    return f"{url.host or ''}:{url.port or 5432}/{url.database} of server {number}"


def _system_identifier(storage: Storage) -> int:
    with storage.engine.connect() as connection:
        query = "SELECT system_identifier FROM pg_control_system()"
        return int(connection.exec_driver_sql(query).scalar_one())


def note_database(folder: Path, storage: Storage) -> None:
    """Note in the folder of a study's checkpoints which database has the study."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _NOTE).write_text(noted_database(storage))


def database_of(folder: Path) -> str | None:
    """Return what `note_database` has noted in a folder; None: nothing."""
    note = folder / _NOTE
    return note.read_text() if note.is_file() else None


def is_of(folder: Path, noted: str) -> bool:
    """Whether the folder is of the database that `noted_database` describes so, whatever its host is now."""
    note = database_of(folder)
    return note is not None and note.partition("/")[2] == noted.partition("/")[2]


def remove_checkpoints(folder: Path, noted: str) -> str:
    """Remove a study's folder of checkpoints if it is of this database; return what became of it.

    A link, which `hpo copy --name` makes, is removed and what it leads to is left.

    Raises RunError where it cannot be removed.
    """
    try:
        if folder.is_symlink():
            target = folder.resolve()
            folder.unlink()
            return f"The link {folder} is removed; the checkpoints stay in {target}, where it led"
        if not folder.is_dir():
            return f"There were no checkpoints in {folder}"
        if not is_of(folder, noted):
            whose = database_of(folder) or "an unknown database"
            return f"Its checkpoints stay in {folder}: {whose} has used them last"
        shutil.rmtree(folder)
    except OSError as error:
        raise RunError(f"The checkpoints in {folder} cannot be removed: {error.strerror}.") from None
    return f"Its checkpoints in {folder} are removed"


def kept_checkpoints(study: optuna.Study, top_k: int) -> set[int]:
    """Return the numbers of the trials that keep theirs: the best `top_k`, and the last that were not finite.

    Best of the complete ones is by the first objective; with several, the trials of the Pareto front come
    first. From the checkpoints of the others, at most `NUM_NONFINITE` trials, `hpo diagnose` goes on.
    """
    sign = 1 if study.directions[0] == StudyDirection.MAXIMIZE else -1
    front = {trial.number for trial in study.best_trials} if len(study.directions) > 1 else set()
    complete = list(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))
    complete.sort(key=lambda trial: (trial.number not in front, -sign * trial.values[0], trial.number))
    nonfinite = [
        trial.number
        for trial in study.get_trials(deepcopy=False)
        if trial.state.is_finished() and trial.user_attrs.get("outcome") == Outcome.NONFINITE
    ]
    num_nonfinite = min(top_k, NUM_NONFINITE)
    return {*(trial.number for trial in complete[:top_k]), *sorted(nonfinite, reverse=True)[:num_nonfinite]}
