from __future__ import annotations

import dataclasses

import pytest
from study_records import fake_numerics, fake_trial, tables_of

from hpo.report.figures import Chart, Series, plotly_figure
from hpo.report.numerics_chart import numerics, numerics_table
from hpo.study.reading.study_record import TrialRecord


def trial(number: int, precision: str, *lost: float | None) -> TrialRecord:
    """With an evaluation for each share of lost updates."""
    made = fake_trial(number, precision)
    rows = [
        dataclasses.replace(row, numerics=fake_numerics(row.step, 0.02 * number, share))
        for row, share in zip(made.evaluations, lost, strict=False)
    ]
    return dataclasses.replace(made, evaluations=rows)


def line(chart: Chart, name: str, *, dashed: bool = False) -> Series:
    return next(one for one in chart.series if one.name == name and one.dashed == dashed)


def test_the_table_has_a_row_for_each_evaluation() -> None:
    made = trial(3, "bf16-true", 0.5, 0.7)
    old = fake_trial(4, "fp32")
    old = dataclasses.replace(
        old, evaluations=[dataclasses.replace(row, numerics=None) for row in old.evaluations]
    )
    table = numerics_table(tables_of([made, old]))
    assert list(table["evaluation"]) == [1, 2]
    assert list(table["step"]) == [40, 80]
    assert list(table["updates_lost"]) == [0.5, 0.7]
    assert list(table["underflow"]) == [0.06, 0.06]
    assert numerics_table(tables_of([old])).empty


def test_the_chart_has_medians_of_each_precision() -> None:
    trials = [trial(1, "bf16-true", 0.8, 0.9), trial(2, "bf16-true", 0.4), trial(3, "bf16-true", 0.6, 0.7)]
    trials += [trial(4, "bf16", None, None), trial(5, "bf16", 0.01)]
    chart = numerics(tables_of(trials))
    lost = line(chart, "bf16-true")
    assert (list(lost.x), list(lost.y)) == ([1.0, 2.0], [0.6, pytest.approx(0.8)])
    assert "3 trials, 40.00% to 80.00%" in lost.hover[0]
    assert list(line(chart, "bf16-true", dashed=True).y) == [pytest.approx(0.04), pytest.approx(0.04)]
    assert list(line(chart, "bf16").x) == [1.0], "of a skipped step it is not known"
    assert sorted(one.name for one in chart.series if one.in_legend) == ["bf16", "bf16-true"]
    looks = {one.name: one.markers for one in chart.series}
    assert len(set(looks.values())) == len(looks)
    assert plotly_figure(chart).data


def test_what_did_not_run_its_precision_is_in_the_table_alone() -> None:
    made = trial(1, "bf16-true", 0.8)
    made.telemetry["precision"] |= {"effective": "bf16"}
    tables = tables_of([made])
    assert not numerics_table(tables)["counts"].any()
    assert numerics(tables).absent == "No evaluation has numeric telemetry."


def test_shares_that_are_all_unknown_are_no_chart() -> None:
    made = trial(1, "bf16-true", 0.5)
    unknown = dict.fromkeys(made.evaluations[0].numerics["all"])
    rows = [dataclasses.replace(row, numerics={"all": unknown, "parts": {}}) for row in made.evaluations]
    chart = numerics(tables_of([dataclasses.replace(made, evaluations=rows)]))
    assert (chart.absent, chart.series) == ("No share was measured.", ())
