"""What still fits into the time that a worker's job has left.

A worker begins no trial that cannot reach its next evaluation: until then its pruner learns nothing of it,
and another worker may do it in one go. How long that takes is estimated from

- the longest training between two evaluations among the last `NUM_ROWS` of the study, by whichever worker:
  trials differ (batch size, encoder), and so may devices, so the longest counts; and
- the longest time from the beginning of a trial, or from an evaluation, to the next evaluation that this
  process has seen, which counts everything: setting up, compiling, evaluating, checkpoints.

The estimate is the longer of the two and a quarter more. Before this process has seen an evaluation it is
twice the first, as setting up and evaluating are not known; but in the first half of a worker's time a
quarter more is enough, or a study whose evaluations lie more than half a job apart would never go on. In a
study that has no evaluation yet, a trial begins in the first half of a worker's time.

A worker that finds no time for another trial leaves because its job ends. One that had no time for any from
its beginning on does so as one whose time is up, and does not ask to be run again: the next job would have
no more.
"""

from __future__ import annotations

import logging
import time

import sqlalchemy as sa

from hpo.study.schema import evaluations
from hpo.study.stopping import Stop
from hpo.study.storage import Storage

NUM_ROWS = 200
SLACK = 1.25

_logger = logging.getLogger(__name__)


class TimeLeft:
    """The time that a worker has for trials of `study`, until `stop` has it leave.

    A trial calls `begin` and `evaluated`, and `look` at each of its steps.
    """

    def __init__(self, storage: Storage, study: str, stop: Stop) -> None:
        self._storage = storage
        self._study = study
        self._stop = stop
        self._longest = 0.0
        self._last = self._last_look = self._longest_step = 0.0

    def begin(self) -> None:
        """A trial begins, or goes on."""
        self._stop.has_worked = True
        self._last, self._last_look, self._longest_step = time.monotonic(), 0.0, 0.0

    def evaluated(self) -> None:
        """The trial has come to an evaluation."""
        now = time.monotonic()
        self._longest = max(self._longest, now - self._last)
        self._last = now

    def look(self, checkpoint_seconds: float) -> None:
        """Have `stop` leave time for the trial's longest step so far, and for a checkpoint.

        Evaluations lie between two steps, so a step that has just begun may take as long as one.

        Args:
            checkpoint_seconds: how long the last took to write; 0 where there was none.
        """
        now = time.monotonic()
        if self._last_look:
            self._longest_step = max(self._longest_step, now - self._last_look)
        self._last_look = now
        self._stop.reserve(self._longest_step + checkpoint_seconds)

    def suffices(self) -> bool:
        """Whether a trial that begins now will reach its next evaluation; if not, `stop` is set (see above).

        Also True when the study is done.
        """
        if self._stop.until is None:
            return True
        needed = self.seconds_needed()
        left = self._stop.seconds_left
        if left >= needed or not self._is_unfinished():
            return True
        if self._stop.has_worked:
            self._stop.set_out_of_time()
        _logger.log(
            logging.INFO if self._stop.has_worked else logging.WARNING,
            "No further trial begins: it may take %.0f s to its next evaluation, and this worker has %.0f s.",
            needed,
            max(0.0, left),
        )
        return False

    def seconds_needed(self) -> float:
        """How long a trial may take to its next evaluation."""
        stored = self._storage.persist(self._longest_stored)
        if self._longest:
            return SLACK * max(self._longest, stored)
        half = self._stop.seconds_given / 2
        return min(2 * stored, max(SLACK * stored, half)) or half

    def _is_unfinished(self) -> bool:
        counts = self._storage.slot_counts(self._study)
        return bool(counts["open"] or counts["running"])

    def _longest_stored(self) -> float:
        """The longest training between two evaluations of the study's last; 0 where there is none."""
        columns = (evaluations.c.trial_number, evaluations.c.seconds)
        newest = evaluations.c.trial_number.desc(), evaluations.c.step.desc()
        query = sa.select(*columns).where(evaluations.c.study == self._study).order_by(*newest)
        with self._storage.engine.connect() as connection:
            rows = connection.execute(query.limit(NUM_ROWS)).all()
        # The one before the last row may not have been read.
        before = [*rows[1:], None] if len(rows) < NUM_ROWS else rows[1:]
        return max(
            (
                row.seconds - (earlier.seconds if earlier and earlier[0] == row[0] else 0.0)
                for row, earlier in zip(rows, before, strict=False)
            ),
            default=0.0,
        )
