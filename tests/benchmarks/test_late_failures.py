import late_failures
import pytest
from late_failures import PRUNERS, Case


@pytest.mark.parametrize("pruner", PRUNERS)
def test_late_failing_precision_gets_few_starts(pruner: str) -> None:
    spent = late_failures.run(Case("nsga2", pruner, breaks_at=0.12, num_trials=40))
    assert spent.starts <= late_failures.MOST
    assert 0 < spent.whole_trials <= late_failures.MOST_TRIALS
