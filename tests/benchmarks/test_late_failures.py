from __future__ import annotations

import late_failures
import pytest
from late_failures import BREAKS, PRUNERS, Case, Spent, line


@pytest.mark.parametrize("pruner", PRUNERS)
def test_late_failing_precision_gets_few_starts(pruner: str) -> None:
    spent = late_failures.run(Case("nsga2", pruner, breaks_at=0.12, num_trials=40))
    assert spent.starts <= late_failures.MOST
    assert 0 < spent.whole_trials <= late_failures.MOST_TRIALS


def test_the_least_of_the_compute_and_the_whole_trials_counts() -> None:
    assert Spent(0.15, compute=0.5, whole_trials=3.0).is_wanted
    assert Spent(0.15, compute=0.15, whole_trials=5.0).is_wanted
    assert not Spent(0.16, compute=0.0, whole_trials=0.0).is_wanted
    assert not Spent(0.1, compute=0.2, whole_trials=3.1).is_wanted


def test_a_line_has_the_mean_and_the_maximum_of_the_seeds() -> None:
    found = [Spent(0.1, 0.05, 1.0), Spent(0.2, 0.15, 2.0)]
    expected = "tpe    promote  breaks at 100%: starts 15% (20%), compute 10% (15%), whole trials  1.5 ( 2.0)"
    assert line("tpe", "promote", BREAKS[-1], found) == f"{expected}  NOT as wanted"
