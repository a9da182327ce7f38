"""Whole comparisons with planted scores: what is planted is what is said."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest
from planted import TASKS, TWO_TASKS, begun, compared, run, searched

from hpo.cli.display import print_comparison
from hpo.compare.answers import Scores
from hpo.compare.companion import Request
from hpo.compare.estimate import ratio_estimate
from hpo.compare.results import judge
from hpo.compare.sequential import Plan
from hpo.compare.verdict import judge_paired
from hpo.config.comparison import Arm
from hpo.errors import InputError
from hpo.report.compared import configuration_table
from hpo.study.lifecycle import delete_study
from hpo.study.storage import Storage, open_storage
from hpo.study.study_record import best_trials, complete_trials

BASE = {1e-5: 70.0, 3e-5: 80.0, 1e-4: 75.0}


@pytest.fixture
def storage(sqlite_url: str) -> Iterator[Storage]:
    with open_storage(sqlite_url) as opened:
        yield opened


def noise(params: dict[str, Any], deviation: float, *of: str) -> float:
    """The same for the same values of the parameters `of`."""
    return random.Random(str([params.get(name) for name in of])).gauss(0, deviation)


def planted(loss: float, own_noise: float = 0.0) -> Any:
    """bf16 loses so many points of what fp32 reaches with that seed, give or take noise of its own."""

    def score(params: dict[str, Any]) -> float:
        value = BASE[params["learning_rate"]] + noise(params, 1.0, "seed", "learning_rate")
        if params["fp_precision"] == "bf16":
            value += noise(params, own_noise, "seed", "learning_rate", "fp_precision") - loss
        return value

    return score


def verdicts(found: Any) -> dict[tuple[str, str], str]:
    rows = [row for row in found.found.rows if not row.is_noise_floor]
    return {(row.precision, row.question): row.verdict.verdict for row in rows}


def test_no_loss(storage: Storage) -> None:
    score = planted(0.0, own_noise=0.1)
    found = compared(storage, searched(storage, score), score, Request(top=2, margin=2.0, max_seeds=32))
    assert verdicts(found) == {("bf16", "paired"): "as_good", ("bf16", "tuned"): "as_good"}
    assert found.recommendation.startswith(
        "Use bf16: as good as fp32 (score within 2 points; "
        "paired (2 configurations) and tuned (2 configurations each), "
    )
    assert "new seeds) and 2.00 times as fast (" in found.recommendation
    assert found.recommendation.endswith(" on Example CPU.")
    floor = found.found.rows[2]
    assert (floor.precision, floor.is_noise_floor) == ("fp32", True)
    assert floor.verdict.difference != 0, "other seeds, not the same ones"


def test_more_seeds_go_on_with_the_trials_that_are_there(storage: Storage) -> None:
    """And say what a comparison says that was allowed as many from the start, at its looks' own levels."""
    score = planted(0.0, own_noise=3.0)
    config = searched(storage, score)
    found = compared(storage, config, score, Request(precisions=("fp32", "bf16"), top=1, max_seeds=5))
    assert verdicts(found)["bf16", "paired"] == "undecided"
    assert found.recommendation.startswith("Use fp32: 5 seeds do not tell whether bf16 is as good")
    before = storage.read_study("tiny-compare").trials
    more = compared(storage, config, score, Request(max_seeds=8))
    after = storage.read_study("tiny-compare").trials
    assert after[: len(before)] == before
    assert len(after) == len(before) * 8 // 5
    assert {row.verdict.num_seeds for row in more.found.rows} == {8}
    assert more.found.rows[0].verdict.difference != found.found.rows[0].verdict.difference


def test_a_loss_of_the_margin_is_decided_by_no_number_of_seeds(storage: Storage) -> None:
    score = planted(2.0, own_noise=0.3)
    config = searched(storage, score)
    asked = Request(precisions=("fp32", "bf16"), top=1, margin=2.0, max_seeds=8)
    found = compared(storage, config, score, asked)
    assert found.found.rows[0].verdict.seeds_needed is None
    assert found.recommendation.endswith(
        " bf16 (paired), bf16 (tuned): no number of seeds up to 200 is likely to decide."
    )


def test_a_race_goes_on_with_more_seeds(storage: Storage) -> None:
    score = planted(0.0, own_noise=3.0)
    config = searched(storage, score)
    found = compared(storage, config, score, Request("configurations", top=2, max_seeds=3))
    assert found.recommendation.endswith(
        " More seeds may tell: hpo compare tiny --configurations --max-seeds 5"
    )
    more = compared(storage, config, score, Request("configurations", max_seeds=5))
    assert [standing.num_seeds for standing in more.found.standings] == [5, 5]
    assert len(storage.read_study("tiny-race").trials) == 10


def test_another_learning_rate_is_needed(storage: Storage) -> None:
    """Under the rates that suit fp32 bf16 loses; with its own it does not."""
    best = {"fp32": 3e-5, "bf16": 1e-4}

    def score(params: dict[str, Any]) -> float:
        suits = params["learning_rate"] == best[params["fp_precision"]]
        return 80.0 - (0.0 if suits else 10.0) + noise(params, 0.05, "seed", "fp_precision")

    def search(params: dict[str, Any]) -> float:
        return score(params) + (1.0 if params["fp_precision"] == "fp32" else 0.0)

    config = searched(storage, search)
    found = compared(storage, config, score, Request(top=1))
    assert verdicts(found) == {("bf16", "paired"): "worse", ("bf16", "tuned"): "as_good"}
    assert found.recommendation.startswith(
        "Use bf16, with configurations that were searched in it (learning_rate 0.0001, not 3e-05; "
        "shared ones lose: -9.9"
    )
    table = configuration_table(found.as_json())
    assert list(table["compared"]) == ["paired; tuned for fp32", "tuned for bf16"]
    assert list(table["learning_rate"]) == ["3e-05", "0.0001"]
    assert [int(trial) for trial in table["trial"]] == [one.trial for one in found.plan.configurations]
    assert "configurations that were compared" in shown(found)
    delete_study(storage, "tiny-compare")

    def slower(params: dict[str, Any]) -> float:
        return 0.5 if params["learning_rate"] == best["bf16"] else 1.0

    slow = compared(storage, config, score, Request(top=1), speed=slower)
    speeds = {row.question: row.speed.ratio for row in slow.found.rows[:2]}
    assert speeds == pytest.approx({"paired": 2.0, "tuned": 1.0}, abs=0.01), "each of what it compares"
    assert slow.recommendation.startswith("Use fp32: as good (score within 0.5 points), but not shown to be")


def shown(found: Any) -> str:
    """What the terminal shows."""
    with StringIO() as text, redirect_stdout(text):
        print_comparison(found)
        return text.getvalue()


def test_a_precision_that_does_not_train(storage: Storage) -> None:
    score = planted(0.0)

    def fails(params: dict[str, Any]) -> float | None:
        return None if params["fp_precision"] == "bf16" else score(params)

    found = compared(storage, searched(storage, score), fails)
    assert verdicts(found)["bf16", "paired"] == "worse"
    assert found.found.rows[0].verdict.num_failed > 0
    fp32, bf16 = found.as_json()["precisions"]
    assert (fp32["precision"], fp32["reason"]) == ("fp32", "")
    assert fp32["outcomes"] == {"complete": fp32["num_trials"]}
    assert (bf16["precision"], bf16["reason"]) == ("bf16", "the loss was NaN")
    assert bf16["outcomes"] == {"nonfinite": bf16["num_trials"]}
    text = shown(found)
    assert not re.search("nan|inf[^i]", text), "what is not known is a dash"
    assert re.search(r"bf16 +paired +– +worse, \d+ failed +3 +–", text)
    assert re.search(r"fp32 +other seeds +.* noise floor +3 +–", text)


def test_fp32_that_does_not_train(storage: Storage) -> None:
    score = planted(0.0)

    def fails(params: dict[str, Any]) -> float | None:
        return None if params["fp_precision"] == "fp32" else score(params)

    found = compared(storage, searched(storage, score), fails)
    assert found.recommendation == (
        "fp32 trains less often than bf16: 9 of its trials ended without a score, of bf16 0. Use bf16 where "
        "fp32 does not train; what it loses is not known."
    )
    assert found.plan.num_seeds == 3, "no more seeds are spent on it"


def test_failures_that_forbid_as_good_promise_no_seeds(storage: Storage) -> None:
    score = planted(0.0, own_noise=0.05)

    def fails(params: dict[str, Any]) -> float | None:
        unlucky = params["fp_precision"] == "bf16" and params.get("seed", 0) % 5 == 0
        return None if unlucky else score(params)

    found = compared(storage, searched(storage, score), fails, Request(top=1, max_seeds=8))
    row = found.found.rows[0]
    assert (row.verdict.verdict, row.verdict.seeds_needed) == ("undecided", None)
    assert f": {row.verdict.reason}." in found.recommendation
    assert "should decide bf16 (paired)" not in found.recommendation


def test_tuned_sides_have_as_many_configurations(storage: Storage) -> None:
    """bf16 has one configuration and fp32 three, of which the second and the third are worse."""
    space = {
        "fp_precision": {"type": "categorical", "choices": ["fp32", "bf16"]},
        "learning_rate": {
            "type": "categorical",
            "choices": [1e-5, 3e-5, 1e-4],
            "when": {"fp_precision": "fp32"},
        },
    }
    score = {3e-5: 80.0, 1e-4: 75.0, 1e-5: 70.0, 5e-5: 80.0}

    def planted_score(params: dict[str, Any]) -> float:
        return score[params.get("learning_rate", 5e-5)] + noise(params, 0.1, "seed", "fp_precision")

    config = searched(storage, planted_score, search_space=space)
    found = compared(storage, config, planted_score, Request(top=3, margin=1.0))
    tuned = [name for one in found.plan.configurations for name in one.tuned]
    assert (tuned.count("fp32"), tuned.count("bf16")) == (3, 1)
    (row,) = (row for row in found.found.rows if row.question == "tuned")
    assert (row.num_configurations, row.as_json()["num_configurations"]) == (1, 1)
    assert row.verdict.difference == pytest.approx(0, abs=0.3)
    assert "tuned (1 configuration each)" in found.recommendation


MEMORY = {"metric": "peak_memory_bytes", "direction": "minimize"}
OBJECTIVES = {
    "measured": [MEMORY],
    "measured first": [MEMORY, {"metric": "topic/f1_macro", "direction": "maximize"}],
}


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_what_is_measured_decides_nothing_of_quality(objective: Any, storage: Storage) -> None:
    """Less memory is better, but more score is; a loss of two points stays a loss."""
    score = planted(2.0, own_noise=0.1)
    config = searched(storage, score, objective=objective)
    found = compared(storage, config, score, Request(top=1))
    assert found.found.objective == ("topic/f1_macro" if len(objective) > 1 else "score")
    row = found.found.rows[0]
    assert (row.question, row.verdict.verdict) == ("paired", "worse")
    assert row.verdict.difference == pytest.approx(-2.0, abs=0.2)
    if len(objective) > 1:
        best = storage.read_study("tiny").trials[found.plan.configurations[0].trial]
        assert best.params["learning_rate"] == 3e-5, "the best by what is compared"


def test_an_error_is_in_the_units_of_the_labels(storage: Storage) -> None:
    """A loss of 2 of them is one of -2, since the sign is turned; other metrics keep their points."""
    score = planted(2.0, own_noise=0.1)
    config = searched(storage, score, objective={"metric": "topic/mae", "direction": "minimize"})
    with pytest.raises(InputError, match="--margin must be given: topic/mae is in label units"):
        begun(storage, config, Request())
    found = compared(storage, config, score, Request(top=1, margin=4.0))
    row = found.found.rows[0]
    assert row.verdict.difference == pytest.approx(-2.0, abs=0.2)
    assert row.verdict.verdict == "as_good"
    assert (row.as_json()["unit"], found.as_json()["unit"]) == ("label units", "label units")
    assert "(topic/mae within 4 label units; " in found.recommendation
    search, record = (storage.read_study(name) for name in ("tiny", "tiny-compare"))
    both = judge(record, begun(storage, config, Request()), search, TWO_TASKS)
    others = [row for row in both.found.rows if row.metric == "tone/f1_macro"]
    assert {row.as_json()["unit"] for row in others} == {"points"}
    assert {(row.verdict.verdict, row.verdict.reason) for row in others} == {
        ("undecided", "the margin is in another unit")
    }


def test_a_race_of_a_study_that_minimizes_memory(storage: Storage) -> None:
    score = planted(0.0)
    config = searched(storage, score, objective=[MEMORY])
    found = compared(storage, config, score, Request("configurations", top=20))
    best = storage.read_study("tiny").trials[found.found.best]
    assert best.params["learning_rate"] == 3e-5


def test_a_fallback_is_no_value_of_the_precision_that_it_replaced(storage: Storage) -> None:
    """Neither as a score nor as a speed, and the comparison asks for no fallback."""
    score = planted(0.0)
    config = searched(storage, score, amp={"on_unsupported": "fallback"})
    assert begun(storage, config, Request()).amp.on_unsupported == "skip"
    found = compared(storage, config, score, Request(top=1, max_seeds=5), effective={"bf16": "fp32"})
    assert verdicts(found) == {("bf16", "paired"): "undecided", ("bf16", "tuned"): "undecided"}
    assert math.isnan(found.found.rows[0].verdict.difference)
    assert found.found.rows[0].speed is None
    assert found.recommendation.startswith("Use fp32: 5 seeds do not tell whether bf16 is as good")


@pytest.mark.parametrize("question", ["precisions", "configurations"])
def test_a_comparison_that_was_stopped_says_the_same(question: Any, storage: Storage, tmp_path: Any) -> None:
    score = planted(0.3, own_noise=0.5)
    request = Request(question, top=2, max_seeds=8)
    config = searched(storage, score)
    whole = compared(storage, config, score, request).as_json()
    with open_storage(f"sqlite:///{tmp_path}/other.db") as other:
        searched(other, score)
        for trials in (1, 4, 9):
            companion = begun(other, config, request)
            other.create_or_resume_study(companion)
            run(other, companion, score, trials=trials)
        again = compared(other, config, score, request).as_json()
    assert again == whole


def test_a_race(storage: Storage) -> None:
    """The lucky winner of the search is beaten on new seeds, and it is said how lucky it was."""

    def score(params: dict[str, Any]) -> float:
        lucky = "seed" not in params and params["learning_rate"] == 1e-5
        return BASE[params["learning_rate"]] + (15.0 if lucky else 0.0) + noise(params, 0.2, *params)

    found = compared(storage, searched(storage, score), score, Request("configurations"))
    search = storage.read_study("tiny")
    assert found.found.best is not None
    assert search.trials[found.found.best].params["learning_rate"] != 1e-5
    lucky = [
        standing
        for standing in found.found.standings
        if search.trials[standing.configuration].params["learning_rate"] == 1e-5
    ]
    assert lucky
    assert all(standing.overstated_low < 15 < standing.overstated_high for standing in lucky)
    assert f"Trial {found.found.best} is the best" in found.recommendation or found.found.too_close


def test_other_metrics_take_no_power_from_the_objective(storage: Storage) -> None:
    """Nor does the noise floor: its levels are those of the simulations of tests/benchmarks."""
    score = planted(0.2, own_noise=0.5)
    config = searched(storage, score)
    compared(storage, config, score, Request(top=1, max_seeds=5))
    search, record = (storage.read_study(name) for name in ("tiny", "tiny-compare"))
    companion = begun(storage, config, Request())
    alone, with_others = (judge(record, companion, search, tasks) for tasks in (TASKS, TWO_TASKS))
    assert {row.metric for row in with_others.found.rows} == {"score", "topic/f1_macro", "tone/f1_macro"}
    deciding = [row.verdict for row in with_others.found.rows if row.metric == "score"]
    assert deciding == [row.verdict for row in alone.found.rows]
    assert with_others.recommendation == alone.recommendation
    widths = {row.metric: row.verdict.high - row.verdict.low for row in with_others.found.rows[::-1]}
    assert widths["topic/f1_macro"] > widths["score"]
    scores = Scores(record, companion, TASKS)
    ours, theirs = (
        [scores.of_arm(Arm(configuration=0, precision=name), scores.score("score"))]
        for name in ("bf16", "fp32")
    )
    assert deciding[0] == judge_paired(ours, theirs, Plan(max_seeds=5, num_comparisons=2))


def test_a_race_of_one(storage: Storage) -> None:
    """It is the best of nothing."""
    score = planted(0.0)
    found = compared(storage, searched(storage, score), score, Request("configurations", top=1))
    only = found.found.standings[0]
    low, high = f"{only.overstated_low:+.2f}", f"{only.overstated_high:+.2f}"
    assert found.recommendation.startswith(
        f"Trial {only.configuration} has {only.mean:.2f} points on 3 new seeds; "
    )
    assert f"overstated it by {only.overstated:+.2f} points ({low} to {high})." in found.recommendation
    assert "probability" not in found.recommendation


def test_a_race_that_is_too_close_to_call_confirms_no_other(storage: Storage) -> None:
    """The leader on new seeds is not shown to be better than the best of the search, unless it is beaten."""
    score = planted(0.0)
    config = searched(storage, score)
    found = compared(storage, config, score, Request("configurations", top=3)).as_json()
    ranked = [row["configuration"] for row in found["standings"]]
    search = storage.read_study("tiny")
    best = max(complete_trials(search), key=lambda trial: (trial.values, -trial.number)).number
    others = [number for number in ranked if number != best]
    for too_close, shown in (([others[0], best], best), (others, None), ([], others[0])):
        race = found | {"best": others[0], "too_close": too_close, "has_ended": True}
        storage.store_comparison("tiny", "configurations", race)
        (trial,) = best_trials(storage.read_study("tiny"))
        of_search = {number: search.trials[number].values for number in others}
        assert trial.number == (max(of_search, key=lambda one: of_search[one]) if shown is None else shown)


KINDS = ("Example CPU 2", "slow CPU")


def test_speed_is_each_kind_of_device_s_own(storage: Storage) -> None:
    """bf16 is twice as fast on one and half as fast on the other; its scores are of both."""
    score = planted(0.0, own_noise=0.1)
    config = searched(storage, score)
    found = compared(storage, config, score, Request(top=2, margin=2.0, max_seeds=32), KINDS)
    row = found.found.rows[0]
    assert (row.precision, row.question, row.verdict.verdict) == ("bf16", "paired", "as_good")
    assert {one.device: one.speed and round(one.speed.ratio, 2) for one in row.devices} == {
        "Example CPU 2": 2.0,
        "slow CPU": 0.5,
    }
    assert all(one.num_pairs >= 2 and one.difference is not None for one in row.devices)
    as_json = row.as_json()
    assert as_json["speed_ratio"] is as_json["memory_ratio"] is None, "there is none over several kinds"
    assert [one["device"] for one in as_json["devices"]] == [*KINDS]
    assert found.recommendation.startswith("Use bf16: as good as fp32")
    assert "2.00 times as fast (2.00 to 2.00) on Example CPU 2." in found.recommendation
    assert found.recommendation.endswith("Use fp32 on slow CPU: nothing as good is shown to be faster there.")


def test_kinds_of_device_that_disagree_are_not_put_together(storage: Storage) -> None:
    """A loss of three points on one kind, none on the other: the mean of both is nobody's."""
    score = planted(0.0, own_noise=0.1)

    def loses(params: dict[str, Any]) -> float:
        lost = params["fp_precision"] == "bf16" and params.get("device") == "slow CPU"
        return score(params) - 3.0 * lost

    request = Request(top=2, margin=6.0, seeds=5, max_seeds=32)
    found = compared(storage, searched(storage, score), loses, request, KINDS)
    row = found.found.rows[0]
    assert row.verdict.verdict == "as_good"
    assert row.not_pooled.startswith("its paired difference is ")
    assert "-3." in row.not_pooled.partition(" on Example CPU 2 and ")[2]
    assert found.recommendation.startswith("Use fp32: the kinds of device do not say the same: of bf16 its")


def test_a_speed_has_the_error_of_its_look(storage: Storage) -> None:
    """Two questions and two looks share it."""
    score = planted(0.2, own_noise=3.0)
    config = searched(storage, score)
    found = compared(
        storage,
        config,
        score,
        Request(top=1, max_seeds=5),
        speed=lambda params: math.exp(noise(params, 0.2, "seed", "fp_precision")),
    )
    record = storage.read_study("tiny-compare")
    of_arms = Scores(record, begun(storage, config, Request()), TASKS)
    rates = [of_arms.of_arm(Arm(configuration=0, precision=name), rate) for name in ("bf16", "fp32")]
    looks = Plan(max_seeds=5, num_comparisons=2)
    expected = ratio_estimate([rates[0]], [rates[1]], looks.levels[-1])
    assert looks.looks == (3, 5)
    assert found.found.rows[0].speed == expected
    assert expected.low < ratio_estimate([rates[0]], [rates[1]], 0.05).low


def rate(trial: Any) -> float:
    found: float = trial.attributes["train_examples_per_second"]
    return found


def test_equal_time_is_not_put_together(storage: Storage) -> None:
    """A faster device trains more in it."""
    score = planted(0.0, own_noise=0.1)
    config = searched(storage, score, training={"max_seconds": 60.0})
    request = Request(top=2, margin=2.0, max_seeds=32)
    found = compared(storage, config, score, request, KINDS)
    assert found.found.rows[0].not_pooled.startswith("trials have equal time (max_seconds)")
    assert not any(row.not_pooled for row in compared_on_one(storage, config, score, request))


def compared_on_one(storage: Storage, config: Any, score: Any, request: Request) -> Any:
    delete_study(storage, "tiny-compare")
    found = compared(storage, config, score, request)
    return found.found.rows
