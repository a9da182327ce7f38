"""Whole comparisons with planted scores: what is planted is what is said."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest
from planted import begun, compared, run, searched

from hpo.cli.display import print_comparison
from hpo.compare.companion import Request
from hpo.report.compared import configuration_table
from hpo.study.lifecycle import delete_study
from hpo.study.storage import Storage, open_storage

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
        "Use bf16: as good as fp32 (score within 2 points; paired and tuned, "
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
    asked = Request(precisions=("fp32", "bf16"), top=1, margin=2.0, max_seeds=3)
    found = compared(storage, config, score, asked)
    assert found.found.rows[0].verdict.seeds_needed is None
    assert found.recommendation.endswith(
        " bf16 (paired), bf16 (tuned): too near the margin for any number of seeds up to 200."
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

    found = compared(storage, searched(storage, search), score, Request(top=1))
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
