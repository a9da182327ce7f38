import dataclasses
import statistics
from typing import Any

import pandas as pd
import pytest
from support.study_records import (
    DEVICE,
    fake_record,
    fake_tables,
    fake_trial,
    tables_of,
    with_values,
)

from hpo.outcome import Outcome
from hpo.report.formats import format_number
from hpo.report.tables import OUTCOMES, StudyTables, precision_table
from hpo.study.reading.study_record import TrialRecord

SPEED = "train_examples_per_second"


def row_of(tables: StudyTables, precision: str) -> dict[str, Any]:
    return tables.by_precision.set_index("precision").loc[precision].to_dict()


def choosing(precisions: list[str], **definition: Any) -> dict[str, Any]:
    return {**definition, "search_space": {"fp_precision": {"type": "categorical", "choices": precisions}}}


@pytest.mark.parametrize(
    ("change", "counts", "counts_for_speed"),
    [
        ({}, True, True),
        ({"precision": {"requested": "bf16", "effective": "fp32", "agrees": True}}, False, False),
        ({"precision": {"requested": "bf16", "effective": "bf16", "agrees": False}}, False, False),
        ({"precision": {"requested": "bf16", "effective": "bf16", "agrees": None}}, True, True),
        ({"precision": {"requested": "bf16", "effective": None}}, False, False),
        ({"device": {"name": "Example CPU", "shared": True}}, True, False),
        ({"throughput": {"train_examples_per_second": None}}, True, False),
    ],
    ids=["as requested", "fell back", "disagrees", "unverified", "did not run", "shared", "not measured"],
)
def test_conditions_to_count_for_a_precision(
    change: dict[str, Any], counts: bool, counts_for_speed: bool
) -> None:
    trial = fake_trial(1, "bf16")
    trial.telemetry.update(change)
    row = tables_of([trial]).trials.iloc[0]
    assert (row["counts"], row["counts_for_speed"]) == (counts, counts_for_speed)


def test_row_of_a_precision_agrees_with_a_count_by_hand() -> None:
    record = fake_record()
    row = row_of(StudyTables(record), "fp32")
    mine = [trial for trial in record.trials if trial.params["fp_precision"] == "fp32"]
    scores = [trial.values[0] for trial in mine if trial.values]
    speeds = [trial.telemetry["throughput"][SPEED] for trial in mine if trial.number != 12]
    expected = {"trials": len(mine), "complete": len(scores), "measured": len(speeds)}
    expected |= {"best_score": max(scores), f"{SPEED}_median": statistics.median(speeds)}
    assert {name: row[name] for name in expected} == expected
    assert row["seconds"] == pytest.approx(sum(trial.seconds for trial in mine))


def test_rows_account_for_every_trial_and_every_second() -> None:
    summary = fake_tables().by_precision
    assert list(summary["precision"]) == ["fp32", "tf32", "bf16", "fp16"]
    assert summary["trials"].sum() == summary[list(OUTCOMES)].sum().sum() == 40
    assert summary["share_of_time"].sum() == pytest.approx(1)
    wasted = [outcome for outcome in Outcome if outcome.wasted]
    seconds = sum(trial.seconds for trial in fake_record().trials if trial.outcome in wasted)
    assert summary["wasted_seconds"].sum() == pytest.approx(seconds)
    assert list(summary["support"]) == ["native", "unsupported", "native", "emulated"]


def unrelated(number: int, precision: str) -> list[TrialRecord]:
    """Return an invalid trial and one with an unbuilt model, both unrelated to the precision."""
    invalid, unbuilt = (fake_trial(number, precision, name) for name in ("invalid", "incompatible"))
    unbuilt.telemetry["precision"]["effective"] = precision
    del unbuilt.telemetry["compatibility"]
    return [invalid, dataclasses.replace(unbuilt, number=number + 1)]


def test_failures_unrelated_to_precision_are_in_no_row() -> None:
    trials = [fake_trial(0, "fp32"), fake_trial(1, "bf16"), fake_trial(2, "bf16", "incompatible")]
    asked = choosing(["fp32", "bf16"])
    before = tables_of(trials, definition=asked)
    after = tables_of([*trials, *unrelated(3, "bf16"), *unrelated(5, "fp16")], definition=asked)
    same = before.by_precision.columns.drop("share_of_time")
    pd.testing.assert_frame_equal(after.by_precision[same], before.by_precision[same])
    assert after.by_precision["share_of_time"].sum() < 1


def test_a_fallback_counts_as_a_trial_and_not_in_the_statistics() -> None:
    trials = [fake_trial(0, "fp16"), fake_trial(1, "fp16")]
    before = row_of(tables_of(trials[:1]), "fp16")
    trials[1].telemetry["precision"]["effective"] = "fp32"
    trials[1].telemetry["scaler"]["skipped_steps"] = 1000
    after = row_of(tables_of(trials), "fp16")
    assert (after["trials"], after["complete"], after["fell_back"]) == (2, 2, 1)
    for name in ("best_score", "measured", "peak_memory_bytes_median", "skipped_steps"):
        assert after[name] == before[name]


def test_energy_has_a_column_if_measured_on_an_unshared_device() -> None:
    trials = [fake_trial(number, name) for number, name in enumerate(["fp32", "bf16", "bf16", "fp16"])]
    assert "joules/example" not in precision_table(tables_of(trials))[0]
    for number, joules in enumerate([4.0, 1.5, 2.5]):
        trials[number].telemetry["throughput"]["train_joules_per_example"] = joules
    rows = precision_table(tables_of(trials))
    assert [row["joules/example"] for row in rows] == ["4", "–", "2", "–"]
    trials[2].telemetry["device"]["shared"] = True
    assert tables_of(trials).by_precision["train_joules_per_example_median"].dropna().tolist() == [4.0, 1.5]


def test_several_objectives_have_a_front_instead_of_a_best() -> None:
    trials = [with_values(number, values) for number, values in enumerate([(0.5, 10), (0.6, 20), (0.4, 30)])]
    tables = tables_of(trials, metric_names=("score", "memory"), directions=("maximize", "minimize"))
    assert [trial.number for trial in tables.best] == [1, 0], "the best by the first objective first"
    assert list(tables.by_precision.loc[0, ["best_score", "best_memory"]]) == [0.6, 10]


def test_choices_without_a_trial_are_in_the_table() -> None:
    definition = choosing(["fp32", "tf32", "bf16", "fp16", "fp8"])
    trials = [fake_trial(0, "fp32"), fake_trial(1, "fp32")]
    trials[0].telemetry["device"] |= {"cpu_features": ["avx2"]}
    trials[1].telemetry["device"] |= {"type": "cuda", "name": "Example GPU", "compute_capability": "7.5"}
    tables = tables_of(trials, definition=definition)
    support = tables.by_precision.drop_duplicates("precision").set_index("precision")["support"]
    not_run = dict.fromkeys(("tf32", "bf16", "fp8"), "not run here")
    assert dict(support) == {"fp32": "native", "fp16": "not tried", **not_run}
    assert tables.undrawn["fp16"] == ""
    assert "needs compute capability >= 8.0, but this Example GPU has 7.5" in tables.undrawn["bf16"]
    assert "a CPU with AMX or AVX512-BF16, which this Example CPU lacks" in tables.undrawn["bf16"]
    emulating = choosing(["fp32", "bf16"], amp={"allow_emulated": True})
    assert tables_of(trials[:1], definition=emulating).undrawn == {"bf16": ""}
    assert tables_of([], definition=definition).undrawn == {}


def test_every_kind_of_device_has_its_own_row() -> None:
    here = [fake_trial(number, "bf16") for number in range(2)]
    there = [fake_trial(number, name) for number, name in enumerate(("bf16", "tf32"), start=2)]
    gpu = {"type": "cuda", "name": "Example GPU", "compute_capability": "9.0", "cuda": "13.0"}
    for trial in there:
        trial.telemetry["device"] |= gpu
        trial.telemetry["throughput"][SPEED] *= 20
    rows = {(row["precision"], row["device"]): row for row in precision_table(tables_of(here + there))}
    assert ("tf32", "Example GPU") in rows
    assert ("tf32", DEVICE["name"]) not in rows
    for device, trials in ((DEVICE["name"], here), ("Example GPU", there[:1])):
        speeds = [trial.telemetry["throughput"][SPEED] for trial in trials]
        assert rows["bf16", device]["examples/s"] == format_number(statistics.median(speeds))
        assert "share of time" not in rows["bf16", device]


def test_waiting_trial_has_drawn_no_precision() -> None:
    waiting = dataclasses.replace(fake_trial(0, "fp32"), params={}, telemetry={}, state="WAITING")
    for definition, precision in ((choosing(["fp32", "bf16"]), ""), ({}, "auto")):
        assert list(tables_of([waiting], definition=definition).trials["precision"]) == [precision]
