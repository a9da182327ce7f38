"""A study in its database: its record, its best trials, and its life from `enqueue` to `delete`.

Nothing here imports PyTorch, so commands such as `hpo status` and `hpo pause` answer at once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hpo.api.opening import RUNS, existing_database, is_path, load_file, progress_shown, trust
from hpo.code import unknown_names_allowed, use_code
from hpo.config.first import fixed_problems
from hpo.config.search_space import encode
from hpo.config.study_config import StudyConfig, load_study, stored_study, study_of
from hpo.config.trial_config import parse_params
from hpo.errors import InputError, NoDatabaseError, RunError
from hpo.extensions import own_loop_of
from hpo.redaction import redact
from hpo.report.messages import progress_message, resume_message
from hpo.report.status import study_status
from hpo.study.checkpoints.checkpoint_folders import note_database, noted_database, remove_checkpoints
from hpo.study.checkpoints.remote_store import remove_uploads
from hpo.study.claims.ending import end_unfinished
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import StudyRecord, TrialRecord, best_trials
from hpo.study.sampling.promotion import WHOLE_ATTR
from hpo.study.store import copy, lifecycle
from hpo.study.store.database import DEFAULT_URL, shown_url, storage_url
from hpo.study.store.lifecycle import StudyState
from hpo.study.store.schema import workers
from hpo.study.store.storage import Storage, open_storage

WAIT_SECONDS = 180.0
"""Longest wait for workers to leave. A worker reads the state within 10 s, but its step may take long; a
worker that died elsewhere counts as live for 60 s."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StudyResult:
    """Result of an operation on a study: `text` is for a person, `as_json` for `--json`."""

    study: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Enqueued(StudyResult):
    """A configuration in the queue of a study."""

    enqueued: Mapping[str, Any]
    """The given settings. The sampler draws the others."""
    ahead: int
    """Number of configurations before it in the queue."""
    whole: bool
    """True if its trial runs to the end, without a pause."""

    def text(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.enqueued.items())
        whole = ", to run to its end" if self.whole else ""
        return f"Queued for {self.study}: {settings}{whole}. Before it in the queue: {self.ahead}."


@dataclass(frozen=True)
class StateChange(StudyResult):
    """The new state of a study."""

    state: StudyState
    before: str
    trials: Mapping[str, int]
    ended: int
    """Number of unfinished trials that the cancellation ended."""

    def text(self) -> str:
        done = progress_message(self.trials)
        if self.state == "open":
            again = "was not paused" if self.before == "open" else f"is no longer {self.before}"
            return f"The study {self.study} {again}: {done}. To continue it: hpo worker {self.study}"
        ends = f", {self.ended} of them by this command" if self.ended else ""
        return f"The study {self.study} is {self.state}: {done}{ends}. {resume_message(self.study)}"


@dataclass(frozen=True)
class Deleted(StudyResult):
    """A deleted study."""

    checkpoints: str
    removed_here: bool
    """True if this machine had its checkpoints and removed them."""
    message: str

    def as_json(self) -> dict[str, Any]:
        facts = {"checkpoints": self.checkpoints, "removed_here": self.removed_here}
        return {"study": self.study, "deleted": True, **facts}

    def text(self) -> str:
        return self.message


@dataclass(frozen=True)
class Copied(StudyResult):
    """A study in another database."""

    trials: int
    counts: Mapping[str, int]
    place: str

    def text(self) -> str:
        text = f"{self.study} is in {self.place}: {self.trials} trials; {progress_message(self.counts)}."
        if self.counts["done"] == sum(self.counts.values()):
            return text
        return f"{text}\nContinue only this copy: both studies would write to the same checkpoints."


class StoredStudy:
    """A study and its database; takes the arguments of `hpo.Study`."""

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
        self._given = study if isinstance(study, Mapping) else None
        self._word = "" if isinstance(study, Mapping) else str(study)
        self._storage, self._trusts, self.quiet = storage, trust_remote_code, quiet
        if self._given is not None or is_path(self._word):
            _ = self._file  # raises if it is not valid

    def __repr__(self) -> str:
        url = redact(self._storage or os.environ.get("HPO_STORAGE") or DEFAULT_URL)
        return f"Study({self._word or self.file.name!r}, storage={url!r})"

    @cached_property
    def _file(self) -> StudyConfig | None:
        """The study of the file or mapping; None if only the database can have it."""
        return load_file(self._word) if self._given is None else study_of(self._given)

    @property
    def file(self) -> StudyConfig:
        """The study of its file or mapping. Raises StudyFileError if there is none."""
        file = self._file if self._file is not None else load_study(self._word)
        use_code(file.code, f"The study `{file.name}`")  # another study's may be in use
        return file

    @property
    def file_name(self) -> str | None:
        """The given name or path of the study file, if there is such a file."""
        return self._word if self._word and self._file is not None else None

    @property
    def record(self) -> StudyRecord:
        """The stored study. Raises StorageError if there is none."""
        with self.opened() as (_, record):
            return record

    @property
    def outline(self) -> StudyRecord:
        """The record in brief (see `read_study`), which is much faster for a large study."""
        with self.opened(brief=True) as (_, record):
            return record

    @contextmanager
    def opened(self, *, brief: bool = False) -> Iterator[tuple[Storage, StudyRecord]]:
        """Open the database and read the study. Raises StorageError if it is not there.

        A name means the study in the database, if there is one, even if `studies/` has such a file.
        """
        with existing_database(self._storage) as database:
            yield database, read_study(database, self._name_in(database), brief=brief)

    @property
    def name(self) -> str:
        """Name of the study in the database, or in its file if there is no database yet."""
        try:
            with existing_database(self._storage) as database:
                return self._name_in(database)
        except NoDatabaseError:
            if self._file is None:
                raise
            return self._file.name

    @property
    def place(self) -> str:
        """The database in words, without a password."""
        return shown_url(storage_url(self._storage))

    def status(self) -> dict[str, Any]:
        """Return the content of `hpo status --json`."""
        return study_status(self.outline)

    def best(self) -> list[TrialRecord]:
        """Return the best complete trial; with several objectives the Pareto front."""
        return best_trials(self.record)

    def enqueue(self, params: Mapping[str, Any] | Sequence[str], *, whole: bool = False) -> Enqueued:
        """Queue a configuration for the next free worker; the sampler fills in the rest.

        Its trial is one of the study's `n_trials`.

        Args:
            params: searched settings by name, or texts such as `learning_rate=3e-5`.
            whole: run the trial to its end; it is neither paused nor pruned.

        Raises InputError if a setting is not searched or out of range, or no trial is left to begin.
        """
        with self._stored() as (database, name):
            definition = database.read_definition(name)
            config = stored_study(name, definition)
            with unknown_names_allowed(config.code), own_loop_of(definition):
                fixed = {key: encode(value) for key, value in parse_params(params).items()}
            if config.comparison is not None:
                raise InputError(f"`{name}` is a comparison: its trials are planned.")
            if not fixed:
                raise InputError("A configuration must have at least one setting: give --param NAME=VALUE.")
            if problems := [problem.message for problem in fixed_problems(config.search_space, fixed)]:
                raise InputError("\n".join(problems))
            ahead, to_begin = database.read(lambda connection: lifecycle.enqueued(connection, name))
            if ahead >= to_begin:
                raise InputError(
                    f"The study `{name}` must have a trial left to begin, but has {to_begin}, and {ahead} "
                    "are enqueued. Raise --n-trials of `hpo run`."
                )
            attributes = {"source": "hpo enqueue"} | ({WHOLE_ATTR: True} if whole else {})
            database.persist(lambda: database.load_study(name).enqueue_trial(fixed, attributes))
            return Enqueued(name, fixed, ahead, whole)

    def pause(self) -> StateChange:
        """Pause the study: its workers checkpoint their trials and leave.

        Raises RunError if a worker has not left after three minutes.
        """
        return self._set_state("paused")

    def resume(self) -> StateChange:
        """Open the study again after `pause` or `cancel`. This starts no worker."""
        return self._set_state("open")

    def cancel(self) -> StateChange:
        """Pause the study and end its unfinished trials. Raises RunError like `pause`."""
        return self._set_state("cancelled")

    def delete(self, confirm: Callable[[str], object] = lambda _: None) -> Deleted:
        """Remove the study from the database, and its checkpoints from this machine.

        `confirm` receives a description of the study before anything is removed; an exception stops the
        removal. Raises InputError if the study has workers.
        """
        with self._stored() as (database, name):
            folder = lifecycle.checkpoints_folder(database, name, RUNS)
            config = lifecycle.checkpoint_config(name, database.read_definition(name))
            if left := lifecycle.processes(database.watch_workers(workers.c.study == name)):
                raise InputError(
                    f"The study `{name}` must have no worker, but has {', '.join(left)}. `hpo cancel {name}` "
                    "stops them."
                )
            done = database.trial_counts(name)["done"]
            confirm(f"the study {name} with {done} finished trials from {shown_url(database.url)}")
            noted, had_folder = noted_database(database), folder.exists()
            lifecycle.delete_study(database, name)  # raises if a worker has joined: then nothing is removed
            uploads = remove_uploads(config, folder, noted)
            here = f"{remove_checkpoints(folder, noted)}; other machines may have such a folder too."
            message = " ".join(filter(None, (f"The study {name} is deleted.", uploads, here)))
            return Deleted(name, str(folder), had_folder and not folder.exists(), message)

    def copy(self, to: str) -> Copied:
        """Copy the study with its trials to the database at the URL `to`. The copy uses its checkpoints.

        Raises InputError if the study has workers, or `to` has a study of this name.
        """
        with self._stored() as (source, name), open_storage(storage_url(to)) as target:
            checkpoints = lifecycle.checkpoints_folder(source, name, RUNS)
            num_trials = copy.copy_study(source, target, name)
            if checkpoints.is_dir():  # it stays, and belongs to the copy
                note_database(checkpoints, target)
            return Copied(name, num_trials, target.trial_counts(name), shown_url(target.url))

    def _set_state(self, state: StudyState) -> StateChange:
        """Change the state; unless it is `open`, wait until the workers have left."""
        with self._stored() as (database, name):
            before = lifecycle.set_state(database, name, state)
            if state != "open" and (left := lifecycle.wait_for_workers(database, name, 0)):
                _logger.info("Waiting for %s to checkpoint and leave.", ", ".join(left))
                if left := lifecycle.wait_for_workers(database, name, WAIT_SECONDS):
                    raise RunError(
                        f"The study `{name}` is {state}, but after {WAIT_SECONDS:g} s it has "
                        f"{', '.join(left)}. They leave at their next step; one killed on another machine "
                        "counts for 60 s. Try again."
                    )
            ended = end_unfinished(database, name) if state == "cancelled" else 0
            return StateChange(name, state, before, database.trial_counts(name), ended)

    @contextmanager
    def _stored(self) -> Iterator[tuple[Storage, str]]:
        """Open the database to change the study of the given name, or of the given file."""
        with progress_shown(quiet=self.quiet), existing_database(self._storage) as database:
            is_name = self._word and not is_path(self._word)
            yield database, self._word if is_name else self.file.name

    def _name_in(self, database: Storage) -> str:
        is_stored = self._word and not is_path(self._word) and database.has_study(self._word)
        return self._word if is_stored or self._file is None else self._file.name
