"""Problems of the studies in a database and of their checkpoints, each with a repair.

Repairs are safe while workers run. Several databases may share one `runs/`, so a folder of checkpoints is
removed only if a study of this database made it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from optuna.trial import TrialState

from hpo.config.allowed import check_allowed, checkpoint_path
from hpo.config.sections import CheckpointConfig
from hpo.errors import HpoError, InputError, StorageError, printable
from hpo.outcome import Outcome
from hpo.study.checkpoints.checkpoint_folders import is_of, noted_database
from hpo.study.checkpoints.keep_best import Ended, without_checkpoints
from hpo.study.checkpoints.remote_store import TRIAL_FOLDER, open_remote_store
from hpo.study.reading.reader import read_study
from hpo.study.store.failures import DATABASE_ERRORS, definition_of, explain
from hpo.study.store.foreign import (
    count_optuna_orphans,
    deleted_studies,
    in_state,
    is_foreign,
    remove_deleted,
    remove_optuna_orphans,
)
from hpo.study.store.lifecycle import checkpoint_config
from hpo.study.store.optuna_internals import end_trial
from hpo.study.store.storage import Storage, open_storage


@dataclass(frozen=True)
class Finding:
    """A problem, found by one of the checks."""

    check: str
    problem: str
    remedy: str = ""  # effect of `mend`, or advice for the user
    mend: Callable[[], object] | None = field(default=None, repr=False, compare=False)
    mended: bool = False

    def as_json(self) -> dict[str, Any]:
        names = ("check", "problem", "remedy", "mended")
        return {name: getattr(self, name) for name in names} | {"can_fix": self.mend is not None}

    def text(self) -> str:
        how = "Mended. " if self.mended else "--fix: " if self.mend else ""
        return printable(f"  {self.problem}" + (f"\n  {how}{self.remedy}" if self.remedy else ""))

    def repaired(self) -> Finding:
        """Repair the problem if possible. The remedy reports a failure."""
        if self.mend is None:
            return self
        try:
            self.mend()
        except (HpoError, OSError) as error:
            return replace(self, remedy=f"{self.remedy} That failed: {error}", mend=None)
        return replace(self, mended=True)


def examine(url: str, runs_dir: Path, *, study: str | None = None, fix: bool = False) -> Iterator[Finding]:
    """Yield the problems of all studies, or of `study`, and mend them if `fix`. Raises HpoError."""
    try:
        with open_storage(url, create=False) as storage:
            if study is not None:
                storage.load_study(study)
            findings = chain(
                _lost_trials(storage, study), _orphans(storage, study), _checkpoints(storage, runs_dir, study)
            )
            for finding in findings:
                yield finding.repaired() if fix else finding
    except DATABASE_ERRORS as error:
        raise explain(url, error) from error


def _lost_trials(storage: Storage, study: str | None) -> Iterator[Finding]:
    """Find RUNNING trials that no worker of the study made."""
    for name in [row.name for row in storage.read(storage.studies) if study in (None, row.name)]:
        lost = in_state(name, TrialState.RUNNING).where(is_foreign(name))
        for trial_id, number in storage.read(partial(_ids_and_numbers, lost)):
            yield Finding(
                "lost trials",
                f"Study {name}: trial {number} is RUNNING, but no worker of the study made it.",
                "Ends it as FAIL, which samplers do not see.",
                partial(storage.write, partial(_give_up, trial_id)),
            )


def _ids_and_numbers(query: sa.Select[Any], connection: sa.Connection) -> list[tuple[int, int]]:
    return [(row.trial_id, row.number) for row in connection.execute(query)]


def _give_up(trial_id: int, connection: sa.Connection) -> None:
    reason = "it was RUNNING, but no worker of the study made it, so no worker continues it."
    attributes = {"outcome": Outcome.FAILED, "outcome_reason": reason}
    end_trial(connection, trial_id, TrialState.FAIL, user_attrs=attributes)


def _orphans(storage: Storage, study: str | None) -> Iterator[Finding]:
    """Find rows without their study or trial."""
    if study is None and (counts := storage.read(count_optuna_orphans)):
        listed = ", ".join(f"{count} of {name}" for name, count in counts.items())
        problem = f"Rows of Optuna's tables whose study or trial is gone: {listed}."
        remedy = "Removes them. Else a new study would have them."
        yield Finding("orphans", problem, remedy, partial(storage.write, remove_optuna_orphans))
    for name in storage.read(partial(deleted_studies, storage)):
        if study in (None, name):
            problem = f"Study {name} was deleted, but this database still has rows of it."
            yield Finding("orphans", problem, "Removes them.", partial(remove_deleted, storage, name))


def _checkpoints(storage: Storage, runs_dir: Path, study: str | None) -> Iterator[Finding]:
    """Find folders of checkpoints, in `runs/` and in the locations of studies, that no trial will read."""
    known: dict[str, tuple[str, CheckpointConfig | None]] = {}
    roots = {runs_dir}
    for row in storage.read(storage.studies):
        known[f"checkpoints-{row.token[:8]}"] = row.name, None
        if study not in (None, row.name):
            continue
        try:
            config = checkpoint_config(row.name, definition_of(row.name, row.definition))
            check_allowed(row.name, checkpoint_path(config))
        except StorageError as error:
            yield Finding("checkpoints", f"Study {row.name}: its definition is damaged.", str(error))
            continue
        except InputError as error:
            yield Finding("checkpoints", f"Study {row.name}: its checkpoints were not examined.", str(error))
            config = config.model_copy(update={"location": None})
        folder = config.folder_of(row.name, row.token, runs_dir)
        known[folder.name] = row.name, config
        roots.add(folder.parents[1])
    here = noted_database(storage)
    for folder in sorted(folder for root in roots for folder in root.glob("*/checkpoints-*")):
        is_known = folder.name in known
        name, settings = known.get(folder.name, (folder.parent.name, None))
        if study not in (None, name) or not folder.is_dir() or not is_of(folder, here):
            continue
        if settings is not None:
            yield from _unread_checkpoints(storage, name, settings, folder)
        elif not is_known:
            problem = f"{folder} ({_mib(folder)}) is of a study that this database does not have."
            yield Finding("checkpoints", problem, "Removes it.", partial(shutil.rmtree, folder))


def _unread_checkpoints(
    storage: Storage, study: str, config: CheckpointConfig, folder: Path
) -> Iterator[Finding]:
    trial_folders = {  # before the trials are read, so that each has its trial
        path: int(name[1])
        for path in sorted(folder.iterdir())
        if path.is_dir() and (name := TRIAL_FOLDER.fullmatch(path.name))
    }
    try:
        record = read_study(storage, study)
    except StorageError as error:  # a trial is damaged
        yield Finding("checkpoints", f"Study {study}: its checkpoints were not examined.", str(error))
        return
    trials = {trial.number for trial in record.trials}
    ended = [
        Ended(trial.number, trial.values, trial.constraints, trial.outcome, trial.reason)
        for trial in record.trials
        if trial.ended is not None
    ]
    gone = without_checkpoints(ended, record.directions, config.top_k)
    for trial_folder, number in trial_folders.items():
        if number not in trials or number in gone:
            why = "one of the best" if number in trials else "of this study"
            problem = f"{trial_folder} ({_mib(trial_folder)}) is of trial {number}, which is not {why}."
            yield Finding("checkpoints", problem, "Removes it.", partial(shutil.rmtree, trial_folder))
    if config.is_remote and (remote := open_remote_store(config)) and remote.trials(folder) & gone:
        problem = f"Study {study}: {config.location} has checkpoints of trials that keep none."
        remove = partial(remote.remove_trials, folder, gone)
        yield Finding("checkpoints", problem, "Removes them.", remove)


def _mib(folder: Path) -> str:
    return f"{sum(file.stat().st_size for file in folder.rglob('*') if file.is_file()) / 2**20:.1f} MiB"


def summary(findings: Sequence[Finding], place: str) -> str:
    """Count the mended and the remaining problems in a sentence."""
    left = [finding for finding in findings if not finding.mended]
    can, mended = sum(finding.mend is not None for finding in left), len(findings) - len(left)
    to_mend = f"{mended} mended, {len(left) or 'nothing'} left" if mended else f"{len(left) or 'nothing'}"
    return f"{place}: {to_mend} to mend." + (f" `hpo doctor --fix` mends {can}." if can else "")
