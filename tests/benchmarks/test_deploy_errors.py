"""A small run of the simulation: within the stated rate."""

from __future__ import annotations

import pytest
from deploy_errors import Cell, verdicts
from scipy.stats import binomtest

from hpo.deploy.net_loss import ALPHA

SPLITS = 40


@pytest.mark.parametrize(("num_rows", "gains"), [(50, 0.0), (455, 0.02)])
def test_a_loss_at_the_margin_is_called_as_good_at_most_as_often_as_stated(
    num_rows: int, gains: float
) -> None:
    as_good = verdicts(Cell(num_rows, 1.0, gains), SPLITS)["as_good"]
    assert binomtest(as_good, SPLITS, ALPHA, alternative="greater").pvalue > 0.001


def test_no_loss_is_called_as_good_where_the_rows_suffice() -> None:
    assert verdicts(Cell(455, 0.0, 0.0), 8) == {"as_good": 8}
    assert verdicts(Cell(200, 0.0, 0.0), 8) == {"undecided": 8}
    assert verdicts(Cell(455, 20.0, 0.0), 8) == {"worse": 8}
