from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from study_records import fake_numerics, fake_tables, fake_trial, tables_of

from hpo.report.figures import Chart, Series, plotly_figure, png
from hpo.report.numerics_chart import numerics, numerics_table
from hpo.study.study_record import TrialRecord


def trial(number: int, rounding: str | None, *lost: float | None, **changes: Any) -> TrialRecord:
    """With an evaluation for each share of lost updates."""
    made = fake_trial(number, "bf16-true" if rounding else "bf16")
    rows = [
        dataclasses.replace(row, numerics=fake_numerics(row.step, 0.02 * number, share))
        for row, share in zip(made.evaluations, lost, strict=False)
    ]
    telemetry = made.telemetry | {"weight_rounding": rounding}
    return dataclasses.replace(made, evaluations=rows, telemetry=telemetry, **changes)


def line(chart: Chart, name: str, *, dashed: bool = False) -> Series:
    return next(one for one in chart.series if one.name == name and one.dashed == dashed)


@pytest.fixture(autouse=True)
def _speed_and_dtype_of_bf16_true(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fake_trial.__globals__["EXAMPLES_PER_SECOND"], "bf16-true", 30.0)
    monkeypatch.setitem(fake_trial.__globals__["DTYPES"], "bf16-true", "bfloat16")


def test_the_table_has_a_row_for_each_part_at_each_evaluation() -> None:
    made = trial(3, "nearest", 0.5, 0.7)
    old = fake_trial(4, "fp32")
    old = dataclasses.replace(
        old, evaluations=[dataclasses.replace(row, numerics=None) for row in old.evaluations]
    )
    table = numerics_table(tables_of([made, old]))
    assert list(table["part"]) == ["all", "layer 1", "heads"] * 2
    assert list(table["evaluation"]) == [1] * 3 + [2] * 3
    assert list(table["step"]) == [40] * 3 + [80] * 3
    assert list(table["updates_lost"]) == [0.5] * 3 + [0.7] * 3
    assert list(table["underflow"]) == [0.03, 0.06, 0.0] * 2
    assert set(table["weight_rounding"]) == {"nearest"}
    assert numerics_table(tables_of([old])).empty


def test_the_chart_has_medians_of_each_precision_and_rounding() -> None:
    trials = [trial(1, "nearest", 0.8, 0.9), trial(2, "nearest", 0.4), trial(3, "nearest", 0.6, 0.7)]
    trials += [trial(4, "stochastic", None, None), trial(5, "compensated", 0.01), trial(6, None, 0.0)]
    chart = numerics(tables_of(trials))
    nearest = line(chart, "bf16-true")
    assert (list(nearest.x), list(nearest.y)) == ([1.0, 2.0], [0.6, pytest.approx(0.8)])
    assert "3 trials, 40.00% to 80.00%" in nearest.hover[0]
    assert list(line(chart, "bf16-true", dashed=True).y) == [pytest.approx(0.02), pytest.approx(0.02)]
    assert [one.dashed for one in chart.series if one.name == "bf16-true, stochastic"] == [True]
    assert "loses no update on average" in chart.caption
    assert "Most updates lost to rounding: 70% in heads (bf16-true)." in chart.caption
    assert "Most gradients that underflow: 12% in layer 1 (bf16)." in chart.caption
    assert sorted(one.name for one in chart.series if one.in_legend) == [
        "bf16",
        "bf16-true",
        "bf16-true, compensated",
        "bf16-true, stochastic",
    ]
    looks = {one.name: one.markers for one in chart.series}
    assert len(set(looks.values())) == len(looks)
    assert plotly_figure(chart).data
    assert png(chart)


def test_what_did_not_run_its_precision_is_in_the_table_alone() -> None:
    made = trial(1, "nearest", 0.8)
    made.telemetry["precision"] |= {"effective": "bf16"}
    tables = tables_of([made])
    assert not numerics_table(tables)["counts"].any()
    assert numerics(tables).absent == "No evaluation has numeric telemetry."


def test_a_study_without_losses_says_nothing_of_parts() -> None:
    assert "Most" not in numerics(fake_tables()).caption
