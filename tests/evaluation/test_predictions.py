"""`hpo.compare_predictions`: verdicts, forms of input and refused input. Error rates: tests/benchmarks."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score

import hpo
from hpo.errors import InputError
from hpo.evaluation.contributions import scored
from hpo.evaluation.verdict import Collapses, Facts, Question, facts_of, judge, label_facts
from hpo.tasks.example import Example
from hpo.tasks.kind import Task
from hpo.training.metrics import row_statistics

CLASSES = ["a", "b", "c"]
TASK = {"kind": "single_label", "classes": CLASSES, "primary_metric": "accuracy"}


def classes(num: int, errors: float) -> tuple[list[str], list[str]]:
    rng = np.random.default_rng(0)
    truth = rng.choice(CLASSES, num)
    return truth.tolist(), np.where(rng.random(num) < errors, rng.choice(CLASSES, num), truth).tolist()


def compare(truths: Any, other: Any, *, task: Any = TASK, reference: Any = None, **how: Any) -> Any:
    return hpo.compare_predictions(task, truths, [reference or truths], [other], **{"margin": 0.5, **how})


def statistics_of_run(truths: Any, predicted: Any = None, groups: Any = None) -> Any:
    task = Task("t", "single_label", tuple(CLASSES), primary="accuracy")
    rows = [Example(str(n), "x", {"t": one}, {}, annotated=frozenset("t")) for n, one in enumerate(truths)]
    numbers = groups and [sorted({*groups}).index(one) for one in groups]
    return {"t": row_statistics(task, predicted or truths, rows, numbers)}


def scored_run(predicted: Any, truths: Any = None, groups: Any = None) -> Any:
    metric = "accuracy" if groups is None else "f1_macro"
    return scored(statistics_of_run(truths or BALANCED, predicted, groups), f"t/{metric}")


def test_equal_predictions_of_enough_rows_are_as_good() -> None:
    truths, predicted = classes(1000, 0.1)
    found = compare(truths, predicted, reference=predicted)
    assert (found.verdict, found.labelled_rows, found.row_bound) == ("as_good", 1000, pytest.approx(100.0))
    assert found.interval == (pytest.approx(-0.368, abs=0.002), pytest.approx(0.368, abs=0.002))
    assert found.sentence == (
        "The other model is as good as the reference: accuracy +0.00 [-0.37, +0.37] points, margin 0.5; 1 "
        "run, 1,000 labelled rows. Each row counts as independent."
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
    found = compare_runs([BALANCED] * 4, runs, 5.0)
    assert found.collapses == Collapses((False, False, False, True), (False,) * 4)
    assert "; 4 runs, 1,000 labelled rows" in found.sentence
    assert "`As good` needs at least 15 runs. 1 of 4 runs collapsed" in found.sentence


def test_a_run_is_held_against_its_own_configuration() -> None:
    """Half of the pairs have a configuration that is weak in the reference too."""
    scores = {
        name: scored_run(with_accuracy(percent))
        for name, percent in {"good": 95, "weak": 56, "weaker": 51, "lost": 60}.items()
    }
    reference = [scores[name] for name in ("good", "weak", "good", "weaker")]
    other = [scores[name] for name in ("good", "weaker", "lost", "weak")]
    facts = facts_of(statistics_of_run(BALANCED), Question("t/accuracy", 0.5))
    found = judge(Question("t/accuracy", 0.5), reference, other, facts, [0, 1, 0, 1])
    assert found.collapses == Collapses((False, False, True, False), (False,) * 4)
    one = judge(Question("t/accuracy", 0.5), reference, [*other[:3], None], facts, [0, 1, 0, 1])
    assert one.collapses.other == (False, False, True, True), "no score is a collapse in any configuration"


def test_the_condition_names_losses_with_an_example() -> None:
    found = compare_runs([BALANCED] * 36, [BALANCED] * 36, 0.5)
    assert (found.verdict, found.condition.covered) == ("as_good", 2.0)
    slack = 0.5 + found.interval[0]
    assert found.condition.slack == pytest.approx(slack)
    assert found.condition.possible_share == pytest.approx(1 - 0.05 ** (1 / 36))
    assert (
        f"This holds if losses beyond 2.00 points of a run average less than {slack:.2f} over runs. For any "
        f"q, losses of 2.00 + {slack:.2f} / q in a share q of runs break it ({2 + slack / 0.05:.2f} in 5%). "
        "36 runs exclude no q below 8%."
    ) in found.sentence
    assert compare_runs([BALANCED] * 36, [BALANCED] * 36, 25.0).condition is None, "no loss breaks it"
    worse = compare_runs([BALANCED] * 9, [with_accuracy(80)] * 9, 0.5)
    assert (worse.verdict, "This holds if gains beyond 2.00 points" in worse.sentence) == ("worse", True)


AUTHORS = [f"author {row // 10}" for row in range(1000)]


def test_rows_of_a_group_are_one_piece_of_evidence() -> None:
    """Equal groups of size 10: as many rows as groups, each weighing as much."""
    truths, predicted = classes(1000, 0.1)
    alone = compare(truths, predicted, reference=predicted, margin=5.0)
    found = compare(truths, predicted, reference=predicted, margin=5.0, groups=AUTHORS)
    hundred = compare(truths[::10], predicted[::10], reference=predicted[::10], margin=5.0)
    assert (found.labelled_rows, found.num_groups, alone.num_groups) == (1000, 100, 1000)
    assert found.interval == (pytest.approx(hundred.interval[0]), pytest.approx(hundred.interval[1]))
    assert "1,000 labelled rows in 100 groups" in found.sentence
    assert "Each group counts as independent." in found.sentence
    assert "Each row counts as independent." in alone.sentence
    assert (
        compare(truths, predicted, groups=list(range(1000))).interval == compare(truths, predicted).interval
    )
    short = compare(truths, predicted, reference=predicted, groups=AUTHORS).reason
    assert short == (
        "With 1,000 labelled rows in 100 groups, losses under 3.63 points cannot be excluded. A margin of "
        "0.5 needs 736 such groups"
    )


def test_rows_of_one_group_show_nothing() -> None:
    truths, predicted = classes(1000, 0.1)
    for runs in ([predicted], [predicted] * 20):
        found = hpo.compare_predictions(TASK, truths, runs, runs, margin=5.0, groups=["one"] * 1000)
        assert (found.verdict, found.reason) == ("not_shown", "All labelled rows are one group")
        assert "(too few groups for an interval)" in found.sentence
        assert "1,000 labelled rows in 1 group." in found.sentence


def test_uneven_groups_state_their_assumption() -> None:
    truths, predicted = classes(1000, 0.1)
    groups = [max(row, 50) for row in range(1000)]
    found = compare(truths, predicted, reference=predicted, margin=9.0, groups=groups)
    assert (found.verdict, found.num_groups) == ("as_good", 950)
    assert "the sizes of new groups are distributed as those of these groups" in found.sentence


def test_a_copied_row_counts_once() -> None:
    truths, predicted = classes(500, 0.1)
    _, other = classes(500, 0.12)
    once = compare(truths, other, reference=predicted, margin=3.0)
    twice = compare(truths * 2, other * 2, reference=predicted * 2, margin=3.0, groups=[*range(500)] * 2)
    assert twice.interval == (pytest.approx(once.interval[0]), pytest.approx(once.interval[1]))


def test_a_group_loses_all_items_of_a_class_together() -> None:
    """All 10 rows of a rare class belong to one author: the F1 of the class can vanish at once."""
    truths = ["a"] * 495 + ["b"] * 495 + ["c"] * 10
    task = {**TASK, "primary_metric": "f1_macro"}
    groups = [str(row) if one != "c" else "author" for row, one in enumerate(truths)]
    found = compare(truths, truths, task=task, groups=groups)
    largest = scored_run(truths, truths, groups).bounds_G.max() / len({*groups})
    assert largest >= 100 / 3
    assert found.verdict == "not_shown"


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
    truths = some * 2000
    lost = [worse if row % 4 == 0 else truth for row, truth in enumerate(truths)]
    equal = hpo.compare_predictions(task, truths, [truths] * 15, [truths] * 15, margin=1.5)
    assert equal.verdict == "as_good", equal.sentence
    assert "about as many items" in equal.sentence or task["kind"] != "multi_label"
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
    assert (sum(lost.collapses.other), sum(lost.collapses.reference)) == (1, 0)
    assert lost.verdict == "not_shown"
    assert "1 of 4 runs collapsed, and 0 of the reference." in lost.sentence
    none = hpo.compare_predictions(task, truths, [value], [truths], margin=0.1)
    assert (none.verdict, none.reason) == ("not_shown", "No run of the reference has a score")


@pytest.mark.parametrize("rows", [[[1, 0], [0, 1]], [[1, 0, 0], [0, 1, 0]], [[True, False], [False, True]]])
def test_multi_hot_rows_are_refused(rows: list[list[int]]) -> None:
    task, names = {"kind": "multi_label"}, ["b", "c"]
    for values in (rows, np.array(rows)):
        with pytest.raises(InputError, match="multi-hot"):
            hpo.compare_predictions(task, values, [values], [values], margin=0.5)
        with pytest.raises(InputError, match="multi-hot"):
            hpo.compare_predictions(task, [names, ["b"]], [values], [values], margin=0.5)


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
        ({"groups": ["x"]}, "groups: must have 2 entries, one per row, but got 1"),
        ({"groups": [0.5, "x"]}, "groups: must be texts, whole numbers or None, but got `0.5`"),
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
    facts = Facts(9, 9, row_bound, None, -math.inf, {})
    assert facts.limit(Question(metric, margin)).startswith(text)
    rare = replace(facts, rare=dict.fromkeys("abcdefg", 1)).limit(Question(metric, margin))
    assert math.isinf(margin) or rare.endswith("`d` (1), `e` (1) and 2 more.")


def test_verdict_in_label_units_states_its_condition() -> None:
    task = {"kind": "regression", "primary_metric": "mae"}
    truths = np.random.default_rng(0).choice([0.0, 1.0], 1000)
    found = hpo.compare_predictions(task, truths, [truths] * 15, [truths] * 15, margin=0.3)
    assert found.verdict == "as_good"
    assert "This holds if losses beyond 1.2 label units of a run average less than" in found.sentence


PROBABILITIES = np.random.default_rng(0).dirichlet(np.ones(3), 40)


@pytest.mark.parametrize("form", [lambda p: p, lambda p: [dict(zip(CLASSES, one, strict=True)) for one in p]])
def test_probabilities_in_place_of_classes(form: Any) -> None:
    truths, other = classes(40, 0.5)[0], PROBABILITIES[::-1]
    is_true = np.equal.outer(truths, CLASSES)
    for metric, function, factor, unit in (
        ("roc_auc_macro", roc_auc_score, 100, "points"),
        ("average_precision_micro", average_precision_score, 100, "points"),
        ("log_loss", log_loss, -1, "nats"),
    ):
        task = {**TASK, "primary_metric": metric}
        how = {"average": metric.rpartition("_")[2]} if factor == 100 else {}
        found = compare(truths, form(other.tolist()), reference=form(PROBABILITIES.tolist()), task=task)
        expected = factor * (function(is_true, other, **how) - function(is_true, PROBABILITIES, **how))
        assert (found.difference, found.unit) == (pytest.approx(expected), unit)
        assert (found.verdict, found.reason) == ("not_shown", f"The effect of one row on {metric} is unknown")
    found = compare(truths, form(other.tolist()))
    right = np.mean(np.array(CLASSES)[other.argmax(axis=1)] == truths)
    assert found.difference == pytest.approx(100 * right - 100), "accuracy of the most probable classes"


def test_probabilities_of_several_classes() -> None:
    truths, p_NC = [["a"], ["a", "b"], [], ["c"]] * 5, np.random.default_rng(1).random((20, 3))
    task = {"kind": "multi_label", "classes": CLASSES, "primary_metric": "average_precision_macro"}
    found = compare(truths, p_NC, reference=p_NC[::-1].tolist(), task=task)
    is_true = np.array([[label in truth for label in CLASSES] for truth in truths])
    theirs = [average_precision_score(is_true, p, average="macro") for p in (p_NC, p_NC[::-1])]
    assert found.difference == pytest.approx(100 * (theirs[0] - theirs[1]))


@pytest.mark.parametrize(
    ("run", "metric", "message"),
    [
        (["a", "b"], "log_loss", r"reference\[0\]: log_loss needs probabilities of the classes"),
        ([[0.5, 0.5], "b"], "accuracy", r"\[0\]\[0\]: must have a probability from 0 to 1 for each of 3 cl"),
        ([[0.5, 0.9, 0.1], [1.0, 0.0, 0.0]], "accuracy", r"\[0\]: must have a probability .* 1 in all, but"),
        ([[2.0, -1.0, 0.0], [1.0, 0.0, 0.0]], "log_loss", r"\[0\]: must have a probability .* 1 in all, but"),
        ([{"a": 0.5, "z": 0.5, "b": 0.0}, None], "log_loss", r"\[0\]: must have a probability from 0 to 1"),
    ],
)
def test_bad_probabilities_are_refused(run: Any, metric: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        compare(["a", "b"], run, reference=run, task={**TASK, "primary_metric": metric})


def test_a_run_with_unknown_probabilities_has_no_score() -> None:
    unknown = [[math.nan] * 3, [0.2, 0.3, 0.5]]
    task = {**TASK, "primary_metric": "log_loss"}
    found = compare(["a", "b"], unknown, reference=unknown, task=task)
    assert found.sentence.endswith("No run has a score.")


def test_correlations_have_no_verdict() -> None:
    truth, predicted = np.random.default_rng(2).normal(size=(2, 50))
    for metric, function in (("pearson", pearsonr), ("spearman", spearmanr)):
        found = compare(truth, predicted, task={"kind": "regression", "primary_metric": metric})
        assert found.difference == pytest.approx(100 * function(truth, predicted).statistic - 100)
        assert found.reason == f"The effect of one row on {metric} is unknown"
