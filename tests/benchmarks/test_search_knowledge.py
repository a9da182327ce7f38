"""What is known before a replay, on two planted tables."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import search_knowledge
from curves import Curves, load
from search_knowledge import KnowingSearch, portfolio_of
from search_tables import POLICIES

NUM_ROWS = 30


@pytest.fixture
def tables(tmp_path: Path) -> list[Curves]:
    """The first is best at its low rates; the second at its high ones, and row 29 breaks."""
    rates_N, shift_N = np.logspace(-5, -2, NUM_ROWS), np.linspace(-1, 1, NUM_ROWS)
    for name, ends_N in (("a", np.arange(NUM_ROWS)), ("b", np.arange(NUM_ROWS)[::-1])):
        losses_NP = 100.0 - np.linspace(0, 1, 21) * (100.0 - ends_N[:, None])
        losses_NP[29 if name == "b" else [], 8:] = np.nan
        settings_NK = np.stack([rates_N, shift_N], axis=1)
        np.savez(tmp_path / name, names=["rate", "shift"], hyperparameters=settings_NK, valid_loss=losses_NP)
    return [load(path) for path in sorted(tmp_path.glob("*.npz"))]


def test_what_other_tables_know_is_tried_first(tables: list[Curves]) -> None:
    for best, expected in ((True, [28, 0]), (False, [29, 0])):  # row 29 is bad in both
        first = portfolio_of(tables, best=best)
        search = KnowingSearch(POLICIES["no pruner"], tables[0], 0, first[:2])
        search.run(3)
        assert [search.row_of[number] for number in sorted(search.row_of)][:2] == expected
        assert not search.first


def test_the_program_prints_every_variant(tables: list[Curves], tmp_path: Path) -> None:
    del tables
    command = [sys.executable, search_knowledge.__file__, str(tmp_path), "--seeds", "2", "--compute", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()[1:]
    assert [line[:15].strip() for line in lines] == [*search_knowledge.VARIANTS]
