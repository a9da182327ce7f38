"""The replay of searches that stop: what holds by construction, on a table where it is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from search_stops import RULES, StoppingSearch, judged
from search_tables import POLICIES, Curves, load


@pytest.fixture
def curves(tmp_path: Path) -> Curves:
    """Of 60 runs one is far better than the others, each of which is better than the one before."""
    losses_N = np.linspace(100, 50, 60)
    losses_N[30] = 0.0
    losses_NP = losses_N[:, None] * np.linspace(2, 1, 26)
    rates_N = np.logspace(-5, -2, 60)
    path = tmp_path / "planted.npz"
    np.savez(path, names=["rate"], hyperparameters=rates_N[:, None], valid_loss=losses_NP)
    return load(path)


@pytest.mark.parametrize("policy", ["default, random", "random"])
def test_a_search_that_stops_before_the_best_is_wrong_and_saves_the_rest(curves: Curves, policy: str) -> None:
    """By `share` it stops when 45 of 60 have begun, with some of the seeds before the best run has."""
    searches = [StoppingSearch(POLICIES[policy], curves, seed) for seed in range(24)]
    found = [judged(search, 60, RULES["share"], 0.25) for search in searches]
    for search, (has_stopped, is_wrong, saved) in zip(searches, found, strict=True):
        begun = list(dict.fromkeys(search.row_of.values()))
        assert sorted(begun) == list(range(60))
        assert has_stopped
        assert is_wrong == (30 in begun[45:])
        assert saved == pytest.approx(0.25) if policy == "random" else 0 < saved < 1
    assert {is_wrong for _, is_wrong, _ in found} == {True, False}


def test_a_rule_that_never_says_so_stops_nothing(curves: Curves) -> None:
    search = StoppingSearch(POLICIES["random"], curves, 0)
    assert judged(search, 60, lambda *_: 1.0, 0.5) == (False, False, 0.0)
    assert search.spent == pytest.approx(60)
