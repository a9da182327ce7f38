from collections.abc import Callable, Sequence

import pytest

from hpo.deploy.timing import Rows, TimingBudget, time_in_turn, timing


class Clock:
    """A clock that only predictions advance; `calls` has the form and rows of each."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[tuple[str, tuple[object, ...]]] = []

    def __call__(self) -> float:
        return self.now

    def form(self, name: str, seconds: float) -> Callable[[Rows], None]:
        def predict(rows: Rows) -> None:
            self.now += seconds
            self.calls.append((name, tuple(rows)))

        return predict


def timed(rows: Sequence[str], size: int, budget: TimingBudget, **seconds: float) -> tuple[Clock, dict]:
    clock = Clock()
    forms = {name: clock.form(name, each) for name, each in seconds.items()}
    return clock, time_in_turn(forms, rows, size, budget, clock=clock)


def test_forms_take_turns_on_the_same_texts() -> None:
    clock, seconds = timed(["a", "b", "c"], 2, TimingBudget(rounds=2, seconds=100), x=0.2, y=0.1)
    assert seconds == {"x": [pytest.approx([0.2] * 5)] * 2, "y": [pytest.approx([0.1] * 5)] * 2}
    names, texts = zip(*clock.calls[2:], strict=True)  # two calls measure the speed
    assert names == ("x",) * 6 + ("y",) * 12 + ("x",) * 6, "the second round begins with the other form"
    assert texts[:3] == (("a", "b"), ("a", "b"), ("c", "a")), "the first call of a turn does not count"
    assert texts[:6] == texts[6:12]
    assert texts[12:18] == texts[18:]
    assert texts[12] == ("b", "c"), "the second round continues in the texts"


@pytest.mark.parametrize(("seconds", "calls"), [(1000.0, 20), (12.0, 5), (0.1, 2)])
def test_budget_bounds_the_calls(seconds: float, calls: int) -> None:
    _, found = timed(["a"], 1, TimingBudget(rounds=10, seconds=seconds), x=0.1, y=0.1)
    assert [len(turn) for turn in found["x"]] == [calls] * 10


def test_stop_ends_after_a_round() -> None:
    budget = TimingBudget(rounds=10, seconds=0.1)
    assert len(time_in_turn({"x": len}, ["a"], 1, budget, lambda: True)["x"]) == 1


def test_latency_and_speed_up() -> None:
    result = timing([[0.010, 0.010, 0.012], [0.020, 0.010, 0.010]], [[0.020] * 3, [0.040] * 3])
    assert (result.p50_ms, result.num_calls) == (pytest.approx(10), 6)
    assert 12 < result.p99_ms < 20
    speed = result.speed_up
    assert (speed.ratio, speed.low, speed.high) == tuple(pytest.approx(one) for one in (3, 2, 4))
