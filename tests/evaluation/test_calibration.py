from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpo.data.examples import Example
from hpo.data.tasks import Task
from hpo.evaluation.calibration import NUM_BINS, calibration, calibration_of

LABELS = ("a", "b", "c")


def labelled(values: Any) -> list[Example]:
    return [Example("", "x", {"t": value}, {}, annotated=frozenset("t")) for value in values]


def reference(pairs: list[tuple[float, bool]]) -> tuple[float, list[tuple[float, float, int]]]:
    """The error, and (confidence, frequency, count) of the bins, one probability at a time."""
    bins, error = [], 0.0
    for k in range(NUM_BINS):
        low, high = k / NUM_BINS, (k + 1) / NUM_BINS
        inside = [(p, right) for p, right in pairs if low < p <= high or (k == 0 and p == 0)]
        if inside:
            confidence = sum(p for p, _ in inside) / len(inside)
            frequency = sum(right for _, right in inside) / len(inside)
            error += abs(confidence - frequency) * len(inside) / len(pairs)
            bins.append((confidence, frequency, len(inside)))
    return error, bins


def check(found: Any, pairs: list[tuple[float, bool]]) -> None:
    error, bins = reference(pairs)
    assert found.ece == pytest.approx(error, rel=1e-12)
    for one, expected in zip(found.bins, bins, strict=True):
        assert (one.confidence, one.frequency, one.count) == pytest.approx(expected, rel=1e-12)
        assert one.high == pytest.approx(one.low + 1 / NUM_BINS)
        assert one.low <= one.confidence <= one.high


@pytest.mark.parametrize("seed", range(20))
def test_calibration_equals_a_plain_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p_NC = rng.dirichlet([0.5] * 3, 60)
    truth = rng.choice(LABELS, 60).tolist()
    single = calibration(Task("t", "single_label", LABELS), p_NC, labelled(truth))
    best = p_NC.argmax(axis=1)
    check(single, [(p_NC[n, c], LABELS[c] == truth[n]) for n, c in enumerate(best)])
    sets = [[label for label in LABELS if rng.random() < 0.3] for _ in range(60)]
    multi = calibration(Task("t", "multi_label", LABELS), p_NC, labelled(sets))
    check(multi, [(p_NC[n, c], LABELS[c] in sets[n]) for n in range(60) for c in range(3)])


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    p_M, is_right_M = rng.random(100), rng.random(100) < 0.5
    whole = calibration_of(p_M, is_right_M)
    monkeypatch.setattr("hpo.evaluation.calibration._AT_ONCE", 7)
    pieces = calibration_of(p_M, is_right_M)
    assert pieces.ece == pytest.approx(whole.ece, rel=1e-12)
    assert [one.count for one in pieces.bins] == [one.count for one in whole.bins]


def test_what_is_sure_and_wrong_has_the_error_1() -> None:
    found = calibration_of(np.ones(7), np.zeros(7, bool))
    assert found.ece == 1
    (last,) = found.bins
    assert (last.confidence, last.frequency, last.count, last.high) == (1, 0, 7, 1)
    assert calibration_of(np.zeros(3), np.ones(3, bool)).bins[0].low == 0
