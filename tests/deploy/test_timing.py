from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from hpo.deploy.timing import Effort, Rows, rows_of, time_in_turn, timing
from hpo.tasks.example import Example


class Clock:
    """Stands still but while something predicts; what, and on which rows, is in `calls`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[tuple[str, tuple[object, ...]]] = []

    def __call__(self) -> float:
        return self.now

    def takes(self, name: str, seconds: Callable[[int], float]) -> Callable[[Rows], None]:
        def predict(rows: Rows) -> None:
            self.now += seconds(sum(called == name for called, _ in self.calls))
            self.calls.append((name, tuple(rows)))

        return predict


def timed(seconds: dict[str, float], rows: Sequence[str], size: int, effort: Effort) -> tuple[Clock, dict]:
    clock = Clock()
    predict = {name: clock.takes(name, lambda _, of=of: of) for name, of in seconds.items()}
    return clock, time_in_turn(predict, rows, size, effort, clock=clock)


def test_all_take_turns_on_the_same_texts() -> None:
    clock, found = timed({"0": 0.2, "1": 0.1}, ["a", "b", "c"], 2, Effort(rounds=2, seconds=100))
    assert found == {"0": [pytest.approx([0.2] * 5)] * 2, "1": [pytest.approx([0.1] * 5)] * 2}
    names, texts = zip(*clock.calls[2:], strict=True)  # two calls tell how long they take
    assert names == ("0",) * 6 + ("1",) * 12 + ("0",) * 6, "the second round begins with another"
    assert texts[:3] == (("a", "b"), ("a", "b"), ("c", "a")), "the first call of a turn is not counted"
    assert texts[:6] == texts[6:12]
    assert texts[12:18] == texts[18:]
    assert texts[12] == ("b", "c"), "the texts go on where the round before ended"


@pytest.mark.parametrize(("seconds", "calls"), [(1000.0, 20), (12.0, 5), (0.1, 2)])
def test_the_time_bounds_the_calls(seconds: float, calls: int) -> None:
    _, found = timed({"0": 0.1, "1": 0.1}, ["a"], 1, Effort(rounds=10, seconds=seconds))
    assert [len(turn) for turn in found["0"]] == [calls] * 10


def test_asked_to_end_it_ends_after_a_round() -> None:
    found = time_in_turn(dict.fromkeys("01", len), ["a"], 1, Effort(rounds=10, seconds=0.1), lambda: True)
    assert {name: len(rounds) for name, rounds in found.items()} == {"0": 1, "1": 1}


def test_latency_and_speed_up_are_those_of_the_calls() -> None:
    found = timing([[0.010, 0.010, 0.012], [0.020, 0.010, 0.010]], [[0.020] * 3, [0.040] * 3])
    assert (found.p50_ms, found.num_calls) == (pytest.approx(10), 6)
    assert 12 < found.p99_ms < 20
    assert found.speed_up.ratio == pytest.approx(3)
    assert (found.speed_up.low, found.speed_up.high) == (pytest.approx(2), pytest.approx(4))


def test_rows_keep_their_segments() -> None:
    plain = Example("0", "one", {}, {})
    pair = Example("1", "one two", {}, {}, segments={"a": (0, 3), "b": (4, 7)})
    assert rows_of([plain, pair]) == [
        {"text": "one"},
        {"text": "one two", "segments": {"a": (0, 3), "b": (4, 7)}},
    ]
