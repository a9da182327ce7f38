"""Problems of the studies in a database and of their checkpoints, each with a way to mend it.

A check is a function that yields findings. To add one, write it and put it into `CHECKS`. Mending is safe
while workers run. A folder of checkpoints is removed only if this database is known to have had its study,
because several databases may share one `runs/`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from optuna.trial import TrialState

from hpo.config.allowed import check_allowed, checkpoint_place
from hpo.errors import HpoError, InputError, StorageError, printable
from hpo.outcome import Outcome
from hpo.study.checkpoints.checkpoint_folders import is_of, noted_database
from hpo.study.checkpoints.keep_best import Ended, without_checkpoints
from hpo.study.checkpoints.remote_store import open_remote_store
from hpo.study.reading.overview import say_damaged
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import StudyRecord
from hpo.study.store.failures import DATABASE_ERRORS, explain
from hpo.study.store.foreign import in_state, is_foreign
from hpo.study.store.lifecycle import checkpoint_config
from hpo.study.store.optuna_internals import end_trial
from hpo.study.store.orphans import (
    count_optuna_orphans,
    deleted_studies,
    remove_deleted,
    remove_optuna_orphans,
)
from hpo.study.store.storage import Storage, open_storage


@dataclass(frozen=True)
class Finding:
    """A problem."""

    problem: str
    remedy: str = ""
    """The effect of `mend` or, without it, the remedy."""
    mend: Callable[[], object] | None = field(default=None, repr=False, compare=False)
    check: str = ""
    mended: bool = False

    def as_json(self) -> dict[str, Any]:
        names = ("check", "problem", "remedy", "mended")
        return {name: getattr(self, name) for name in names} | {"can_fix": self.mend is not None}

    def text(self) -> str:
        how = "Mended. " if self.mended else "--fix: " if self.mend else ""
        return printable(f"  {self.problem}" + (f"\n  {how}{self.remedy}" if self.remedy else ""))


@dataclass(frozen=True)
class Examined:
    """An open database with the tables of this hpo, and this host."""

    storage: Storage
    runs_dir: Path
    named: str | None = None

    def studies(self) -> list[sa.Row[Any]]:
        """The rows of `hpo_studies` of the studies that are there, but for damaged ones."""
        rows = self.storage.read(self.storage.studies)
        return [row for row in rows if self.named in (None, row.name) and _is_readable(row)]


def _is_readable(row: sa.Row[Any]) -> bool:
    try:
        checkpoint_config(row.name, json.loads(row.definition))
    except (ValueError, AttributeError, StorageError) as error:
        say_damaged(row.name, str(error))
        return False
    return True


def lost_trials(about: Examined) -> Iterator[Finding]:
    """Trials that are RUNNING, and that no worker of the study made."""
    for row in about.studies():
        lost = in_state(row.name, "RUNNING").where(is_foreign(row.name))
        for trial_id, number in about.storage.read(partial(_ids_and_numbers, lost)):
            yield Finding(
                f"Study {row.name}: trial {number} is RUNNING, but no worker of the study made it.",
                "Ends it as FAIL, which samplers do not see.",
                partial(about.storage.write, partial(_give_up, trial_id)),
            )


def _ids_and_numbers(query: sa.Select[Any], connection: sa.Connection) -> list[tuple[int, int]]:
    return [(row.trial_id, row.number) for row in connection.execute(query)]


def _give_up(trial_id: int, connection: sa.Connection) -> None:
    reason = "it was RUNNING, but no worker of the study made it, so no worker continues it."
    attributes = {"outcome": Outcome.FAILED, "outcome_reason": reason}
    end_trial(connection, trial_id, TrialState.FAIL, user_attrs=attributes)


def orphans(about: Examined) -> Iterator[Finding]:
    """Rows whose study or trial is gone."""
    storage = about.storage
    if about.named is None and (counts := storage.read(count_optuna_orphans)):
        listed = ", ".join(f"{count} of {name}" for name, count in counts.items())
        yield Finding(
            f"Rows of Optuna's tables whose study or trial is gone: {listed}. A new study would have them.",
            "Removes them.",
            partial(storage.write, remove_optuna_orphans),
        )
    for name in storage.read(partial(deleted_studies, storage)):
        if about.named in (None, name):
            what = f"Study {name} was deleted, but this database still has rows of it."
            yield Finding(what, "Removes them.", partial(remove_deleted, storage, name))


def checkpoints(about: Examined) -> Iterator[Finding]:
    """Folders, under `runs/` and where studies keep their checkpoints, that no trial will read."""
    rows = {f"checkpoints-{row.token[:8]}": row for row in Examined(about.storage, about.runs_dir).studies()}
    configs = {row.name: checkpoint_config(row.name, json.loads(row.definition)) for row in rows.values()}
    for name, config in configs.items():
        try:
            check_allowed(name, checkpoint_place(config))
        except InputError as error:
            yield Finding(f"Study {name}: its checkpoints are not looked at.", str(error))
            configs[name] = config.model_copy(update={"location": None})
    folders = [configs[row.name].folder_of(row.name, row.token, about.runs_dir) for row in rows.values()]
    roots = {about.runs_dir, *(folder.parents[1] for folder in folders)}
    here = noted_database(about.storage)
    for folder in sorted(folder for root in roots for folder in root.glob("*/checkpoints-*")):
        if not folder.is_dir() or not is_of(folder, here):
            continue
        row = rows.get(folder.name)
        if about.named not in (None, folder.parent.name if row is None else row.name):
            continue
        if row is None:
            what = f"{folder} ({_mib(folder)}) is of a study that this database does not have."
            yield Finding(what, "Removes it.", partial(shutil.rmtree, folder))
            continue
        of_trials = sorted(folder.glob("trial-*"))  # before the trials are read, so that each has its trial
        record = read_study(about.storage, row.name, brief=True)
        trials = {trial.number for trial in record.trials}
        gone = without_checkpoints(_ended(record), record.directions, configs[row.name].top_k)
        for of_trial in of_trials:
            number = int(of_trial.name.removeprefix("trial-"))
            if number not in trials or number in gone:
                why = "one of the best" if number in trials else "of this study"
                what = f"{of_trial} ({_mib(of_trial)}) is of trial {number}, which is not {why}."
                yield Finding(what, "Removes it.", partial(shutil.rmtree, of_trial))
        config = configs[row.name]
        if config.is_remote and (remote := open_remote_store(config)) and remote.trials(folder) & gone:
            what = f"Study {row.name}: {config.location} has checkpoints of trials that keep none."
            yield Finding(what, "Removes them.", partial(remote.remove_trials, folder, gone))


def _ended(record: StudyRecord) -> list[Ended]:
    return [
        Ended(trial.number, trial.values, trial.constraints, trial.outcome, trial.reason)
        for trial in record.trials
        if trial.ended is not None
    ]


def _mib(folder: Path) -> str:
    return f"{sum(file.stat().st_size for file in folder.rglob('*') if file.is_file()) / 2**20:.1f} MiB"


CHECKS: Sequence[Callable[[Examined], Iterator[Finding]]] = (lost_trials, orphans, checkpoints)


def summary(findings: Sequence[Finding], place: str) -> str:
    """State how many problems were mended, and how many are left."""
    left = [finding for finding in findings if not finding.mended]
    can, mended = sum(finding.mend is not None for finding in left), len(findings) - len(left)
    to_mend = f"{mended} mended, {len(left) or 'nothing'} left" if mended else f"{len(left) or 'nothing'}"
    return f"{place}: {to_mend} to mend." + (f" `hpo doctor --fix` mends {can}." if can else "")


def examine(url: str, runs_dir: Path, *, study: str | None = None, fix: bool = False) -> Iterator[Finding]:
    """Yield the problems of the studies (or of `study` alone) in the database at `url` and on this host.

    With `fix`, each problem is mended before it is yielded, where it can be.

    Raises:
        StorageError: there is no such database, it does not answer, or it has no such study.
        HpoError: the database failed meanwhile.
    """
    try:
        with open_storage(url, create=False) as storage:
            if study is not None:
                storage.load_study(study)
            for check in CHECKS:
                for finding in check(Examined(storage, runs_dir, study)):
                    named = replace(finding, check=check.__name__.replace("_", " "))
                    yield _mended(named) if fix and finding.mend is not None else named
    except DATABASE_ERRORS as error:
        raise explain(url, error) from error


def _mended(finding: Finding) -> Finding:
    """Mend a problem; where that fails, say so in its remedy."""
    assert finding.mend is not None
    try:
        finding.mend()
    except (HpoError, OSError) as error:
        return replace(finding, remedy=f"{finding.remedy} That failed: {error}", mend=None)
    return replace(finding, mended=True)
