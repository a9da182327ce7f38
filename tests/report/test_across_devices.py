"""A study on a CPU and on a GPU: what its report puts together, and what it keeps apart."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import Any

import pytest
from browser import open_chromium
from study_records import DEVICE, GPU, fake_record, fake_trial, tables_of, two_device_record

from hpo.report.across_devices import EQUAL_TIME, costs_by_device, numbers_by_device, pooling
from hpo.report.charts import all_charts, metric_throughput, precision_metric
from hpo.report.dashboard import study_note
from hpo.report.failure_map import failure_map
from hpo.report.formats import format_number
from hpo.report.report import write_report
from hpo.report.tables import StudyTables, brief_summary, precision_comparison
from hpo.study.study_record import TrialRecord, device_kinds

CPU, CARD = DEVICE["name"], GPU["name"]
RECORD = two_device_record()
TABLES = StudyTables(RECORD)


def speeds(device: str, precision: str) -> list[float]:
    return sorted(
        trial.telemetry["throughput"]["train_examples_per_second"]
        for trial in RECORD.trials
        if trial.telemetry["device"]["name"] == device
        and trial.params["fp_precision"] == precision
        and "throughput" in trial.telemetry
    )


def test_what_is_put_together_and_why_the_rest_is_not() -> None:
    assert TABLES.devices == [CPU, CARD]
    assert TABLES.not_pooled["fp32"] == ""
    assert TABLES.not_pooled["bf16"].startswith("the median score is 0.7")
    assert TABLES.not_pooled["fp16"].startswith(f"the compatibility check failed (7 on {CPU}), which says")
    assert "tf32" not in TABLES.not_pooled, "it ran on one kind alone"
    told = " ".join(pooling(TABLES))
    assert f"fp32: put together (15 on {CPU} and 8 on {CARD})" in told
    assert f"tf32: ran on {CARD} alone, which says nothing of {CPU}." in told
    assert pooling(StudyTables(fake_record())) == []


def test_a_share_that_diverges_on_one_kind_keeps_it_apart() -> None:
    trials = [fake_trial(number, "fp16", "nonfinite" if number < 8 else "complete") for number in range(16)]
    for trial in trials[8:]:
        trial.telemetry["device"] = dict(GPU)
    assert tables_of(trials).not_pooled == {
        "fp16": f"8 of 8 trials became not finite on {CPU}, 0 of 8 on {CARD}"
    }


@pytest.mark.parametrize(
    "definition",
    [{"training": {"max_seconds": 60.0}}, {"search_space": {"max_seconds": {"type": "int"}}}],
    ids=["fixed", "searched"],
)
def test_scores_of_equal_time_are_the_device_s_own(definition: dict[str, Any]) -> None:
    tables = tables_of(RECORD.trials, definition=definition)
    assert tables.not_pooled == dict.fromkeys(["bf16", "fp16", "fp32"], EQUAL_TIME)


def test_scores_are_together_and_speed_is_each_device_s() -> None:
    columns = precision_comparison(TABLES).columns
    assert {"fp32", "tf32", f"bf16 on {CPU}", f"bf16 on {CARD}", f"fp16 on {CPU}"} <= set(columns)
    costs = costs_by_device(TABLES).set_index(["device", "precision"])
    for device in (CPU, CARD):
        measured = speeds(device, "bf16")
        assert costs.loc[(device, "bf16"), "trials measured"] == str(len(measured))
        median = format_number(statistics.median(measured))
        assert costs.loc[(device, "bf16"), "train examples/s"].startswith(f"{median} (")
    assert (CPU, "tf32") not in costs.index
    assert "share of time" not in brief_summary(TABLES)


def test_a_compatibility_result_is_shown_for_its_own_device() -> None:
    numbers = numbers_by_device(TABLES).set_index(["precision", "device"])
    assert list(numbers.loc["fp16", "compatibility check"]) == ["7 incompatible", "7 ok"]
    assert list(numbers.loc["fp16", "trained"]) == ["0 of 7", "7 of 7"]
    assert list(numbers.loc["fp32", "logits error, at most"]) == ["0.01", "0.02"]
    assert failure_map(TABLES).y_ticks == [
        f"fp16 on {CARD}",
        f"fp16 on {CPU}",
        f"bf16 on {CARD}",
        f"bf16 on {CPU}",
        "tf32",
        "fp32",
    ]
    assert (
        f"fp16 on {CPU}: none of 7 trials trained. fp16 on {CARD}: trained from"
        in failure_map(TABLES).caption
    )


def test_no_chart_has_the_speeds_of_two_kinds() -> None:
    charts = metric_throughput(TABLES)
    assert [chart.title.rpartition(" on ")[2] for chart in charts] == [CPU, CARD]
    for chart, device in zip(charts, (CPU, CARD), strict=True):
        shown = sorted(x for series in chart.series if series.draw == "points" for x in series.x)
        assert shown == sorted(x for name in ("fp32", "tf32", "bf16", "fp16") for x in speeds(device, name))
    keys = [chart.key for chart in all_charts(TABLES)]
    assert {"learning_curves_seconds_device_1", "learning_curves_seconds_device_2"} <= set(keys)
    assert "learning_curves_epochs" in keys
    assert len(set(keys)) == len(keys)


def test_an_objective_that_measures_speed_is_never_put_together() -> None:
    """Its best trial is that of the faster device, which is said."""
    trials = [
        dataclasses.replace(trial, values=(trial.telemetry["throughput"]["train_examples_per_second"],))
        for trial in RECORD.trials
        if trial.values
    ]
    tables = tables_of(trials, metric_names=("train_examples_per_second",))
    assert tables.not_pooled["fp32"] == "", "its speed is no score"
    chart = precision_metric(tables)
    assert [tick.partition("\n(n")[0] for tick in chart.x_ticks][:2] == ["fp32 on 1", "fp32 on 2"]
    assert chart.caption.endswith(f"Devices that are kept apart: 1 is {CPU}, 2 is {CARD}.")
    assert "`train_examples_per_second` was measured on 2 kinds of device" in study_note(tables)


def on(number: int, **device: Any) -> TrialRecord:
    trial = fake_trial(number, "fp32")
    trial.telemetry["device"] = {**DEVICE, **device}
    return trial


def test_cpus_of_one_name_with_other_instructions_are_two_kinds() -> None:
    same = [on(0), on(1, host="node2")]
    assert set(device_kinds(same).values()) == {CPU}
    kinds = device_kinds([*same, on(2, cpu_features=["avx2"])])
    assert kinds == {0: f"{CPU} (amx_bf16)", 1: f"{CPU} (amx_bf16)", 2: f"{CPU} (avx2)"}


def test_page_and_dashboard_show_each_device(tmp_path: Path) -> None:
    page, note = write_report(RECORD, tmp_path).read_text(), study_note(TABLES)
    assert "What carries over between devices: the numbers" in page
    assert f"kept apart by device, because the compatibility check failed (7 on {CPU})" in page
    assert "On each kind of device" in note
    one_kind = write_report(fake_record(), tmp_path).read_text()
    assert "What carries over" not in one_kind
    assert not list((tmp_path / "figures").glob("*_device_*")), "pictures of the report before are gone"


@pytest.mark.browser
def test_long_names_of_devices_fit_a_narrow_page(tmp_path: Path) -> None:
    for trial in (record := two_device_record()).trials:
        name = trial.telemetry["device"]["name"]
        trial.telemetry["device"]["name"] = f"{name} Scalable Family (8480C) Processor @ 2.00GHz"
    path = write_report(record, tmp_path)
    with open_chromium() as chromium:
        page = chromium.new_page(viewport={"width": 400, "height": 900})
        page.goto(path.as_uri())
        plot = page.wait_for_selector("#failure_map .nsewdrag", state="attached")
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        assert plot.bounding_box()["width"] > 120, "the names leave room for the trials"
