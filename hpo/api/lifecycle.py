"""Operations on a study in its database: enqueue a configuration, pause, resume, cancel, delete, copy.

Each returns a value with `text` for a person and `as_json` for `--json`. `hpo.Study` has a method for each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpo.api.opening import RUNS
from hpo.code import unknown_names_allowed
from hpo.config.first import fixed_problems
from hpo.config.search_space import encode
from hpo.config.study_config import stored_study
from hpo.config.trial_config import parse_params
from hpo.errors import InputError, RunError
from hpo.extensions import own_loop_of
from hpo.report.messages import progress_message, resume_message
from hpo.study.checkpoints.checkpoint_folders import note_database, noted_database, remove_checkpoints
from hpo.study.checkpoints.remote_store import remove_uploads
from hpo.study.claims.ending import end_unfinished
from hpo.study.sampling.promotion import WHOLE_ATTR
from hpo.study.store import copy, lifecycle
from hpo.study.store.database import shown_url
from hpo.study.store.lifecycle import StudyState
from hpo.study.store.schema import workers
from hpo.study.store.storage import Storage

WAIT_SECONDS = 180.0
"""Longest wait for workers to leave. A worker reads the state within 10 s, but its step may take long; a
worker that died elsewhere counts as live for 60 s."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StudyResult:
    """The result of an operation on a study."""

    study: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Enqueued(StudyResult):
    """A configuration that the next free worker tries."""

    enqueued: Mapping[str, Any]
    """The given settings; the sampler draws the others."""
    ahead: int
    """Number of configurations that were enqueued before it."""
    whole: bool
    """Whether its trial runs to the end, without a pause."""

    def text(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.enqueued.items())
        whole = " and run to its end" if self.whole else ""
        return f"A trial of {self.study} will have {settings}{whole}; {self.ahead} are enqueued before it."


@dataclass(frozen=True)
class StateChange(StudyResult):
    """A study that was opened, paused or cancelled."""

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
    """A study that was removed from its database, and its checkpoints where this machine finds them."""

    checkpoints: str
    removed_here: bool
    told: str

    def as_json(self) -> dict[str, Any]:
        facts = {"checkpoints": self.checkpoints, "removed_here": self.removed_here}
        return {"study": self.study, "deleted": True, **facts}

    def text(self) -> str:
        return self.told


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


def enqueue(
    database: Storage, name: str, params: Mapping[str, Any] | Sequence[str], *, whole: bool
) -> Enqueued:
    """Store a configuration for a worker to try, see `hpo.Study.enqueue`."""
    definition = database.read_definition(name)
    config = stored_study(name, definition)
    with unknown_names_allowed(config.code), own_loop_of(definition):
        fixed = {key: encode(value) for key, value in parse_params(params).items()}
    if config.comparison is not None:
        raise InputError(f"`{name}` is a comparison, which has planned trials alone.")
    if not fixed:
        raise InputError("A configuration must have at least one setting: give --param NAME=VALUE.")
    if problems := [problem.message for problem in fixed_problems(config.search_space, fixed)]:
        raise InputError("\n".join(problems))
    ahead, to_begin = database.read(lambda connection: lifecycle.enqueued(connection, name))
    if ahead >= to_begin:
        raise InputError(
            f"The study `{name}` must have a trial left to begin, but has {to_begin}, and {ahead} are "
            "enqueued. Raise --n-trials of `hpo run`."
        )
    attributes = {"source": "hpo enqueue"} | ({WHOLE_ATTR: True} if whole else {})
    database.persist(lambda: database.load_study(name).enqueue_trial(fixed, attributes))
    return Enqueued(name, fixed, ahead, whole)


def set_state(database: Storage, name: str, state: StudyState) -> StateChange:
    """Open a study, or close it and wait until its workers have left. Raises RunError if some stay."""
    before = lifecycle.set_state(database, name, state)
    if state != "open" and (left := lifecycle.wait_for_workers(database, name, 0)):
        _logger.info("Waiting for %s to checkpoint and leave.", ", ".join(left))
        if left := lifecycle.wait_for_workers(database, name, WAIT_SECONDS):
            raise RunError(
                f"The study `{name}` is {state}, but after {WAIT_SECONDS:g} s it has {', '.join(left)}. They "
                "leave at their next step; one killed on another machine counts for 60 s. Try again."
            )
    ended = end_unfinished(database, name) if state == "cancelled" else 0
    return StateChange(name, state, before, database.trial_counts(name), ended)


def delete(database: Storage, name: str, confirm: Callable[[str], object]) -> Deleted:
    """Remove a study and its checkpoints, see `hpo.Study.delete`."""
    folder = lifecycle.checkpoints_folder(database, name, RUNS)
    config = lifecycle.checkpoint_config(name, database.read_definition(name))
    if left := lifecycle.processes(database.watch_workers(workers.c.study == name)):
        raise InputError(
            f"The study `{name}` must have no worker, but has {', '.join(left)}. `hpo cancel {name}` stops "
            "them."
        )
    done = database.trial_counts(name)["done"]
    confirm(f"the study {name} with {done} finished trials from {shown_url(database.url)}")
    noted, there = noted_database(database), folder.exists()
    lifecycle.delete_study(database, name)  # raises if a worker has joined: then nothing is removed
    uploads = remove_uploads(config, folder, noted)
    here = f"{remove_checkpoints(folder, noted)}; other machines may have such a folder too."
    told = " ".join(filter(None, (f"The study {name} is deleted.", uploads, here)))
    return Deleted(name, str(folder), there and not folder.exists(), told)


def copy_study(source: Storage, target: Storage, name: str) -> Copied:
    """Copy a study to another database, see `hpo.Study.copy`."""
    checkpoints = lifecycle.checkpoints_folder(source, name, RUNS)
    num_trials = copy.copy_study(source, target, name)
    if checkpoints.is_dir():  # it stays, and belongs to the copy
        note_database(checkpoints, target)
    return Copied(name, num_trials, target.trial_counts(name), shown_url(target.url))
