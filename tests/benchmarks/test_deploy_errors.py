"""A small run of the simulation: within the stated rate."""

from __future__ import annotations

from deploy_errors import Cell, verdicts
from scipy.stats import binomtest

from hpo.deploy.net_loss import ALPHA

SPLITS = 40


def test_a_loss_at_the_margin_is_called_as_good_at_most_as_often_as_stated() -> None:
    as_good = verdicts(Cell(455, 1.0, 0.02), SPLITS)["as_good"]
    assert binomtest(as_good, SPLITS, ALPHA, alternative="greater").pvalue > 0.001


def test_no_loss_is_called_as_good_where_the_rows_suffice() -> None:
    assert verdicts(Cell(455, 0.0, 0.0), 3) == {"as_good": 3}
    assert verdicts(Cell(200, 0.0, 0.0), 3) == {"undecided": 3}
    assert verdicts(Cell(455, 20.0, 0.0), 3) == {"worse": 3}
