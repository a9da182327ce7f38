"""Silence of a worker: time with an unchanged row, by this process's monotonic clock."""

from __future__ import annotations

import pytest

from hpo.study.store import storage as availability
from hpo.study.store.storage import Availability

GAP = 30.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(availability.time, "monotonic", lambda: now[0])
    return now


def test_silence_begins_with_a_change_of_the_row(clock: list[float]) -> None:
    seen, silent = Availability(), []
    seen.note_answer(GAP)
    for now, heartbeat in ((0.0, "a"), (20.0, "a"), (40.0, "a"), (45.0, "b"), (60.0, "b"), (80.0, "a")):
        clock[0] = now
        silent.append(seen.silent_seconds("worker", heartbeat, GAP))
        seen.note_answer(GAP)
    assert silent == [0.0, 20.0, 40.0, 0.0, 15.0, 0.0]
    assert seen.silent_seconds("another", "a", GAP) == 0.0


@pytest.mark.parametrize(
    ("outage", "gap", "silent"),
    [
        (False, 0.0, 40.0),
        (True, 0.0, 0.0),  # nobody could write
        (False, 31.0, 0.0),  # this process was stopped
        (False, 29.0, 69.0),
    ],
)
def test_silence_begins_anew_after_a_break(
    clock: list[float], outage: bool, gap: float, silent: float
) -> None:
    seen = Availability()
    seen.note_answer(GAP)
    for now in (0.0, 20.0, 40.0):
        clock[0] = now
        seen.silent_seconds("worker", "a", GAP)
        seen.note_answer(GAP)
    if outage:
        seen.note_outage("down")
        assert seen.is_away
        seen.note_answer(GAP)
        assert not seen.is_away
    clock[0] += gap
    assert seen.silent_seconds("worker", "a", GAP) == silent
