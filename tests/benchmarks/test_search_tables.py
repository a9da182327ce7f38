"""The replay on a planted table: what holds by construction, whatever search is good."""

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import search_tables
from curves import Curves, load
from search_tables import POLICIES, Search

NUM_ROWS = 30


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Losses fall to the row's number in equal parts; every third run breaks in the 8th of 20 parts."""
    rates_N = np.logspace(-5, -2, NUM_ROWS)
    parts_P = np.linspace(0, 1, 21)
    losses_NP = 100.0 - parts_P * (100.0 - np.arange(NUM_ROWS)[:, None])
    losses_NP[::3, 8:] = np.nan
    file = tmp_path / "planted.npz"
    settings_NK = np.stack([rates_N, np.linspace(-1, 1, NUM_ROWS)], axis=1)
    np.savez(file, names=["rate", "shift"], hyperparameters=settings_NK, valid_loss=losses_NP)
    return file


@pytest.fixture
def curves(path: Path) -> Curves:
    return load(path)


def test_a_table_is_read(curves: Curves) -> None:
    assert [one.log for one in curves.space.values()] == [True, False]
    assert curves.points_NK[[0, 10, 29]] == pytest.approx(np.array([[0, 0], [10 / 29] * 2, [1, 1]]))
    assert curves.at(Fraction(29, 100)) == Fraction(3, 10)
    assert curves.loss(1, Fraction(3, 10)) == pytest.approx(100 - 9.9 * 3)
    assert [np.isnan(curves.loss(0, Fraction(part, 20))) for part in (7, 8)] == [False, True]
    assert (curves.last(0), curves.last(1)) == (0.4, 1.0)
    assert curves.regret(1.0) == 0.0, "row 0 would be better, and breaks"
    assert curves.regret(15.0) == pytest.approx(14 / 14.5, abs=0.05)
    assert curves.regret(None) == 1.0


@pytest.mark.parametrize("name", POLICIES)
def test_every_run_is_paid_for_and_found_once(curves: Curves, name: str) -> None:
    search = Search(POLICIES[name], curves, seed=0)
    search.run(8.0)
    rows = [*search.row_of.values()]
    assert len(set(rows)) == len(rows), "no configuration starts twice"
    assert search.spent < 8.0 + 1.0
    assert all(loss in curves.finals_N for _, loss in search.ended)
    assert search.regret_at(0.0) == 1.0


def test_the_program_prints_medians(path: Path) -> None:
    command = [sys.executable, search_tables.__file__, str(path.parent), "--json", "--seeds", "2"]
    done = subprocess.run([*command, "--policies", "default"], capture_output=True, text=True, check=True)
    medians = json.loads(done.stdout)["default"]["planted"]
    assert list(medians) == ["5", "10", "20", "40"]
    assert medians["40"] == 0.0
