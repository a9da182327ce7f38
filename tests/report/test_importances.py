import math
from typing import Any

import optuna
import pytest
from support.study_records import (
    DEFINITION,
    DISTRIBUTIONS,
    fake_record,
    fake_tables,
    fake_trial,
    tables_of,
    with_values,
)

from hpo.report.importances import LEAST_TRIALS, importance_notes, importances
from hpo.report.tables import StudyTables


def ruined(num_trials: int, value: float) -> StudyTables:
    """A study whose trials in bf16 all end with `value`, and the others with a value by learning rate."""
    trials = []
    for number in range(num_trials):
        rate, precision = (
            10 ** (-5 + 2 * ((number * 7) % num_trials) / num_trials),
            ("fp32", "bf16")[number % 2],
        )
        score = value if precision == "bf16" else 0.8 - 0.05 * (math.log10(rate) + 4) ** 2
        trial = with_values(number, (score,), fp_precision=precision, learning_rate=rate)
        trial.telemetry["precision"] |= {"requested": precision, "effective": precision}
        trials.append(trial)
    return tables_of(trials)


def test_spoiling_precision_is_large_in_fanova_only() -> None:
    table = importances(ruined(100, 0.1))
    assert table["fANOVA"]["fp_precision"] > 0.9
    assert table["PED-ANOVA"]["fp_precision"] < 0.1
    assert table["PED-ANOVA"].idxmax() == "learning_rate"


def test_shares_equal_optuna() -> None:
    """Of the trials that count, in a study of plain Optuna with their parameters."""
    tables = fake_tables()
    counted = set(tables.complete["number"][tables.complete["counts"]])
    study = optuna.create_study(direction="maximize")
    for trial in fake_record().trials:
        if trial.number in counted:
            known = {name: DISTRIBUTIONS[name] for name in trial.params}
            study.add_trial(
                optuna.create_trial(params=dict(trial.params), distributions=known, value=trial.values[0])
            )
    expected = optuna.importance.get_param_importances(
        study, evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0)
    )
    found = importances(tables)["fANOVA"].dropna()
    assert found.to_dict() == pytest.approx(expected)
    assert "init_scale" not in found, "only fp16 has it"


@pytest.mark.parametrize("values", [[0.5] * 12, [*map(float, range(LEAST_TRIALS - 1))]])
def test_no_importances_of_few_trials_or_equal_values(values: list[float]) -> None:
    tables = tables_of([with_values(number, (value,)) for number, value in enumerate(values)])
    assert importances(tables).empty


def test_notes_name_few_trials_and_choices_without_a_complete_trial() -> None:
    outcomes = ["nonfinite", "nonfinite", "incompatible"]
    trials = [fake_trial(number, "fp16", outcome) for number, outcome in enumerate(outcomes)]
    trials += [fake_trial(number, "fp32") for number in (3, 4)]
    notes: list[Any] = list(importance_notes(tables_of(trials)))
    assert notes[0] == f"Importances need {LEAST_TRIALS} complete trials in their precision, but there are 2."
    assert notes[1].startswith(
        "No trial with `fp_precision=fp16` is complete (2 nonfinite, 1 incompatible), so"
    )
    assert list(importance_notes(tables_of(trials, definition={**DEFINITION, "search_space": {}}))) == []
