"""Which checkpoints of a study are kept, and which database a folder of them belongs to.

Several databases may share one `runs/`, and only its own knows whether a study is still there. So the folder
of a study's checkpoints says in a file which that is, without the password.
"""

from __future__ import annotations

from pathlib import Path

import optuna
from optuna.study import StudyDirection
from optuna.trial import TrialState

from hpo.study.database import parse_url, sqlite_path

_NOTE = "database"


def noted_database(url: str) -> str:
    """Return what says which database the one at `url` is."""
    parsed = parse_url(url)
    path = sqlite_path(parsed)
    if path is not None:
        return str(path.resolve())
    return f"{parsed.host or ''}:{parsed.port or 5432}/{parsed.database}"


def note_database(folder: Path, url: str) -> None:
    """Note in the folder of a study's checkpoints which database has the study."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _NOTE).write_text(noted_database(url))


def database_of(folder: Path) -> str | None:
    """Return what `note_database` has noted in a folder; None: nothing."""
    note = folder / _NOTE
    return note.read_text() if note.is_file() else None


def kept_checkpoints(study: optuna.Study, top_k: int) -> set[int]:
    """Return the numbers of the best `top_k` complete trials.

    Best is by the first objective; with several, the trials of the Pareto front come first.
    """
    sign = 1 if study.directions[0] == StudyDirection.MAXIMIZE else -1
    front = {trial.number for trial in study.best_trials} if len(study.directions) > 1 else set()
    complete = list(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))
    complete.sort(key=lambda trial: (trial.number not in front, -sign * trial.values[0], trial.number))
    return {trial.number for trial in complete[:top_k]}
