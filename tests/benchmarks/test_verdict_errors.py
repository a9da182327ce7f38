"""A small run of the simulations: each cell errs at most as often as stated, but for chance."""

import pytest
from scipy.stats import binomtest
from verdict_errors import ERROR, Cell, cells, rates, verdict_of

STUDIES = 40
CELLS = {cell.name: cell for cell in cells()}
FAST = [
    "loss of 0.5 in all runs and rows, 1,000 rows",
    "loss of 0.5 % of the rows, 1,000 rows",
    "50 of 1,000 rows labelled, 1 % lost",
    "macro F1, 20 classes, a class of 5 rows loses 20 %",
    "span F1, spans in 100 of 1,000 texts, 2 % missed",
    "learned nothing, 50 of 1,000 rows labelled",
    "one model each: mean of two tasks, one labelled in 50 rows loses 2 %",
]


@pytest.mark.parametrize("name", FAST)
def test_error_rates_are_at_most_the_stated_ones(name: str) -> None:
    cell = CELLS[name]
    found = rates(cell, STUDIES, seed=1)
    for verdict in cell.wrong:
        test = binomtest(found[verdict], STUDIES, ERROR, alternative="greater")
        assert test.pvalue > 0.001, f"{verdict}: {found[verdict]} of {STUDIES}"


def test_equal_models_are_found_as_good() -> None:
    name = "one model each: no difference, 10,000 rows"
    assert rates(CELLS[name], 10, seed=1)["as_good"] >= 7


def test_a_cell_counts_the_first_verdict() -> None:
    cell = CELLS["loss of 0.5 % of the rows, 1,000 rows"]
    worse = Cell("a large loss", cell.task, type(cell.draw)(rows=0.3), 30.0)
    assert verdict_of(worse, (1, 0)) == "worse"
