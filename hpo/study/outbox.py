"""The evaluations of a running trial on their way to the database, for which training never waits long.

A thread writes them, in order. The trial waits for it because the pruner's decision comes with the answer,
but not for a database that is away, silent or slow: then training goes on, and a decision that comes late
ends the trial at its next step. What waits is kept in memory and in `outbox.jsonl` in the trial's folder, so
that whoever goes on with the trial of a worker that was killed meanwhile writes what was evaluated up to the
checkpoint that it goes on from; later evaluations are made again.

No more can wait than one trial evaluates, a number that its study fixes. When that many wait, the trial is at
its end, where the worker waits for the database (`Storage.patience_seconds`). How the trial ended is the last
line of the file until it is recorded, so that nobody trains again what was trained to its end.
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

from pydantic import TypeAdapter

from hpo.errors import OutageError, StoppedError
from hpo.json_safe import json_safe
from hpo.outcome import Outcome
from hpo.study.study_record import EvaluationRow

if TYPE_CHECKING:
    import optuna

    from hpo.study.leases import Lease
    from hpo.study.storage import Storage
    from hpo.trial.telemetry import TrialResult

_logger = logging.getLogger(__name__)

OUTBOX = "outbox.jsonl"
_ENDED = "ended"
"""The key of the line that says how the trial ended."""


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


_REPORT = TypeAdapter(Report)


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
        self._lease = lease
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
        left_behind, self.ended = _read(self._file)
        """How the trial ended with a worker that did not record it; None: it goes on."""
        self._left_behind = [report for report in left_behind if self.ended or report.row.step <= saved_step]

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
                self._num_in_file += 1
                self._append(waiting.dump(), f"Evaluation {waiting.index}")

    def finish(self, result: TrialResult) -> None:
        """Keep how the trial ended until `remove`, and `flush`.

        Raises:
            OutageError: the database stayed away; StoppedError when told to stop meanwhile. The outcome must
                not be recorded before the evaluations.
        """
        has_ended = result.outcome != Outcome.PREEMPTED
        if has_ended and self.ended is None:
            self._lease.check()
            with self._changed:
                self.ended = result
                self._append(json.dumps({_ENDED: json_safe(vars(result))}), "The outcome")
        if not self.flush() and has_ended:
            raise StoppedError("told to stop while the database is away; what the trial made waits for it.")

    def remove(self) -> None:
        """Remove the file: what it holds is in the database, and would not be written again."""
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:
            _logger.warning("%s cannot be removed: %s", self._file, error)

    def pruned_at(self) -> int | None:
        """The index of the evaluation after which the pruner stopped the trial; None: it has not.

        Raises what the thread raised, LeaseLostError among others.
        """
        if self._error is not None:
            raise self._error
        return self._pruned_at

    def flush(self) -> bool:
        """Wait until every evaluation is in the database, for `Storage.patience_seconds` at most.

        Returns False when told to stop: what cannot be written now is left to the one who goes on.

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
                        return False
                if time.monotonic() > deadline:
                    raise OutageError("the database stayed away; the evaluations wait in the trial's folder.")
                self._changed.wait(0.1)
        self.pruned_at()
        return True

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
                    with self._changed:
                        self._changed.wait_for(lambda: self._closing, timeout=self.retry_seconds)
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
            if not (self._waiting or self._left_behind or self.ended):
                self.remove()

    def _note(self, *, is_away: bool) -> None:
        with self._changed:
            self._is_away = is_away
            self._changed.notify_all()

    def _append(self, line: str, what: str) -> None:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as file:
                file.write(f"\n{line}\n")  # apart from a line that a killed worker left torn
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:  # a full disk
            _logger.warning("%s waits in memory alone: %s: %s", what, self._file, error)


def _read(file: Path) -> tuple[list[Report], TrialResult | None]:
    """What waits in a trial's file: its evaluations in order, and how it ended."""
    reports: list[Report] = []
    ended = None
    try:
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return reports, ended
    except OSError as error:
        _logger.warning("What waits in %s is lost: %s", file, error)
        return reports, ended
    for line in filter(None, lines):
        try:
            content = json.loads(line)
            if _ENDED in content:
                ended = _result(content[_ENDED])
                continue
            report = _REPORT.validate_python(content)
        except (ValueError, TypeError):
            _logger.warning("A line of %s is damaged and left out.", file)
            continue
        # As in the database: a trial that went on from before replaces what was after.
        reports = [earlier for earlier in reports if earlier.row.step < report.row.step] + [report]
        ended = None
    return reports, ended


def _result(fields: object) -> TrialResult:
    from hpo.trial.telemetry import TrialResult  # PyTorch, which a worker of the tests does without

    return TypeAdapter(TrialResult).validate_python(fields)
