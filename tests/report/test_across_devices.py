from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from support.study_records import DEVICE, GPU, fake_trial, tables_of, two_device_record

from hpo.report.charts import all_charts, metric_throughput, precision_metric
from hpo.report.dashboard import study_note
from hpo.report.formats import format_number
from hpo.report.tables import StudyTables, brief_summary
from hpo.study.reading.study_record import TrialRecord, device_kinds

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


def test_every_device_has_a_row_of_its_own() -> None:
    assert TABLES.devices == [CPU, CARD]
    table = brief_summary(TABLES).set_index(["precision", "device"])
    both = [(precision, device) for precision in ("bf16", "fp16") for device in (CPU, CARD)]
    assert {("tf32", CARD), *both} <= set(table.index)
    assert ("tf32", CPU) not in table.index
    for device in (CPU, CARD):
        median = statistics.median(speeds(device, "bf16"))
        assert table.loc[("bf16", device), "examples/s"] == format_number(median)
    assert "share of time" not in table


def test_no_chart_has_the_speeds_of_two_kinds() -> None:
    charts = metric_throughput(TABLES)
    assert [chart.title.rpartition(" on ")[2] for chart in charts] == [CPU, CARD]
    for chart, device in zip(charts, (CPU, CARD), strict=True):
        shown = sorted(x for series in chart.series if series.draw == "points" for x in series.x)
        assert shown == sorted(x for name in ("fp32", "tf32", "bf16", "fp16") for x in speeds(device, name))
    keys = [chart.key for chart in all_charts(TABLES)]
    assert len(set(keys)) == len(keys)


def test_an_objective_that_measures_speed_is_never_put_together() -> None:
    """Its best trial is that of the faster device, which is said."""
    trials = [
        dataclasses.replace(trial, values=(trial.telemetry["throughput"]["train_examples_per_second"],))
        for trial in RECORD.trials
        if trial.values
    ]
    tables = tables_of(trials, metric_names=("train_examples_per_second",))
    chart = precision_metric(tables)
    ticks = [tick.partition(" (n")[0] for tick in chart.x_ticks]
    assert ticks[:2] == [f"fp32\non {CPU}", f"fp32\non {CARD}"]
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
