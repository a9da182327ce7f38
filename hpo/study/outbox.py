"""The evaluations of a running trial on their way to the database, for which training never waits long.

A thread writes them, in order. The trial waits for it because the pruner's decision comes with the answer,
but not for a database that is away, silent or slow: then training goes on, and a decision that comes late
ends the trial at its next step. What waits is kept in memory and in `outbox.jsonl` in the trial's folder, so
that whoever goes on with the trial of a worker that was killed meanwhile writes what was evaluated up to the
checkpoint that it goes on from; later evaluations are made again.

No more can wait than one trial evaluates, a number that its study fixes. When that many wait, the trial is at
its end, where the worker waits for the database (`Storage.patience_seconds`).
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hpo.errors import OutageError
from hpo.json_safe import json_safe
from hpo.study.study_record import EvaluationRow

if TYPE_CHECKING:
    import optuna

    from hpo.study.leases import Lease
    from hpo.study.storage import Storage

_logger = logging.getLogger(__name__)

OUTBOX = "outbox.jsonl"


@dataclass(frozen=True)
class Report:
    """One evaluation, as it is stored."""

    index: int
    """Counts the trial's evaluations; it is Optuna's `step`, so that pruners compare trials of different
    batch sizes at the same share of their budget."""
    value: float | None
    """The objective; None, NaN and infinity are not reported to Optuna, nor is anything in a study with
    several objectives, which Optuna cannot prune."""
    row: EvaluationRow
    is_last: bool = False
    """Whether the trial ends with it, so that there is nothing to prune."""

    def dump(self) -> str:
        """One line of JSON."""
        return json.dumps(json_safe(asdict(self)))

    @classmethod
    def load(cls, line: str) -> Report:
        fields = json.loads(line)
        return cls(**{**fields, "row": EvaluationRow(**fields["row"])})


class Outbox:
    """The outbox of one trial; a context manager that ends its thread.

    Args:
        folder: of the trial.
        saved_step: of the checkpoint that it goes on from.
    """

    wait_seconds = 5.0
    """How long the trial waits for the answer to an evaluation before it goes on."""
    retry_seconds = 1.0

    def __init__(
        self, storage: Storage, trial: optuna.trial.Trial, lease: Lease, folder: Path, saved_step: int
    ) -> None:
        self._storage = storage
        self._write = partial(storage.report_evaluation, trial, lease)
        self._file = folder / OUTBOX
        self._changed = threading.Condition()
        self._waiting: deque[Report] = deque()
        self._num_in_file = 0
        self._error: BaseException | None = None
        self._is_away = False
        self._closing = False
        self._pruned_at: int | None = None
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._left_behind = [report for report in _read(self._file) if report.row.step <= saved_step]

    def __enter__(self) -> Outbox:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def put(self, report: Report) -> None:
        """Take an evaluation; when this returns, it is in the database or in the outbox."""
        with self._changed:
            is_behind = bool(self._waiting)
            self._waiting.append(report)
            self._changed.notify_all()
            if not is_behind:
                self._changed.wait_for(lambda: self._is_away or self.is_settled(), timeout=self.wait_seconds)
            for waiting in list(self._waiting)[self._num_in_file :]:
                self._append(waiting)

    def pruned_at(self) -> int | None:
        """The index of the evaluation after which the pruner stopped the trial; None: it has not.

        Raises what the thread raised, LeaseLostError among others.
        """
        if self._error is not None:
            raise self._error
        return self._pruned_at

    def flush(self) -> None:
        """Wait until everything is in the database, for `Storage.patience_seconds` at most.

        Told to stop, it leaves to the one who goes on with the trial what cannot be written now.

        Raises:
            OutageError: the database stayed away.
        """
        storage = self._storage
        deadline = time.monotonic() + storage.patience_seconds
        stopped_by = math.inf
        with self._changed:
            while not self.is_settled():
                if storage.stop.is_set():
                    stopped_by = min(stopped_by, time.monotonic() + self.wait_seconds)
                    if self._is_away or time.monotonic() > stopped_by:
                        return
                if time.monotonic() > deadline:
                    raise OutageError("the database stayed away; the evaluations wait in the trial's folder.")
                self._changed.wait(0.1)
        self.pruned_at()

    def is_settled(self) -> bool:
        """Whether nothing waits."""
        return self._error is not None or not (self._waiting or self._left_behind)

    def _run(self) -> None:
        try:
            while self._has_work():
                try:
                    self._storage.attempt(self._write_next)
                except OutageError:
                    self._note(is_away=True)
                    self._storage.stop.wait(self.retry_seconds)
                else:
                    self._note(is_away=False)
        except BaseException as error:  # raised again where the trial runs
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _has_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._left_behind or self._closing)
            return not self._closing

    def _write_next(self) -> None:
        if self._left_behind:
            self._write(self._left_behind[0], if_missing=True)
            self._left_behind.pop(0)
        else:
            report = self._waiting[0]
            is_pruned = self._write(report) and not report.is_last
            with self._changed:
                self._waiting.popleft()
                self._num_in_file = max(0, self._num_in_file - 1)
                self._pruned_at = report.index if is_pruned else self._pruned_at
        with self._changed:
            if not (self._waiting or self._left_behind):
                try:
                    self._file.unlink(missing_ok=True)
                except OSError as error:  # what it holds is in the database, and is not written again
                    _logger.warning("%s cannot be removed: %s", self._file, error)

    def _note(self, *, is_away: bool) -> None:
        with self._changed:
            self._is_away = is_away
            self._changed.notify_all()

    def _append(self, report: Report) -> None:
        self._num_in_file += 1
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as file:
                file.write(f"\n{report.dump()}\n")  # apart from a line that a killed worker left torn
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:  # a full disk: it waits in memory alone
            _logger.warning("Evaluation %d waits in memory alone: %s: %s", report.index, self._file, error)


def _read(file: Path) -> list[Report]:
    try:
        lines = file.read_text().split("\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        _logger.warning("What waits in %s is lost: %s", file, error)
        return []
    reports: list[Report] = []
    for line in filter(None, lines):
        try:
            report = Report.load(line)
        except (ValueError, TypeError, KeyError):
            _logger.warning("A line of %s is damaged and left out.", file)
            continue
        # As in the database: a trial that went on from before replaces what was after.
        reports = [earlier for earlier in reports if earlier.row.step < report.row.step] + [report]
    return reports
