"""`hpo.compare_predictions`: verdicts, forms of input and refused input. Error rates: tests/benchmarks."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import hpo
from hpo.errors import InputError
from hpo.evaluation.verdict import Facts, Question, label_facts
from hpo.tasks.example import Example
from hpo.tasks.kind import Task

CLASSES = ["a", "b", "c"]
TASK = {"kind": "single_label", "classes": CLASSES, "primary_metric": "accuracy"}


def classes(num: int, errors: float) -> tuple[list[str], list[str]]:
    rng = np.random.default_rng(0)
    truth = rng.choice(CLASSES, num)
    return truth.tolist(), np.where(rng.random(num) < errors, rng.choice(CLASSES, num), truth).tolist()


def compare(truths: Any, other: Any, *, task: Any = TASK, reference: Any = None, margin: float = 0.5) -> Any:
    return hpo.compare_predictions(task, truths, [reference or truths], [other], margin=margin)


def test_equal_predictions_of_enough_rows_are_as_good() -> None:
    truths, predicted = classes(1000, 0.1)
    found = compare(truths, predicted, reference=predicted)
    assert (found.verdict, found.labelled_rows, found.row_bound) == ("as_good", 1000, 100.0)
    assert found.interval == (pytest.approx(-0.368, abs=0.002), pytest.approx(0.368, abs=0.002))
    assert found.sentence == (
        "The other model is as good as the reference: accuracy +0.00 [-0.37, +0.37] points, margin 0.5; 1 "
        "run, 1,000 labelled rows."
    )
    half = [truth if row < 50 else None for row, truth in enumerate(truths)]
    found = compare(half, predicted, reference=predicted)
    assert (found.verdict, found.labelled_rows) == ("not_shown", 50)
    assert found.reason == (
        "With 50 labelled rows, losses under 7.12 points cannot be excluded. A margin of 0.5 needs 736 such "
        "rows"
    )


@pytest.mark.parametrize(("num_wrong", "verdict"), [(120, "worse"), (4, "not_shown")])
def test_large_losses_are_worse_with_few_rows(num_wrong: int, verdict: str) -> None:
    truths, predicted = classes(200, 0.0)
    wrong = [CLASSES[(CLASSES.index(one) + 1) % 3] for one in predicted[:num_wrong]] + predicted[num_wrong:]
    found = compare(truths, wrong)
    assert (found.verdict, found.difference) == (verdict, pytest.approx(-num_wrong / 2))


BALANCED = ["a", "b"] * 500
"""The best constant prediction has an accuracy of 50."""


def with_accuracy(percent: int) -> list[str]:
    wrong = 1000 - 10 * percent
    return [CLASSES[(one == "a") != (row >= wrong)] for row, one in enumerate(BALANCED)]


def compare_runs(reference: Any, other: Any, margin: float) -> Any:
    return hpo.compare_predictions({**TASK, "classes": ["a", "b"]}, BALANCED, reference, other, margin=margin)


@pytest.mark.parametrize(("percent", "has_learned"), [(52, False), (54, True)])
def test_a_reference_without_learning_shows_nothing(percent: int, has_learned: bool) -> None:
    """The standard error of an accuracy near 50 on 1,000 rows is 1.58."""
    found = compare_runs([with_accuracy(percent)], [BALANCED], 5.0)
    assert (found.verdict, found.difference) == ("as_good" if has_learned else "not_shown", 100 - percent)
    assert ("It is not shown that the reference has learned anything" in found.reason) != has_learned


def test_a_run_below_the_middle_to_the_baseline_has_collapsed() -> None:
    runs = [with_accuracy(percent) for percent in (100, 76, 75, 74)]
    assert compare_runs([BALANCED] * 4, runs, 5.0).collapses.num_collapsed == 1
    two = compare_runs([BALANCED] * 2, [BALANCED] * 2, 24.9)
    assert (two.collapses.num_runs, "; 2 runs, 1,000 labelled rows" in two.sentence) == (2, True)
    assert compare_runs([BALANCED] * 2, [BALANCED] * 2, 25.0).collapses is None, "they lose the margin alone"
    for margin, condition in (
        (5.0, "fewer than 10% of runs collapse to the baseline, a loss of 50.00 points"),
        (25.0, "fewer than 50% of runs lose 50.00 points"),
    ):
        assert condition in compare_runs([BALANCED] * 6, [BALANCED] * 6, margin).sentence


def test_rows_limit_an_rmse_by_the_errors_of_the_baseline() -> None:
    """The effect of a row is smallest for a poor model."""
    rows = [Example("", "x", {"t": n % 2}, {}, annotated=frozenset("t")) for n in range(100)]
    facts = label_facts([Task("t", "regression", primary="rmse")], rows, Question("t/rmse", 0.1))
    assert facts.row_bound == facts.baseline.row_bound == pytest.approx(10 * (26**0.5 - 5))


FORMS: list[tuple[dict[str, Any], Any, Any]] = [
    (
        {"kind": "multi_label", "classes": ["x", "y"], "primary_metric": "f1_micro"},
        [["x"], ["x", "y"], ["y"]],
        ["x"],
    ),
    ({"kind": "regression", "primary_metric": "mae"}, [0.0, 1.0, 2], 0.5),
    ({"kind": "token_classification", "span_names": ["p"]}, [{"p": [[0, 2]]}, {"p": [[3, 5]]}], {}),
    ({"kind": "span_extraction", "span_names": ["answer"]}, [{"answer": [[0, 2]]}, {"answer": [[1, 2]]}], {}),
]


@pytest.mark.parametrize(("task", "some", "worse"), FORMS, ids=[str(form[0]["kind"]) for form in FORMS])
def test_every_kind_of_task(task: dict[str, Any], some: list[Any], worse: Any) -> None:
    truths = some * 3000
    lost = [worse if row % 4 == 0 else truth for row, truth in enumerate(truths)]
    equal = hpo.compare_predictions(task, truths, [truths] * 6, [truths] * 6, margin=1.5)
    assert equal.verdict == "as_good", equal.sentence
    assert "has more items" in equal.sentence or task["kind"] != "multi_label"
    margin = 0.01 if task["kind"] == "regression" else 1.5
    assert hpo.compare_predictions(task, truths, [truths] * 6, [lost] * 6, margin=margin).verdict == "worse"


@pytest.mark.parametrize("value", [None, [math.nan] * 1000], ids=["None", "NaN"])
def test_a_run_without_a_score_counts_as_the_baseline(value: Any) -> None:
    truths = np.random.default_rng(0).normal(0, 1, 1000)
    task = {"kind": "regression", "primary_metric": "mae"}
    runs: list[Any] = [truths, value, truths, truths]
    both = hpo.compare_predictions(task, truths, runs, runs, margin=0.1)
    assert both.difference == 0
    assert "1 of 4 runs collapsed, and 1 of the reference." in both.sentence
    lost = hpo.compare_predictions(task, truths, [truths] * 4, runs, margin=0.1)
    assert lost.difference == pytest.approx(both.baseline / 4)
    assert (lost.collapses.num_collapsed, lost.collapses.num_reference_collapsed) == (1, 0)
    assert lost.verdict == "not_shown"
    assert "1 of 4 runs collapsed, and 0 of the reference." in lost.sentence
    none = hpo.compare_predictions(task, truths, [value], [truths], margin=0.1)
    assert (none.verdict, none.reason) == ("not_shown", "No run of the reference has a score")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": {"kind": "singel_label"}}, "kind"),
        ({"task": {**TASK, "primary_metric": "r2"}}, "primary_metric"),
        ({"truths": ["a", "z"]}, r"truths\[1\]: unknown class `z`"),
        ({"truths": [None, None]}, "at least one row must be labelled, but got none"),
        ({"other": [["a"]]}, r"other\[0\]: must have 2 predictions, one per row, but got 1"),
        ({"other": [["a", "z"]]}, r"other\[0\]\[1\]: unknown class `z`"),
        ({"other": []}, "the same number of runs, at least one, but got 1 and 0"),
        ({"margin": 0}, "margin: must be a positive number, but got `0`"),
        ({"margin": math.nan}, "margin: must be a positive number"),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], message: str) -> None:
    given = {"task": TASK, "truths": ["a", "b"], "reference": [["a", "b"]], "other": [["a", "b"]]}
    with pytest.raises(InputError, match=message):
        hpo.compare_predictions(**{"margin": 0.5, **given, **changes})


@pytest.mark.parametrize(
    ("metric", "margin", "row_bound", "text"),
    [
        ("score", 0.5, 100.0, "With 9 labelled rows, losses under 33.63 points cannot be excluded."),
        ("score", 0.5, 500.0, "With 9 labelled rows, no loss can be excluded."),
        ("score", math.inf, 100.0, "With 9 labelled rows, a score is known to 33.63 points at best."),
        ("score", math.inf, 500.0, "With 9 labelled rows, a score is known to 100 points at best."),
        ("t/mae", math.inf, 500.0, "With 9 labelled rows, a score is known to 168.14 label units at best."),
    ],
)
def test_few_rows_limit_the_excluded_losses(metric: str, margin: float, row_bound: float, text: str) -> None:
    facts = Facts(9, row_bound, None, -math.inf, {})
    assert facts.limit(Question(metric, margin)).startswith(text)
    rare = replace(facts, rare=dict.fromkeys("abcdefg", 1)).limit(Question(metric, margin))
    assert math.isinf(margin) or rare.endswith("`d` (1), `e` (1) and 2 more.")


def test_verdict_in_label_units_states_its_condition() -> None:
    """Collapses are not counted, since the baseline is within twice the margin."""
    task = {"kind": "regression", "primary_metric": "mae"}
    truths = np.random.default_rng(0).choice([0.0, 1.0], 1000)
    found = hpo.compare_predictions(task, truths, [truths] * 6, [truths] * 6, margin=0.3)
    assert (found.verdict, found.collapses) == ("as_good", None)
    assert (
        "This holds only if fewer than 0.3 / d of runs lose d label units, for any d; with these 6 runs, up "
        "to 39% of runs may collapse."
    ) in found.sentence
