"""Verdicts, recommendations and rounds of comparisons with planted scores."""

import random
import re
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import Any

import numpy as np
import pytest
from scipy.stats import t
from support.planted_comparison import (
    BASE,
    HERE,
    LUCK,
    NUM_ROWS,
    TWO_TASKS,
    begun,
    compared,
    judged,
    planned,
    run,
    search_config,
    searched,
)
from support.planted_comparison import lucky_score as score

from hpo.compare.comparison_study import open_comparison
from hpo.compare.planning import FIRST_SEED, Request
from hpo.config.study_config import StudyConfig
from hpo.errors import InputError
from hpo.json_safe import json_safe
from hpo.report import verdicts
from hpo.report.terminal import print_parts
from hpo.study.reading.reader import read_study
from hpo.study.sampling.points import grid_points
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study

BF16 = ("fp32", "bf16")
STATES = Request("optimizer_state", precisions=("fp32", "int8"), top=2, seeds=3, max_seeds=24)


def noise(params: dict[str, Any], deviation: float, *names: str) -> float:
    """Return the same noise for the same values of these parameters."""
    return random.Random(str([params.get(name) for name in names])).gauss(0, deviation)


def planted(loss: float, own_noise: float = 0.0, **where: str) -> Any:
    """Return a score with this loss, and noise, in a precision (default: bf16)."""
    ((setting, value),) = (where or {"fp_precision": "bf16"}).items()

    def score(params: dict[str, Any]) -> float:
        points = BASE[params["learning_rate"]] + noise(params, 1.0, "seed", "learning_rate")
        if params.get(setting) == value:
            points += noise(params, own_noise, "seed", "learning_rate", setting) - loss
        return points

    return score


def failing(score: Any, precision: str) -> Any:
    """Return this score, and None in a precision."""
    return lambda params: None if params["fp_precision"] == precision else score(params)


def row_of(score: Any, request: Request, **how: Any) -> dict[str, Any]:
    (row,) = judged(search_config(), score, request, **how).content["verdicts"]
    return dict(row)


def shown(content: Any) -> str:
    with StringIO() as text, redirect_stdout(text):
        print_parts(verdicts.comparison_parts(json_safe(content)))
        return text.getvalue()


def test_no_loss_is_as_good_and_the_fastest_is_recommended() -> None:
    found = judged(search_config(), planted(0.0, own_noise=0.1), Request(top=2)).content
    (row,) = found["verdicts"]
    assert (row["verdict"], row["num_runs"], row["num_rows"]) == ("as_good", 18, 4000)
    assert row["low"] > -0.5
    assert (row["baseline"], row["fp32"]) == (0, pytest.approx(78, abs=3))
    condition = row["condition"]
    assert (condition["covered"], condition["slack"]) == (2.0, pytest.approx(0.5 + row["low"]))
    assert condition["possible_share"] == pytest.approx(1 - 0.05 ** (1 / 18))
    assert "18 runs exclude no q below 15%." in row["sentence"]
    assert "wrong in at most 2.5% of comparisons, and so is `worse`, where its condition" in found["error"]
    assert found["recommendation"] == (
        "Use bf16: as good as fp32 (score within 0.5 points), and 2.00 times as fast in training (2.00 to "
        "2.00)."
    )


def test_a_loss_is_worse() -> None:
    found = judged(search_config(), planted(2.0, own_noise=0.1), Request(top=2)).content
    (row,) = found["verdicts"]
    assert row["verdict"] == "worse"
    assert row["low"] < -2 < row["high"] < -0.5
    assert "collapse" not in row["sentence"]
    assert found["recommendation"] == "Use fp32: bf16 is worse (score within 0.5 points)."


def test_optimizer_states_are_recommended_by_their_size() -> None:
    found = judged(search_config(), planted(0.0, optimizer_state="int8"), STATES)
    (row,) = found.content["verdicts"]
    assert (row["verdict"], row["name"]) == ("as_good", "optimizer_state int8")
    assert row["stored_ratio"] == pytest.approx(0.25)
    text = found.content["recommendation"]
    assert text.startswith("Use optimizer_state int8: as good as fp32")
    assert "stored in 0.25 of the bytes (0.25 to 0.25)" in text
    points = grid_points(search_config().search_space, 0)
    for one in found.content["configurations"]:
        assert one["params"] == points[one["trial"]], "each has its own fp_precision"
    lost = judged(search_config(), planted(5.0, optimizer_state="int8"), STATES).content
    assert lost["recommendation"].startswith("Use optimizer_state fp32: optimizer_state int8 is worse")


@pytest.mark.parametrize(
    ("request_", "how"),
    [(STATES, {"kept": "fp32"}), (Request(top=1, max_seeds=5), {"effective": {"bf16": "fp32"}})],
    ids=["optimizer state", "precision"],
)
def test_fallbacks_are_no_evidence(request_: Request, how: dict[str, Any]) -> None:
    row = row_of(planted(0.0), request_, **how)
    assert (row["verdict"], row["num_runs"], row["speed_ratio"]) == ("not_shown", 0, None)
    assert "No pair of runs counts: a run of" in row["sentence"]


def test_an_open_verdict_comes_with_the_command_for_more_seeds() -> None:
    score = planted(0.0, own_noise=0.6)
    found = judged(search_config(), score, Request(precisions=BF16, top=1, max_seeds=5)).content
    row = found["verdicts"][0]
    assert (row["verdict"], row["num_runs"]) == ("not_shown", 5)
    assert found["recommendation"].startswith("Use fp32: it is not shown whether bf16 is as good")
    assert row["sentence"].endswith("More seeds may decide: hpo compare tiny --max-seeds 7")
    assert row_of(score, Request(precisions=BF16, top=1, max_seeds=40))["verdict"] == "as_good"
    for num, is_advised in ((150, True), (200, False)):
        most = row_of(planted(0.5, own_noise=3.0), Request(precisions=BF16, top=1, seeds=num, max_seeds=num))
        assert most["verdict"] == "not_shown"
        assert most["sentence"].endswith("--max-seeds 200") is is_advised, "200 seeds are the limit"


def test_every_precision_gets_its_verdict() -> None:
    request = Request(precisions=("fp32", "fp16", "bf16", "bf16-true"), top=2)
    found = judged(search_config(), planted(2.0, fp_precision="fp16"), request).content
    expected = {"fp16": "worse", "bf16": "as_good", "bf16-true": "as_good"}
    assert {row["precision"]: row["verdict"] for row in found["verdicts"]} == expected
    assert "any of 3 `as good` in at most 7.5%" in found["error"]


def test_collapsed_runs_are_listed() -> None:
    """One run is nearer to the baseline, one has no score."""
    score = planted(0.0, own_noise=0.05)

    def collapses(params: dict[str, Any]) -> float | None:
        place = params.get("seed", 0) - 1_000_000
        if params["fp_precision"] == "fp32" or place not in (1, 4):
            return score(params)
        return 30.0 if place == 1 else None

    found = judged(search_config(), collapses, Request(top=1, max_seeds=9))
    (row,) = found.content["verdicts"]
    assert (row["verdict"], row["num_collapsed"], row["num_runs"]) == ("not_shown", 2, 9)
    far, failed = sorted(found.content["collapsed"])
    best = found.plan.configurations[0].trial
    pattern = rf"bf16, trial \d+ \(configuration {best}, seed 1000001\): score 30.00, nearer to the baseline"
    assert re.match(pattern, far)
    assert failed.endswith(f"(configuration {best}, seed 1000004): no score, nonfinite: the loss was NaN.")
    assert "2 of 9 runs collapsed, and 0 of fp32." in row["sentence"]
    assert f"Collapsed: {far}" in shown(found.content)


@pytest.mark.parametrize(
    ("lost", "verdict", "num_collapsed"), [("nonfinite", "worse", 9), ("invalid", "not_shown", None)]
)
def test_a_precision_without_a_score(lost: str, verdict: str, num_collapsed: int | None) -> None:
    """An invalid run is no evidence against its precision."""
    score = planted(0.0)
    found = judged(search_config(), failing(score, "bf16"), Request(), search=score, lost=lost).content
    (row,) = found["verdicts"]
    assert (row["verdict"], row["num_collapsed"]) == (verdict, num_collapsed)
    assert len(found["collapsed"]) == (num_collapsed or 0)


def test_fp32_without_a_score() -> None:
    score = planted(0.0)
    found = judged(search_config(), failing(score, "fp32"), Request(), search=score)
    (row,) = found.content["verdicts"]
    assert (row["verdict"], row["reason"]) == ("not_shown", "No run of fp32 has a score")
    assert found.content["num_seeds"] == {"fp32": 3, "bf16": 3}, "no more seeds are spent on it"
    assert not re.search("nan|inf[^i]", shown(found.content))


def test_costs_do_not_decide_about_quality() -> None:
    memory = {"metric": "peak_memory_bytes", "direction": "minimize"}
    config = search_config(objective=[memory, {"metric": "topic/r2", "direction": "maximize"}])
    found = judged(config, planted(2.0, own_noise=0.1), Request(top=1))
    row = found.content["verdicts"][0]
    assert (row["metric"], row["verdict"]) == ("topic/r2", "worse")
    assert row["difference"] == pytest.approx(-2.0, abs=0.2)
    assert found.plan.configurations[0].params["learning_rate"] == 3e-5, "the best by the compared metric"


def test_an_error_is_in_the_units_of_the_labels() -> None:
    score = planted(2.0, own_noise=0.1)
    config = search_config(objective={"metric": "topic/mae", "direction": "minimize"})
    with pytest.raises(InputError, match="--margin must be given: topic/mae is in label units"):
        judged(config, score, Request())
    request = Request(top=1, margin=4.0, max_seeds=60)
    row = judged(config, score, request, tasks=TWO_TASKS).content["verdicts"][0]
    assert row["difference"] == pytest.approx(-2.0, abs=0.2)
    assert (row["verdict"], row["unit"]) == ("as_good", "label units")
    assert "An error of topic counts as the range of the labels where it is larger." in row["sentence"]
    assert {*row["tasks"]} == {"topic/r2", "tone/r2"}


def test_a_stopped_comparison_has_the_same_result(empty: Storage, tmp_path: Any) -> None:
    score, request = planted(0.3, own_noise=0.5), Request(top=1, max_seeds=5)
    config = searched(empty, score)
    whole = compared(empty, config, score, request).content
    with open_storage(f"sqlite:///{tmp_path}/other.db") as other:
        searched(other, score)
        for trials in (1, 4):
            comparison = begun(other, config, request)
            create_or_resume_study(other, comparison)
            run(other, comparison, score, trials=trials)
        again = compared(other, config, score, request).content
    assert again == whole


REQUEST = Request("configurations")


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
