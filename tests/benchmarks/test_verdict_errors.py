"""A small run of the simulations: within the stated rates, and where they are not the verdict says so."""

from __future__ import annotations

import numpy as np
import pytest
from decision_errors import MARGIN, RUNS, TRUTHS, Truth, said
from scipy.stats import binomtest

STUDIES = 100
LOSSES = [truth for truth in TRUTHS if truth.mean_loss >= MARGIN and not truth.collapses]


def at_most(share: float, stated: float) -> bool:
    """Not more often than stated, beyond what chance explains in one of 1,000 runs."""
    return bool(binomtest(round(share * STUDIES), STUDIES, stated, alternative="greater").pvalue > 0.001)


@pytest.mark.parametrize("truth", LOSSES, ids=lambda truth: truth.name)
@pytest.mark.parametrize("num_rows", [100, 1000])
def test_errors_are_at_most_those_stated(truth: Truth, num_rows: int) -> None:
    for good, worse in said(truth, num_rows, STUDIES, np.random.default_rng(1)):
        assert at_most(good, 0.025)
        assert truth.mean_loss > MARGIN or at_most(worse, 0.025)


def test_what_is_as_good_is_found() -> None:
    *_, (good, worse) = said(TRUTHS[0], 1000, STUDIES, np.random.default_rng(1))
    assert good > 0.7
    assert worse == 0


def test_collapses_are_the_one_thing_that_runs_do_not_show() -> None:
    """Which is why a verdict names the share of them that it cannot exclude."""
    (collapses,) = (truth for truth in TRUTHS if truth.collapses)
    at = dict(zip(RUNS, said(collapses, 1000, STUDIES, np.random.default_rng(1)), strict=True))
    assert 0.05 < at[12][0] < 0.5
