"""The life of a study in its database, from `enqueue` to `delete`."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hpo.api.opening import RUNS, file_error_first, is_path, progress_shown
from hpo.api.stored import StoredStudy, StudyResult
from hpo.code import unknown_names_allowed
from hpo.config.first import fixed_problems
from hpo.config.search_space import encode
from hpo.config.study_config import stored_study
from hpo.config.trial_config import parse_params
from hpo.errors import InputError, RunError
from hpo.extensions import own_loop_of
from hpo.report.status import progress_message, resume_message
from hpo.study.checkpoints.checkpoint_folders import note_database, noted_database, remove_checkpoints
from hpo.study.checkpoints.remote_store import remove_uploads
from hpo.study.claims.ending import end_unfinished
from hpo.study.sampling.promotion import WHOLE_ATTR
from hpo.study.store import copy, lifecycle
from hpo.study.store.database import shown_url, storage_url
from hpo.study.store.lifecycle import StudyState
from hpo.study.store.schema import workers
from hpo.study.store.storage import Storage, existing_database, open_storage

WAIT_SECONDS = 180.0
"""Longest wait for workers to leave. A worker reads the state within 10 s, but its step may take long; a
worker that died elsewhere counts as live for 60 s."""

_logger = logging.getLogger(__name__)


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
            is_over = self.trials["done"] == sum(self.trials.values())
            more = "." if is_over else f". To continue it: hpo worker {self.study}"
            return f"The study {self.study} {again}: {done}{more}"
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


class ManagedStudy(StoredStudy):
    """A study with all operations that change it in the database."""

    def enqueue(self, params: Mapping[str, Any] | Sequence[str], *, whole: bool = False) -> Enqueued:
        """Queue a configuration for the next free worker; the sampler fills in the rest.

        Its trial is one of the study's `n_trials`. A study that has ended, without a budget, gets one more.

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
            counts = database.trial_counts(name)
            has_ended = bool(counts["done"]) and not counts["running"] and ahead >= to_begin
            adds_trial = has_ended and config.budget is None
            if ahead >= to_begin and not adds_trial:
                raise InputError(
                    f"The study `{name}` must have a trial left to begin, but has {to_begin}, and {ahead} "
                    "are enqueued. Raise --n-trials of `hpo run`."
                )
            attributes = {"source": "hpo enqueue"} | ({WHOLE_ATTR: True} if whole else {})
            database.persist(lambda: database.load_study(name).enqueue_trial(fixed, attributes))
            if adds_trial:  # afterwards: a worker would begin another trial in its place
                database.write(lambda connection: lifecycle.add_trial(connection, name))
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
        with (
            progress_shown(quiet=self.quiet),
            file_error_first(self._word),
            existing_database(self._storage) as database,
        ):
            is_name = self._word and not is_path(self._word)
            yield database, self._word if is_name else self.file.name
