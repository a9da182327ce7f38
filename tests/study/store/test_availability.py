from __future__ import annotations

import pytest

from hpo.study.store import availability
from hpo.study.store.availability import Availability


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(availability, "_now", lambda: now[0])
    return now


def test_unbroken_seconds(clock: list[float]) -> None:
    seen = Availability()
    assert seen.unbroken_seconds(30) == 0, "nobody asked yet"
    for _ in range(3):
        seen.note_answer(30)
        clock[0] += 20
    assert seen.unbroken_seconds(30) == 60
    seen.note_outage("no answer")
    assert seen.unbroken_seconds(30) == 0
    seen.note_answer(30)
    clock[0] += 20
    assert seen.unbroken_seconds(30) == 20


def test_what_was_before_a_gap_is_not_known(clock: list[float]) -> None:
    """The process was stopped, or the machine slept."""
    seen = Availability()
    seen.note_answer(30)
    clock[0] += 31
    assert seen.unbroken_seconds(30) == 0, "also when nobody has asked since"
    seen.note_answer(30)
    clock[0] += 10
    assert seen.unbroken_seconds(30) == 10
