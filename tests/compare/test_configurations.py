"""`hpo compare --configurations`: the best configurations on new seeds, without a winner."""

from __future__ import annotations

from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import Any

import numpy as np
import pytest
from scipy.stats import t
from support.planted_comparison import HERE, LUCK, NUM_ROWS, begun, compared, planned
from support.planted_comparison import lucky_score as score

from hpo.compare.comparison_study import open_comparison
from hpo.compare.planning import FIRST_SEED, Request
from hpo.config.study_config import StudyConfig
from hpo.device import DeviceInfo
from hpo.json_safe import json_safe
from hpo.report import verdicts
from hpo.report.terminal import print_parts
from hpo.study.reading.reader import read_study
from hpo.study.store.storage import Storage
from hpo.study.store.studies import create_or_resume_study

REQUEST = Request("configurations")


def shown(found: Any) -> str:
    with StringIO() as text, redirect_stdout(text):
        print_parts(verdicts.comparison_parts(json_safe(found)))
        return text.getvalue()


def test_each_configuration_has_its_own_precision_and_new_seeds(
    storage: Storage, config: StudyConfig
) -> None:
    comparison = begun(storage, config, REQUEST)
    plan = planned(comparison)
    assert comparison.name == "tiny-compare-configurations"
    assert plan.command == "hpo compare tiny --configurations"
    ranked = [(one.params["learning_rate"], one.precision) for one in plan.configurations]
    assert ranked == [(3e-5, "fp32"), (3e-5, "bf16"), (1e-4, "fp32")]
    points = plan.points()
    assert {(point["learning_rate"], point["fp_precision"]) for point in points} == {*ranked}
    seeds = [point["seed"] for point in points]
    assert len({*seeds}) == len(points) == 9
    assert min(seeds) >= FIRST_SEED


def test_a_trial_with_a_fallback_has_its_effective_precision(storage: Storage, config: StudyConfig) -> None:
    record = read_study(storage, config.name)
    effective = {"fp_precision_effective": "fp32"}
    trials = [replace(trial, attributes={**trial.attributes, **effective}) for trial in record.trials]
    here, fell_back = DeviceInfo("cpu", "Example CPU"), replace(record, trials=trials)  # without bf16
    plan = planned(open_comparison(storage, fell_back, config, REQUEST, device=here, has_test=True))
    assert plan.precisions == ("fp32",)
    assert len({one.params["learning_rate"] for one in plan.configurations}) == 3


def test_means_have_students_interval_and_no_winner(storage: Storage, config: StudyConfig) -> None:
    """All rows add alike, so the runs decide: Student's t over three seeds."""
    found = compared(storage, config, score, REQUEST).content
    assert (found["metric"], found["split"], found["unit"]) == ("score", "test", "points")
    first = found["configurations"][0]
    assert (first["num_runs"], first["num_failed"], first["precision"]) == (3, 0, "fp32")
    values = 80 + np.array(LUCK)
    width = t.ppf(0.975, 2) * values.std(ddof=1) / np.sqrt(3)
    assert first["mean"] == pytest.approx(values.mean())
    assert (first["low"], first["high"]) == pytest.approx((values.mean() - width, values.mean() + width))
    assert first["search"] == pytest.approx(85.0)
    assert found["baseline"] == pytest.approx(0.0), "the r2 of a constant"
    assert found["num_rows"] == NUM_ROWS
    means = [one["mean"] for one in found["configurations"]]
    assert means == pytest.approx([80 + 1 / 3, 79 + 1 / 3, 75 + 1 / 3])
    assert found["has_ended"]
    assert read_study(storage, config.name).comparisons["configurations"] == json_safe(found)
    text = found["recommendation"]
    assert text.startswith("score (points) on 3 new seeds and 4,000 labelled rows of test. trial ")
    assert f"trial {first['trial']}: 80.33 [" in text
    assert "best constant prediction: 0.00" in text
    assert "No winner is named" in shown(found)
    assert not {"best", "winner", "verdicts"} & found.keys()


def test_a_run_without_a_score_counts_as_the_baseline(storage: Storage, config: StudyConfig) -> None:
    def fails(params: dict[str, Any]) -> float | None:
        is_lost = params.get("seed") == FIRST_SEED and params["learning_rate"] == 3e-5
        return None if is_lost else score(params)

    first = compared(storage, config, fails, REQUEST).content["configurations"][0]
    assert (first["num_runs"], first["num_failed"]) == (3, 1)
    assert first["mean"] == pytest.approx((0 + 80 + 82) / 3)


@pytest.mark.parametrize(
    ("has_scores", "detailed", "split", "reason"),
    [
        (False, "validation", "validation", ""),
        (True, "validation", "validation", "the search scored its trials on test"),
        (False, "test", "validation", "test has a detailed evaluation of trial 1"),
        (False, "validation", "test", "`hpo compare` used test"),
    ],
)
def test_scores_on_test_seen_before_the_selection(
    has_scores: bool, detailed: str, split: str, reason: str, storage: Storage, config: StudyConfig
) -> None:
    record = read_study(storage, config.name)
    trials = [
        one
        if has_scores
        else replace(one, telemetry={key: of for key, of in one.telemetry.items() if key != "test_metrics"})
        for one in record.trials
    ]
    trials[1] = replace(trials[1], detailed={detailed: {}})
    record = replace(record, trials=trials, comparisons={"precisions": {"split": split}})
    comparison = open_comparison(storage, record, config, REQUEST, device=HERE, has_test=True)
    assert planned(comparison).test_seen == reason
    create_or_resume_study(storage, comparison)
    found = json_safe(compared(storage, config, score, REQUEST).content)
    assert ("were seen before this selection" in found["error"]) == bool(reason)
