from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from worker_process import evaluate, lease_of, study, wait_for

from hpo.errors import LeaseLostError, OutageError, StoppedError
from hpo.outcome import Outcome
from hpo.study.leases import WorkerLease
from hpo.study.outbox import OUTBOX, Outbox, Report
from hpo.study.schema import slots
from hpo.study.storage import Storage, open_storage
from hpo.study.study_record import EvaluationRow
from hpo.trial.telemetry import TrialResult


class Database:
    """A study's database that the test takes away, with one trial in it."""

    def __init__(self, storage: Storage, trial: optuna.trial.Trial, folder: Path) -> None:
        self.storage, self.trial, self.folder = storage, trial, folder
        self.answers = True
        self.num_asked = 0
        self.is_silent = threading.Event()
        self._report = storage.report_evaluation
        storage.report_evaluation = self._report_evaluation  # type: ignore[method-assign]

    def _report_evaluation(self, *args: Any, **kwargs: Any) -> bool:
        self.num_asked += 1
        while self.is_silent.is_set():
            self.storage.stop.wait(0.01)
        if not self.answers:
            raise sa.exc.OperationalError("INSERT", {}, OSError("connection refused"))
        return self._report(*args, **kwargs)

    def outbox(self, saved_step: int = 0) -> Outbox:
        lease = lease_of(self.storage, self.trial)
        return Outbox(self.storage, self.trial, lease, self.folder, saved_step)

    def num_in_file(self) -> int:
        return len(list(filter(None, (self.folder / OUTBOX).read_text().split("\n"))))

    def stored(self) -> list[int]:
        return [row.step for row in self.storage.read_study("tiny").trials[0].evaluations]


def report(index: int, value: float = 0.5, **changes: Any) -> Report:
    return Report(index, value, EvaluationRow(10 * index, 1.0, 1.0, {"score": value}), **changes)


@pytest.fixture
def database(sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    monkeypatch.setattr(Outbox, "retry_seconds", 0.01)
    monkeypatch.setattr(Outbox, "wait_seconds", 0.2)
    with open_storage(sqlite_url) as storage:
        opened = storage.create_or_resume_study(study(2))
        opened.pruner = optuna.pruners.ThresholdPruner(lower=0.3)
        with WorkerLease(storage, opened, max_retries=0) as worker:
            yield Database(storage, worker.open_trial(worker.claim()), tmp_path / "trial")


def test_evaluations_of_an_outage_are_written_once_in_order_and_pruned_late(database: Database) -> None:
    with database.outbox() as outbox:
        outbox.put(report(1))
        assert database.stored() == [10], "at once"
        database.answers = False
        outbox.put(report(2))
        outbox.put(report(3, value=0.1))
        assert outbox.pruned_at() is None
        assert database.num_in_file() == 2
        database.answers = True
        wait_for(lambda: outbox.pruned_at() == 3)
        outbox.flush()
    assert database.stored() == [10, 20, 30]
    assert database.trial.study.trials[0].intermediate_values == {1: 0.5, 2: 0.5, 3: 0.1}
    assert not (database.folder / OUTBOX).exists()


def test_nobody_waits_for_a_silent_database(database: Database) -> None:
    database.is_silent.set()
    with database.outbox() as outbox:
        for index in (1, 2):
            outbox.put(report(index))
        assert database.num_in_file() == 2
        database.storage.stop.set()
        outbox.flush()  # returns
        database.is_silent.clear()
        wait_for(lambda: database.stored() == [10, 20])


def test_last_evaluation_is_not_pruned(database: Database) -> None:
    with database.outbox() as outbox:
        outbox.put(report(1, value=0.1, is_last=True))
        outbox.flush()
        assert outbox.pruned_at() is None


def test_who_goes_on_writes_what_is_missing_up_to_its_checkpoint(database: Database) -> None:
    evaluate(database.storage, database.trial, 2, 0.4, step=20)
    evaluate(database.storage, database.trial, 4, 0.4, step=40)
    lines = [report(index).dump() for index in (1, 2, 3, 5)]
    database.folder.mkdir()
    (database.folder / OUTBOX).write_text("\n\n".join([*lines, lines[0][:20]]))
    with database.outbox(saved_step=30) as outbox:
        outbox.flush()
    assert database.stored() == [10, 20, 30, 40]
    assert database.trial.study.trials[0].intermediate_values[2] == 0.4
    assert not (database.folder / OUTBOX).exists()


@pytest.mark.parametrize(
    "damaged",
    [
        b"\xff\xfe",
        b"[]",
        b"3",
        b'{"index": 2}',
        report(2).dump().replace('"step": 20', '"step": "x"').encode(),
        report(2).dump().replace('{"score": 0.5}', "[]").encode(),
        b'{"ended": {"outcome": "unheard-of"}}',
    ],
)
def test_damaged_line_is_left_out(
    database: Database, damaged: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [report(1).dump().encode(), damaged, report(3).dump().encode()]
    database.folder.mkdir()
    (database.folder / OUTBOX).write_bytes(b"\n".join(lines))
    with database.outbox(saved_step=30) as outbox:
        assert caplog.messages == [f"A line of {database.folder / OUTBOX} is damaged and left out."]
        assert outbox.ended is None
        outbox.flush()
    assert database.stored() == [10, 30]


def test_it_asks_no_more_often_when_told_to_stop(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outbox, "retry_seconds", 3600.0)
    database.answers = False
    database.storage.stop.set()
    with database.outbox() as outbox:
        outbox.put(report(1))
        outbox.put(report(2))
        assert not outbox.flush()
    outbox._thread.join(60)
    assert not outbox._thread.is_alive(), "leaving wakes it"
    assert database.num_asked == 1


def test_outcome_waits_for_who_goes_on(database: Database) -> None:
    ended = TrialResult(Outcome.PRUNED, "why", None, {"peak_memory_bytes": 3}, {"device": {"shared": True}})
    database.answers = False
    with database.outbox() as outbox:
        outbox.put(report(1))
        database.storage.stop.set()
        with pytest.raises(StoppedError, match="what the trial made waits for it"):
            outbox.finish(ended)
    outbox._thread.join(60)
    database.answers = True
    database.storage.stop.clear()
    with database.outbox(saved_step=0) as outbox:
        assert outbox.ended == ended
        outbox.finish(outbox.ended)
        assert database.stored() == [10], "also what came after its last checkpoint"
        assert database.outbox().ended == ended, "until it is recorded"
        outbox.remove()
    assert not (database.folder / OUTBOX).exists()


def test_a_trial_that_was_trained_further_has_not_ended(database: Database) -> None:
    database.answers = False
    database.storage.patience_seconds = 0.0
    with database.outbox() as outbox:
        outbox.put(report(2))
        with pytest.raises(OutageError):
            outbox.finish(TrialResult(Outcome.OOM))
    with database.outbox() as outbox:
        outbox.put(report(1))
        outbox.put(report(2))
    assert database.outbox().ended is None


def test_trial_that_goes_on_has_no_outcome(database: Database) -> None:
    with database.outbox() as outbox:
        outbox.put(report(1))
        outbox.finish(TrialResult(Outcome.PREEMPTED))
    assert not (database.folder / OUTBOX).exists()


def test_full_disk_leaves_it_in_memory(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    database.answers = False
    with database.outbox() as outbox:
        database.folder.write_text("")
        outbox.put(report(1))
        assert "Evaluation 1 waits in memory alone" in caplog.text
        database.folder.unlink()
        database.answers = True
        outbox.flush()
    assert database.stored() == [10]


def test_database_that_stays_away_ends_the_wait(database: Database) -> None:
    database.answers = False
    database.storage.patience_seconds = 0.1
    with database.outbox() as outbox:
        outbox.put(report(1))
        with pytest.raises(OutageError, match="stayed away"):
            outbox.flush()


def test_write_without_the_lease_is_refused(database: Database) -> None:
    with database.outbox() as outbox:
        with database.storage.engine.begin() as connection:
            connection.execute(sa.update(slots).values(owner="other"))
        outbox.put(report(1))
        for method in (outbox.pruned_at, outbox.flush):
            with pytest.raises(LeaseLostError):
                method()
    assert database.stored() == []
