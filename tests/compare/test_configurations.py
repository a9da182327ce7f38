"""`hpo compare --configurations`: the best configurations on new seeds, without a winner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import Any

import numpy as np
import pytest
from scipy.stats import t
from support.planted_comparison import NUM_ROWS, begun, compared, run, search_config, searched
from support.study_records import fake_record

from hpo.compare.comparison_study import comparison_name, open_comparison
from hpo.compare.planning import FIRST_SEED, Request
from hpo.config.comparison import ComparisonConfig
from hpo.config.study_config import StudyConfig
from hpo.device import DeviceInfo
from hpo.errors import InputError
from hpo.json_safe import json_safe
from hpo.report import verdicts
from hpo.report.dashboard import study_note
from hpo.report.report import report_html
from hpo.report.tables import StudyTables
from hpo.report.terminal import print_parts
from hpo.report.verdicts import comparison_tables, configuration_table, details
from hpo.study.reading.reader import read_study
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study

BASE = {1e-5: 70.0, 3e-5: 80.0, 1e-4: 75.0}
LUCK = (-1.0, 0.0, 2.0)
REQUEST = Request("configurations")


def score(params: dict[str, Any]) -> float:
    """bf16 loses a point. The new seeds have three kinds of luck, and those of the search had 5 points."""
    value = BASE[params["learning_rate"]] - (params["fp_precision"] == "bf16")
    return value + (LUCK[(params["seed"] - FIRST_SEED) // 3] if "seed" in params else 5.0)


@pytest.fixture
def storage(sqlite_url: str) -> Iterator[Storage]:
    with open_storage(sqlite_url) as opened:
        yield opened


@pytest.fixture
def config(storage: Storage) -> StudyConfig:
    return searched(storage, score)


def plan_of(study: StudyConfig) -> ComparisonConfig:
    assert study.comparison is not None
    return study.comparison


def shown(found: Any) -> str:
    with StringIO() as text, redirect_stdout(text):
        print_parts(verdicts.shown(json_safe(found)))
        return text.getvalue()


def test_each_configuration_has_its_own_precision_and_new_seeds(
    storage: Storage, config: StudyConfig
) -> None:
    companion = begun(storage, config, REQUEST)
    plan = plan_of(companion)
    assert companion.name == comparison_name("tiny", "configurations") == "tiny-compare-configurations"
    assert plan.command == "hpo compare tiny --configurations"
    ranked = [(one.params["learning_rate"], one.precision) for one in plan.configurations]
    assert ranked == [(3e-5, "fp32"), (3e-5, "bf16"), (1e-4, "fp32")]
    points = plan.points()
    assert len(points) == 9
    trained = {(point["learning_rate"], point["fp_precision"]) for point in points}
    assert trained == {*ranked}
    seeds = [point["seed"] for point in points]
    assert len({*seeds}) == 9
    assert min(seeds) >= FIRST_SEED


def test_a_trial_with_a_fallback_has_its_effective_precision(storage: Storage, config: StudyConfig) -> None:
    record = read_study(storage, config.name)
    trials = [
        replace(trial, attributes={**trial.attributes, "fp_precision_effective": "fp32"})
        for trial in record.trials
    ]
    fell_back = replace(record, trials=trials)
    here = DeviceInfo("cpu", "Example CPU")  # which has no bf16
    companion = open_comparison(storage, fell_back, config, REQUEST, device=here, has_test=True)
    plan = plan_of(companion)
    assert plan.precisions == ("fp32",)
    assert len({one.params["learning_rate"] for one in plan.configurations}) == 3


def test_the_means_and_their_intervals(storage: Storage, config: StudyConfig) -> None:
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
    stored = read_study(storage, config.name).comparisons["configurations"]
    assert stored == json_safe(found)


def test_no_winner_is_named(storage: Storage, config: StudyConfig) -> None:
    found = compared(storage, config, score, REQUEST).content
    trial = found["configurations"][0]["trial"]
    said = found["recommendation"]
    assert said.startswith("On 3 new seeds and 4,000 labelled rows of test: ")
    assert f"trial {trial} has score 80.33 [" in said
    assert "the best constant prediction has 0.00" in said
    text = shown(found)
    assert "No winner is named" in text
    assert not {"best", "winner", "verdicts", "too_close"} & found.keys()


def test_no_interval_exceeds_the_best_possible_score(storage: Storage) -> None:
    config = searched(storage, lambda _: 99.9)
    first = compared(storage, config, lambda _: 99.9, REQUEST).content["configurations"][0]
    assert first["low"] < first["mean"] == pytest.approx(99.9)
    assert first["high"] == 100


def test_a_run_without_a_score_counts_as_the_baseline(storage: Storage, config: StudyConfig) -> None:
    def fails(params: dict[str, Any]) -> float | None:
        is_lost = params.get("seed") == FIRST_SEED and params["learning_rate"] == 3e-5
        return None if is_lost else score(params)

    first = compared(storage, config, fails, REQUEST).content["configurations"][0]
    assert (first["num_runs"], first["num_failed"]) == (3, 1)
    assert first["mean"] == pytest.approx((0 + 80 + 82) / 3)


def test_without_a_score_there_is_no_mean(storage: Storage, config: StudyConfig) -> None:
    found = json_safe(compared(storage, config, lambda _: None, REQUEST).content)
    assert [one["mean"] for one in found["configurations"]] == [None] * 3
    assert "no run has a score" in found["recommendation"]
    assert "nan" not in shown(found)


def test_an_error_keeps_its_sign(storage: Storage) -> None:
    """Smaller is better, and the interval is in the units of the labels; no margin is needed."""
    config = searched(storage, score, objective={"metric": "topic/mae", "direction": "minimize"})
    found = compared(storage, config, score, REQUEST).content
    first = found["configurations"][0]
    assert found["unit"] == "label units"
    assert first["low"] < first["mean"] < first["high"]
    worst = min(BASE.values()) - 1  # planted errors are negative: the largest points have the least error
    assert worst < abs(first["mean"])
    assert first["search"] == pytest.approx(first["mean"], abs=6)


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"precisions": ("bf16",)}, "--precisions"),
        ({"margin": 1.0}, "--margin"),
        ({"max_seeds": 5}, "--max-seeds"),
    ],
)
def test_options_without_a_meaning_are_refused(
    changes: Any, option: str, storage: Storage, config: StudyConfig
) -> None:
    message = f"--configurations takes no {option}: each configuration is trained in its own precision"
    with pytest.raises(InputError, match=message):
        begun(storage, config, replace(REQUEST, **changes))
    create_or_resume_study(storage, begun(storage, config, REQUEST))
    with pytest.raises(InputError, match=message):
        begun(storage, config, replace(REQUEST, **changes))


def test_a_device_without_the_precision_of_a_configuration(storage: Storage, config: StudyConfig) -> None:
    record, without = read_study(storage, config.name), DeviceInfo("cpu", "Old CPU")
    message = r"needs bf16, but this is Old CPU\. .* Compare on a device that does"
    with pytest.raises(InputError, match=message) as raised:
        open_comparison(storage, record, config, REQUEST, device=without, has_test=True)
    assert "--precisions" not in str(raised.value)


def test_seeds_are_those_of_its_beginning(storage: Storage, config: StudyConfig) -> None:
    create_or_resume_study(storage, begun(storage, config, replace(REQUEST, seeds=4)))
    assert len(plan_of(begun(storage, config, REQUEST)).points()) == 12
    with pytest.raises(InputError, match="was begun with --seeds 4"):
        begun(storage, config, replace(REQUEST, seeds=5))


# Scores on test that were seen before


def seen(storage: Storage, config: StudyConfig, **changes: Any) -> str:
    record = replace(read_study(storage, config.name), **changes)
    here = DeviceInfo("cpu", "Example CPU", cpu_features=frozenset({"avx512_bf16"}))
    return plan_of(open_comparison(storage, record, config, REQUEST, device=here, has_test=True)).test_seen


def without_test_scores(storage: Storage, config: StudyConfig) -> list[Any]:
    trials = read_study(storage, config.name).trials
    return [
        replace(one, telemetry={key: of for key, of in one.telemetry.items() if key != "test_metrics"})
        for one in trials
    ]


def test_a_search_without_scores_on_test(storage: Storage, config: StudyConfig) -> None:
    assert seen(storage, config, trials=without_test_scores(storage, config)) == ""


def test_the_search_scored_its_trials_on_test(storage: Storage, config: StudyConfig) -> None:
    assert seen(storage, config) == "the search scored its trials on test"


def test_a_trial_was_evaluated_on_test_in_detail(storage: Storage, config: StudyConfig) -> None:
    trials = without_test_scores(storage, config)
    trials[1] = replace(trials[1], detailed={"validation": {}})
    assert seen(storage, config, trials=trials) == ""
    trials[1] = replace(trials[1], detailed={"test": {}})
    assert seen(storage, config, trials=trials) == "test has a detailed evaluation of trial 1"


@pytest.mark.parametrize(("split", "told"), [("test", "`hpo compare` used test"), ("validation", "")])
def test_an_earlier_comparison_used_test(
    split: str, told: str, storage: Storage, config: StudyConfig
) -> None:
    trials = without_test_scores(storage, config)
    assert seen(storage, config, trials=trials, comparisons={"precisions": {"split": split}}) == told


def test_scores_seen_before_are_marked(storage: Storage, config: StudyConfig) -> None:
    found = compared(storage, config, score, REQUEST).content
    sentence = (
        "Scores on test were seen before these configurations were selected (the search scored its trials on "
        "test), so they may be too high."
    )
    assert found["error"].endswith(sentence)
    assert details(found) == [found["error"]]
    assert "new seeds, test (seen before)" in configuration_table(json_safe(found)).columns


def test_scores_seen_later_have_no_mark(storage: Storage, config: StudyConfig) -> None:
    """The mark is about the time of the selection."""
    record = replace(
        read_study(storage, config.name), trials=without_test_scores(storage, config), comparisons={}
    )
    here = DeviceInfo("cpu", "Example CPU", cpu_features=frozenset({"avx512_bf16"}))
    companion = open_comparison(storage, record, config, REQUEST, device=here, has_test=True)
    create_or_resume_study(storage, companion)
    found = json_safe(compared(storage, config, score, REQUEST).content)
    assert "seen before" not in f"{details(found)} {[*configuration_table(found).columns]}"


def test_the_table_has_the_settings_that_differ(storage: Storage, config: StudyConfig) -> None:
    found = json_safe(compared(storage, config, score, REQUEST).content)
    (table,) = comparison_tables(found)
    assert [*table.columns[:3]] == ["trial", "precision", "learning_rate"]
    assert [*table["precision"]] == ["fp32", "bf16", "fp32"]
    assert [*table["score in the search"]] == ["85", "84", "80"]
    assert table.iloc[0]["new seeds, test (seen before)"].startswith("80.33\u00a0[")


def test_the_report_and_the_dashboard_show_it(storage: Storage, config: StudyConfig) -> None:
    found = compared(storage, config, score, REQUEST).content
    record = read_study(storage, config.name)
    tables = StudyTables(replace(fake_record(), comparisons=record.comparisons))
    page, note = report_html(tables), study_note(tables)
    for text in (page, note):
        assert "trial" in text
        assert "On 3 new seeds and 4,000 labelled rows of test" in text
        assert "were seen before these configurations were selected" in text
    assert found["recommendation"].split(":")[0] in page


def test_a_stopped_comparison_goes_on_to_the_same_result(
    storage: Storage, config: StudyConfig, tmp_path: Any
) -> None:
    whole = compared(storage, config, score, REQUEST).content
    with open_storage(f"sqlite:///{tmp_path}/other.db") as other:
        searched(other, score)
        companion = begun(other, config, REQUEST)
        create_or_resume_study(other, companion)
        run(other, companion, score, trials=4)
        again = compared(other, config, score, REQUEST).content
    assert again == whole


def test_no_search_space_with_a_precision_is_needed(storage: Storage) -> None:
    rates = {"learning_rate": {"type": "categorical", "choices": [1e-5, 3e-5]}}
    config = searched(storage, lambda _: 80.0, search_space=rates)
    plan = plan_of(begun(storage, config, REQUEST))
    assert [one.precision for one in plan.configurations] == ["fp32", "fp32"]
    assert search_config().search_space.keys() > config.search_space.keys()
