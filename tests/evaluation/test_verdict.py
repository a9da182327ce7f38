"""Sentences of a verdict. Its decisions: tests/evaluation/test_predictions.py and tests/benchmarks."""

from __future__ import annotations

import math

import numpy as np
import pytest

import hpo
from hpo.evaluation.verdict import Facts, Question


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
