"""A worker without a study of its own: it serves the open studies of a database, one trial after the other.

It goes to the study with the highest `priority` that has a trial to run, and among equals to the one with the
fewest live workers, and asks again after each trial. So that no study is left for another of equal priority
without need, it stays where it is unless it is one of those that another lacks: of 6 workers in one study and
none in the other, the 3 that came last go. Choosing is done by one worker at a time, and from then on the
chosen study alone counts it as its own, so no more come and go than there are trials and workers for.

A study that cannot run here (its data are not here, no precision of it, its code is not trusted) is left to
other workers, with one warning.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import sqlalchemy as sa

from hpo.config.study_config import stored_study
from hpo.errors import InputError, NoDatabaseError, StoppedError
from hpo.study.database import exclusive
from hpo.study.membership import add_worker, new_worker_id
from hpo.study.overview import Demand, demands
from hpo.study.process import this_machine
from hpo.study.run import OpenStudy, open_study, run_study
from hpo.study.schema import workers
from hpo.study.stopping import Stop
from hpo.study.storage import Storage, open_storage
from hpo.study.worker import Stint

if TYPE_CHECKING:
    from hpo.training.distributed import Ranks

_logger = logging.getLogger(__name__)

AGAIN_SECONDS = 60.0
"""After so long a worker looks again into a study that had free trials and none for it."""


@dataclass(frozen=True)
class ServingOptions:
    """How a worker serves a database."""

    idle_timeout: float = 0.0
    """Seconds for which it waits while no open study has an unfinished trial for it, before it leaves."""
    timeout: float | None = None
    """Seconds after which it begins no further trial."""
    trust_remote_code: bool = False
    """Whether it serves studies that run code which comes with their encoder."""
    device: str | None = None
    """The `DeviceInfo.device_id` of what its trials run on, where known."""
    poll_seconds: float = 2.0
    ranks: Ranks | None = None
    """The processes of torchrun that train each trial together, of which this is the first."""


@dataclass
class Served:
    """What a worker did for the studies of a database."""

    ended: Literal["idle", "stopped", "timeout"] = "idle"
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    """Of its trials, by study."""
    left_out: dict[str, str] = field(default_factory=dict)
    """The studies that cannot run here, with the reason."""

    @property
    def exit_code(self) -> int:
        """130 after a stop, else 0."""
        return 130 if self.ended == "stopped" else 0


def serve(
    url: str,
    runs_dir: Path,
    options: ServingOptions,
    *,
    stop: Stop,
    shown: Callable[[OpenStudy], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> Served:
    """Run trials of the open studies of the database at `url` until none is left for this worker.

    `shown` is around the trials of each study. Raises NoDatabaseError where there is no database and
    none is waited for, RunError for what concerns more than a study.
    """
    return _Server(url, runs_dir, options, stop).serve(shown)


@dataclass(frozen=True)
class _Choice:
    study: Demand
    reservation: str
    """The row of `hpo_workers` that stands for this worker until it is in the study."""


class _Server:
    def __init__(self, url: str, runs_dir: Path, options: ServingOptions, stop: Stop) -> None:
        self._url = url
        self._runs_dir = runs_dir
        self._options = options
        self._stop = stop
        self._deadline = time.monotonic() + (options.timeout or float("inf"))
        self._served = Served()
        self._storage: Storage | None = None
        """Between studies."""
        self._next: _Choice | None = None
        """For which it has left a study."""
        self._left_out: set[tuple[str, int]] = set()
        """Token and `n_trials` of the studies that cannot run here: with more trials there may be one."""
        self._nothing_found: dict[str, float] = {}
        """When a study, by its token, had no trial for this worker."""

    def serve(self, shown: Callable[[OpenStudy], AbstractContextManager[None]]) -> Served:
        try:
            self._served.ended = self._serve(shown)
        except StoppedError as error:
            _logger.warning("Left without a word to the others: %s", error)
            self._served.ended = "stopped"
        finally:
            if self._storage is not None:
                self._storage.close()
        return self._served

    def _serve(
        self, shown: Callable[[OpenStudy], AbstractContextManager[None]]
    ) -> Literal["idle", "stopped", "timeout"]:
        options = self._options
        idle_since: float | None = None
        while not self._stop.is_set() and time.monotonic() <= self._deadline:
            choice, anything_left = (self._next, True) if self._next else self._first_choice()
            if choice is not None:
                idle_since, self._next = None, None
                self._serve_study(choice, shown)
                gc.unfreeze()  # what the study's trials froze may be garbage now
                gc.collect()
                continue
            if anything_left:  # others run it; if one of them dies, this worker takes over
                idle_since = None
            else:
                idle_since = idle_since or time.monotonic()
                if time.monotonic() - idle_since >= options.idle_timeout:
                    return "idle"
            self._stop.wait(options.poll_seconds)
        if self._next is not None:
            self._withdraw(self._next)
        return "stopped" if self._stop.is_set() else "timeout"

    def _opened(self) -> Storage:
        if self._storage is None:
            self._storage = open_storage(self._url, create=False, stop=self._stop)
        return self._storage

    def _first_choice(self) -> tuple[_Choice | None, bool]:
        """The study to serve next, and whether any has an unfinished trial for this worker."""
        try:
            storage = self._opened()
        except NoDatabaseError:
            if not self._options.idle_timeout:
                raise
            return None, False
        return self._choose(storage)

    def _choose(self, storage: Storage, here: Demand | None = None) -> tuple[_Choice | None, bool]:
        """As `_first_choice`; None, too, where a worker of the study `here` stays in it."""
        reservation = f"{new_worker_id()}-comes"

        def choose() -> tuple[_Choice | None, bool]:
            with exclusive(storage.engine), storage.engine.begin() as connection:
                possible = self._possible(storage, connection)
                others = [study for study in possible if here is None or study.token != here.token]
                study = min(filter(self._has_trial, others), key=_first, default=None)
                if study is None or (here is not None and self._stays(possible, here)):
                    return None, bool(possible)
                add_worker(storage, connection, study.name, reservation, self._options.device)
                return _Choice(study, reservation), True

        return storage.persist(choose)

    def _possible(self, storage: Storage, connection: sa.Connection) -> list[Demand]:
        """The studies that this worker may serve; each worker is one of the study that it chose last."""
        found = demands(storage, connection)
        rows = sorted((row for study in found for row in study.workers), key=lambda row: row.started)
        chosen = {(row.machine, row.pid): row.id for row in rows}
        return [
            replace(study, workers=tuple(row for row in study.workers if row.id in chosen.values()))
            for study in found
            if (study.token, study.n_trials) not in self._left_out
        ]

    def _has_trial(self, study: Demand) -> bool:
        looked = self._nothing_found.get(study.token, float("-inf"))
        return study.free_slots > 0 and time.monotonic() - looked > AGAIN_SECONDS

    def _serve_study(
        self, choice: _Choice, shown: Callable[[OpenStudy], AbstractContextManager[None]]
    ) -> None:
        study = choice.study
        try:
            config = stored_study(study.name, self._opened().read_definition(study.name))
            self._opened().close()  # the study has its own connections
            left = self._deadline - time.monotonic()
            if left < (config.timeout or float("inf")):
                config = config.with_values(timeout=max(left, 1e-3))
            with (
                open_study(
                    config,
                    self._url,
                    self._runs_dir,
                    resize=False,
                    trust_remote_code=self._options.trust_remote_code,
                    ranks=self._options.ranks,
                    stop=self._stop,
                ) as opened,
                shown(opened),
            ):

                def go_on(has_run: bool) -> bool:
                    if not has_run:
                        self._nothing_found[study.token] = time.monotonic()
                    return has_run and not self._moves(opened.storage, study)

                summary = run_study(opened, stop=self._stop, stint=Stint(go_on, choice.reservation))
        except InputError as error:
            self._leave_out(study, str(error))
        else:
            self._served.outcomes.setdefault(study.name, Counter()).update(summary.outcomes)
            if summary.ended == "elsewhere":
                needed = f"what is left of it needs a device with {' or '.join(summary.elsewhere)}"
                self._leave_out(study, needed)
            elif summary.ended == "timeout" and time.monotonic() <= self._deadline:
                spent = f"this worker was in it for the study's `timeout` of {config.timeout} s"
                has_time = config.timeout is not None and self._stop.seconds_left > 0
                self._leave_out(study, spent if has_time else "its evaluations take longer than this job has")
        finally:
            self._withdraw(choice)

    def _leave_out(self, study: Demand, reason: str) -> None:
        self._left_out.add((study.token, study.n_trials))
        self._served.left_out[study.name] = reason
        _logger.warning("The study `%s` is left to other workers: %s", study.name, reason)

    def _moves(self, storage: Storage, here: Demand) -> bool:
        """Whether this worker leaves the study that it is in for another, `_next`."""

        def stays() -> bool:
            with storage.engine.connect() as connection:
                return self._stays(self._possible(storage, connection), here)

        if storage.persist(stays):  # mostly, and without waiting for those that choose
            return False
        self._next, _ = self._choose(storage, here)
        return self._next is not None

    def _stays(self, found: list[Demand], here: Demand) -> bool:
        """Whether this worker goes on with the study that it is in."""
        mine = next((study for study in found if study.token == here.token), None)
        others = [study for study in found if study.token != here.token and self._has_trial(study)]
        if mine is None or not others:
            return True  # where nothing is left, `run_study` finds that out
        first = min(others, key=_first)
        if first.priority != mine.priority:
            return first.priority < mine.priority
        surplus = max(0, len(mine.workers) - len(first.workers)) // 2
        last_come = sorted(mine.workers, key=lambda row: -row.number)[:surplus]
        return not any((row.machine, row.pid) == (this_machine(), os.getpid()) for row in last_come)

    def _withdraw(self, choice: _Choice) -> None:
        """Remove the reservation of a worker that did not come to be in the study."""
        storage = self._opened()

        def delete() -> None:
            with storage.engine.begin() as connection:
                connection.execute(sa.delete(workers).where(workers.c.id == choice.reservation))

        storage.persist(delete)


def _first(study: Demand) -> tuple[int, int]:
    """Lower is served sooner."""
    return -study.priority, len(study.workers)
