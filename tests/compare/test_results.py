from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest
from support.planted_comparison import SPEED, TWO_TASKS, begun, compared, run, search_config, searched, told

from hpo.compare.planning import Request
from hpo.errors import InputError, RunError
from hpo.json_safe import json_safe
from hpo.report import verdicts
from hpo.report.terminal import print_parts
from hpo.study.reading.row_statistics import read_row_statistics
from hpo.study.sampling.points import grid_points
from hpo.study.store.schema import row_statistics
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study

BASE = {1e-5: 70.0, 3e-5: 80.0, 1e-4: 75.0}
BF16 = ("fp32", "bf16")


@pytest.fixture
def storage(sqlite_url: str) -> Iterator[Storage]:
    with open_storage(sqlite_url) as opened:
        yield opened


def noise(params: dict[str, Any], deviation: float, *of: str) -> float:
    """The same for the same values of the parameters `of`."""
    return random.Random(str([params.get(name) for name in of])).gauss(0, deviation)


def planted(loss: float, own_noise: float = 0.0, precision: str = "bf16") -> Any:
    """A precision loses so many points of what fp32 reaches with that seed, give or take noise of its own."""

    def score(params: dict[str, Any]) -> float:
        value = BASE[params["learning_rate"]] + noise(params, 1.0, "seed", "learning_rate")
        if params["fp_precision"] == precision:
            value += noise(params, own_noise, "seed", "learning_rate", "fp_precision") - loss
        return value

    return score


def by_state(loss: float) -> Any:
    def score(params: dict[str, Any]) -> float:
        value = BASE[params["learning_rate"]] + noise(params, 1.0, "seed", "learning_rate")
        return value - loss * (params.get("optimizer_state") == "int8")

    return score


STATES = Request("optimizer_state", precisions=("fp32", "int8"), top=2, seeds=3, max_seeds=24)


def test_moments_that_lose_nothing_are_chosen_for_what_they_take() -> None:
    """They are no faster."""
    found = told(search_config(), by_state(0.0), STATES)
    (row,) = found.content["verdicts"]
    assert (row["verdict"], row["name"]) == ("as_good", "optimizer_state int8")
    assert row["stored_ratio"] == pytest.approx(0.25)
    said = found.content["recommendation"]
    assert said.startswith("Use optimizer_state int8: as good as fp32")
    assert "stored in 0.25 of the bytes (0.25 to 0.25)" in said
    points = grid_points(search_config().search_space, 0)
    for one in found.content["configurations"]:
        assert one["params"] == points[one["trial"]], "each has its own fp_precision"


def test_moments_that_lose() -> None:
    found = told(search_config(), by_state(5.0), STATES)
    assert found.content["recommendation"].startswith(
        "Use optimizer_state fp32: optimizer_state int8 is worse"
    )
    assert "optimizer_state int8 is worse than optimizer_state fp32: score -5.00" in shown(found)


def test_moments_that_were_kept_in_fp32_say_nothing_of_int8() -> None:
    found = told(search_config(), by_state(0.0), STATES, kept="fp32")
    (row,) = found.content["verdicts"]
    assert (row["verdict"], row["num_runs"]) == ("not_shown", 0)
    assert "No pair of runs tells anything" in row["sentence"]


def shown(found: Any) -> str:
    with StringIO() as text, redirect_stdout(text):
        print_parts(verdicts.shown(json_safe(found.content)))
        return text.getvalue()


def test_no_loss() -> None:
    score = planted(0.0, own_noise=0.1)
    found = told(search_config(), score, Request(top=2)).content
    (row,) = found["verdicts"]
    assert (row["verdict"], row["num_runs"], row["num_rows"]) == ("as_good", 6, 4000)
    assert row["low"] > -0.5
    size = row["fp32"] - row["baseline"]
    assert (row["baseline"], row["fp32"]) == (0, pytest.approx(78, abs=3))
    assert (
        "This holds only if fewer than 0.5 / d of the runs lose d points more than fp32: 2.5 % for 20 points "
        f"and {50 / size:.2g} % for a collapse to the baseline ({size:.2f} points). These 6 runs do not "
        "exclude 39 %."
    ) in row["sentence"]
    assert row["collapse_share"] == pytest.approx(1 - 0.05 ** (1 / 6))
    assert found["error"] == (
        "Each verdict `as good` is wrong in at most 2.5 % of comparisons, and so is `worse`. The verdicts "
        "are about these 2 configurations on new seeds and new rows of this kind."
    )
    assert found["recommendation"] == (
        "Use bf16: as good as fp32 (score within 0.5 points), and 2.00 times as fast in training (2.00 to "
        "2.00)."
    )


@pytest.mark.parametrize(
    ("precisions", "named"),
    [(BF16, "bf16 is as good"), ((*BF16, "fp16"), "bf16 and fp16 are as good")],
    ids=["one", "two"],
)
def test_fp32_is_recommended_if_the_others_are_no_faster(
    precisions: tuple[str, ...], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in precisions:
        monkeypatch.setitem(SPEED, name, 100.0)
    found = told(search_config(), planted(0.0, own_noise=0.1), Request(precisions=precisions)).content
    within = "(score within 0.5 points), but not shown to be faster."
    assert found["recommendation"] == f"Use fp32: {named} {within}"


def test_a_loss() -> None:
    score = planted(2.0, own_noise=0.1)
    found = told(search_config(), score, Request(top=2))
    (row,) = found.content["verdicts"]
    assert row["verdict"] == "worse"
    assert row["low"] < -2 < row["high"] < -0.5
    assert "collapse" not in row["sentence"]
    assert found.content["recommendation"] == "Use fp32: bf16 is worse (score within 0.5 points)."


def test_an_undecided_comparison_says_how_to_add_seeds() -> None:
    score = planted(0.0, own_noise=0.6)
    config = search_config()
    found = told(config, score, Request(precisions=BF16, top=1, max_seeds=5)).content
    row = found["verdicts"][0]
    assert (row["verdict"], row["num_runs"]) == ("not_shown", 5)
    assert found["recommendation"].startswith("Use fp32: it is not shown whether bf16 is as good")
    assert row["sentence"].endswith("More seeds may decide: hpo compare tiny --max-seeds 7")
    more = told(config, score, Request(precisions=BF16, top=1, max_seeds=40)).content["verdicts"][0]
    assert more["verdict"] == "as_good"
    for num, is_advised in ((150, True), (200, False)):
        request = Request(precisions=BF16, top=1, seeds=num, max_seeds=num)
        most = told(config, planted(0.5, own_noise=3.0), request).content["verdicts"][0]
        assert most["verdict"] == "not_shown"
        assert most["sentence"].endswith("--max-seeds 200") is is_advised, "no comparison has more than 200"


@pytest.mark.parametrize("losses", [{}, {"fp16": 2.0}], ids=["none loses", "one loses"])
def test_every_precision_gets_its_verdict(losses: dict[str, float]) -> None:
    """No precision waits for the verdict on another one."""

    def score(params: dict[str, Any]) -> float:
        value = BASE[params["learning_rate"]] + noise(params, 1.0, "seed", "learning_rate")
        return value - losses.get(params["fp_precision"], 0.0)

    found = told(
        search_config(), score, Request(precisions=("fp32", "fp16", "bf16", "bf16-true"), top=2)
    ).content
    verdicts = {row["precision"]: row["verdict"] for row in found["verdicts"]}
    expected = {"fp16": "worse" if losses else "as_good", "bf16": "as_good", "bf16-true": "as_good"}
    assert verdicts == expected
    assert "With 3 precisions, at least one wrong `as good` is said in at most 7.5 %" in found["error"]


@pytest.mark.parametrize("share", [3, 5])
def test_runs_without_a_score_count_alike_on_both_sides(share: int) -> None:
    """NaN hits both precisions as often, in other runs: neither verdict."""
    score = planted(0.0)

    def fails(params: dict[str, Any]) -> float | None:
        place = params.get("seed", 0) + (params["fp_precision"] == "bf16")
        return None if place % share == 1 else score(params)

    found = told(search_config(), fails, Request(top=1, max_seeds=50), search=score)
    (row,) = found.content["verdicts"]
    assert (row["verdict"], row["num_runs"]) == ("not_shown", 50)


def test_fp32_that_learned_nothing_gives_no_verdict() -> None:
    found = told(search_config(), lambda _: 0.0, Request(top=1)).content
    (row,) = found["verdicts"]
    assert row["verdict"] == "not_shown"
    assert "It is not shown that fp32 has learned anything: it has 0.00 points" in row["sentence"]


def test_runs_that_collapse_are_shown_one_by_one() -> None:
    """One run is nearer to the baseline, one has no score."""
    score = planted(0.0, own_noise=0.05)

    def collapses(params: dict[str, Any]) -> float | None:
        place = params.get("seed", 0) - 1_000_000
        if params["fp_precision"] == "fp32" or place not in (1, 4):
            return score(params)
        return 30.0 if place == 1 else None

    found = told(search_config(), collapses, Request(top=1, max_seeds=9))
    (row,) = found.content["verdicts"]
    assert (row["verdict"], row["num_collapsed"], row["num_runs"]) == ("not_shown", 2, 9)
    far, failed = sorted(found.content["collapsed"])
    best = found.plan.configurations[0].trial
    pattern = (
        rf"bf16, trial \d+ \(configuration {best}, seed 1000001\): score 30.00, nearer to the baseline than "
        "to fp32."
    )
    assert re.fullmatch(pattern, far)
    assert failed.endswith(f"(configuration {best}, seed 1000004): no score, nonfinite: the loss was NaN.")
    assert "2 of 9 runs collapsed, and 0 of fp32." in row["sentence"]
    assert f"Collapsed: {far}" in shown(found)


def test_a_precision_that_does_not_train() -> None:
    score = planted(0.0)

    def fails(params: dict[str, Any]) -> float | None:
        return None if params["fp_precision"] == "bf16" else score(params)

    found = told(search_config(), fails, Request(), search=score)
    (row,) = found.content["verdicts"]
    assert (row["verdict"], row["num_runs"], row["num_collapsed"]) == ("worse", 9, 9)
    assert len(found.content["collapsed"]) == 9


def test_fp32_that_does_not_train() -> None:
    score = planted(0.0)

    def fails(params: dict[str, Any]) -> float | None:
        return None if params["fp_precision"] == "fp32" else score(params)

    found = told(search_config(), fails, Request(), search=score)
    (row,) = found.content["verdicts"]
    assert row["verdict"] == "not_shown"
    assert row["reason"] == "No run of fp32 has a score"
    assert found.content["num_seeds"] == {"fp32": 3, "bf16": 3}, "no more seeds are spent on it"
    assert not re.search("nan|inf[^i]", shown(found)), "what is not known is a dash"


MEMORY = {"metric": "peak_memory_bytes", "direction": "minimize"}


@pytest.mark.parametrize(
    "objective", [[MEMORY], [MEMORY, {"metric": "topic/r2", "direction": "maximize"}]], ids=["alone", "first"]
)
def test_what_is_measured_decides_nothing_of_quality(objective: Any) -> None:
    """Less memory is better, but more score is; a loss of two points stays a loss."""
    score = planted(2.0, own_noise=0.1)
    config = search_config(objective=objective)
    found = told(config, score, Request(top=1))
    row = found.content["verdicts"][0]
    assert row["metric"] == ("topic/r2" if len(objective) > 1 else "score")
    assert (row["verdict"], row["difference"]) == ("worse", pytest.approx(-2.0, abs=0.2))
    rate = found.plan.configurations[0].params["learning_rate"]
    assert len(objective) == 1 or rate == 3e-5, "the best by what is compared"


def test_an_error_is_in_the_units_of_the_labels() -> None:
    """A loss of 2 of them is one of -2, since the sign is turned; and errors have a bound."""
    score = planted(2.0, own_noise=0.1)
    config = search_config(objective={"metric": "topic/mae", "direction": "minimize"})
    with pytest.raises(InputError, match="--margin must be given: topic/mae is in label units"):
        told(config, score, Request())
    found = told(config, score, Request(top=1, margin=4.0, max_seeds=5))
    row = found.content["verdicts"][0]
    assert row["difference"] == pytest.approx(-2.0, abs=0.2)
    assert (row["verdict"], row["unit"]) == ("as_good", "label units")
    assert "An error counts as the range of the labels where it is larger." in row["sentence"]
    both = told(config, score, Request(top=1, margin=4.0, max_seeds=5), tasks=TWO_TASKS)
    assert {*both.content["verdicts"][0]["tasks"]} == {"topic/r2", "tone/r2"}

    def fails(params: dict[str, Any]) -> float | None:
        is_lost = params["fp_precision"] == "bf16" and params.get("seed", 0) % 5 == 1
        return None if is_lost else score(params)

    row = told(config, fails, Request(top=1, margin=4.0, max_seeds=9)).content["verdicts"][0]
    assert (row["verdict"], row["num_collapsed"]) == ("not_shown", 2)


def test_a_fallback_is_no_value_of_the_precision_that_it_replaced() -> None:
    """Neither as a score nor as a speed, and the comparison asks for no fallback."""
    score = planted(0.0)
    config = search_config(amp={"on_unsupported": "fallback"})
    found = told(config, score, Request(top=1, max_seeds=5), effective={"bf16": "fp32"})
    (row,) = found.content["verdicts"]
    assert (row["verdict"], row["num_runs"], row["speed_ratio"]) == ("not_shown", 0, None)
    assert "No pair of runs tells anything: a run of bf16 or fp32 failed, or ran" in row["sentence"]


@pytest.mark.parametrize(("lost", "verdict"), [("nonfinite", "worse"), ("invalid", "not_shown")])
def test_an_invalid_run_is_no_evidence_against_its_precision(lost: str, verdict: str) -> None:
    score = planted(0.0)
    found = told(
        search_config(),
        lambda params: None if params["fp_precision"] == "bf16" else score(params),
        Request(top=1, max_seeds=5),
        search=score,
        lost=lost,
    )
    (row,) = found.content["verdicts"]
    assert row["verdict"] == verdict
    assert bool(row["num_collapsed"]) == bool(found.content["collapsed"]) == (lost == "nonfinite")


def test_a_comparison_that_was_stopped_says_the_same(storage: Storage, tmp_path: Any) -> None:
    score = planted(0.3, own_noise=0.5)
    request = Request(top=1, max_seeds=5)
    config = searched(storage, score)
    whole = compared(storage, config, score, request).content
    with open_storage(f"sqlite:///{tmp_path}/other.db") as other:
        searched(other, score)
        for trials in (1, 4):
            companion = begun(other, config, request)
            create_or_resume_study(other, companion)
            run(other, companion, score, trials=trials)
        again = compared(other, config, score, request).content
    assert again == whole


def test_rows_that_are_damaged(storage: Storage) -> None:
    score = planted(0.0)
    compared(storage, searched(storage, score), score, Request(top=1))
    assert len(read_row_statistics(storage, "tiny-compare", TWO_TASKS)) == 8
    with storage.engine.begin() as connection:
        connection.execute(row_statistics.update().values(content=b"PK"))
    with pytest.raises(RunError, match=r"cannot be read .* Compare anew: hpo delete tiny-compare"):
        read_row_statistics(storage, "tiny-compare", TWO_TASKS)
