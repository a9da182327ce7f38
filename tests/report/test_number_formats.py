"""Tables by precision keep trials apart whose numbers were stored or computed in other formats."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from support.browser import without_plotly
from support.study_records import DEFINITION, fake_trial, record_of

from hpo.report import screens
from hpo.report.caveats import caveats
from hpo.report.charts import precision_metric
from hpo.report.dashboard import study_note
from hpo.report.number_formats import formats_of, precision_that_ran
from hpo.report.plan import costs_of
from hpo.report.report import write_report
from hpo.report.tables import StudyTables, brief_summary
from hpo.study.reading.study_record import StudyRecord, TrialRecord


def trial(number: int, precision: str = "bf16", facts: Any = None, **params: Any) -> TrialRecord:
    made = fake_trial(number, precision)
    values = (0.5 + number / 100,)
    telemetry = {**made.telemetry, **(facts or {})}
    return dataclasses.replace(made, values=values, params={**made.params, **params}, telemetry=telemetry)


def searching(*trials: TrialRecord, training: Any = None, **space: list[Any]) -> StudyRecord:
    """The record of a study that searches the precision and these choices."""
    choices = {"fp_precision": ["fp32", "bf16"], **space}
    searched = {name: {"type": "categorical", "choices": values} for name, values in choices.items()}
    definition = {**DEFINITION, "search_space": searched, "training": training or {}}
    return record_of(list(trials), definition=definition)


def adapters() -> StudyRecord:
    plain = {"requested": "fp32", "effective": "fp32"}
    missed = {"requested": "bf16", "effective": "fp32", "reason": "no matrix of the model is large enough."}
    return searching(
        trial(0, adapter="none", optimizer_state="fp32", facts={"optimizer_state": plain}),
        trial(1, adapter="lora", base_precision="int8", optimizer_state="fp32"),
        trial(2, adapter="lora", base_precision="int8", optimizer_state="bf16"),
        trial(
            3,
            adapter="lora",
            base_precision="int8",
            optimizer_state="bf16",
            facts={"optimizer_state": missed},
        ),
        trial(4, "fp32", adapter="none", optimizer_state="fp32"),
        training={"attention": "eager"},
        adapter=["none", "lora"],
        base_precision=["fp32", "int8"],
        optimizer_state=["fp32", "bf16"],
    )


def test_every_searched_format_has_a_column_and_rows_of_its_own() -> None:
    tables = StudyTables(adapters())
    table = brief_summary(tables)
    columns = ["precision", "adapter", "base precision", "optimizer state", "outcomes"]
    assert table[columns].to_numpy().tolist() == [
        ["fp32", "none", "–", "fp32", "1 complete"],
        ["bf16", "lora", "int8", "bf16, ran as fp32", "2 complete"],
        ["bf16", "lora", "int8", "fp32", "1 complete"],
        ["bf16", "none", "–", "fp32", "1 complete"],
    ]
    assert list(table["score, best"]) == ["0.54", "0.53", "0.51", "0.5"]
    assert tables.formats.shared == {"attention": "eager"}
    assert "attention" not in table


def test_a_format_of_all_trials_is_said_once_and_a_default_never() -> None:
    record = searching(trial(0), trial(1), training={"adapter": "lora", "base_precision": "int8"})
    tables = StudyTables(record)
    assert list(brief_summary(tables).columns)[:2] == ["precision", "support"]
    assert tables.formats.text() == "All trials have adapter=lora, base_precision=int8."
    assert StudyTables(searching(trial(0), trial(1))).formats.text() == ""
    searched = StudyTables(searching(trial(0, adapter="none"), adapter=["none", "lora"]))
    assert searched.formats.text() == "All trials have adapter=none."


@pytest.mark.parametrize(
    ("precision", "params", "facts", "shown"),
    [
        ("bf16", {"fp32_parts": "[]"}, {}, "none"),
        ("bf16", {"fp32_parts": '["heads", "norms"]'}, {}, "heads, norms"),
        ("bf16", {"fp32_parts": "auto"}, {"requested": "auto", "resolved": ["heads"]}, "auto: heads"),
        ("bf16", {"fp32_parts": "auto"}, {"requested": "auto", "resolved": []}, "auto: none"),
        ("bf16", {"fp32_parts": "auto"}, {}, "auto"),
        ("fp32", {"fp32_parts": '["heads"]'}, {}, "–"),
        ("bf16", {}, {}, "none"),
    ],
)
def test_parts_in_fp32_are_named(precision: str, params: Any, facts: Any, shown: str) -> None:
    one = trial(0, precision, {"fp32_parts": facts} if facts else {}, **params)
    record = searching(one, trial(1, fp32_parts="layers"), fp32_parts=[[], "auto", ["heads"]])
    table = brief_summary(StudyTables(record))
    assert shown in list(table["fp32 parts"])
    assert formats_of(one, record.definition)["fp32_parts"] in (shown, "auto")


def test_a_fixed_list_of_parts_is_named() -> None:
    one = trial(0)
    facts = {"requested": ["heads"], "resolved": ["heads"]}
    one.telemetry["fp32_parts"] = facts  # type: ignore[index]
    record = searching(one, trial(1, "fp32"), training={"fp32_parts": ["heads"]})
    assert list(brief_summary(StudyTables(record))["fp32 parts"]) == ["–", "heads"]
    assert precision_that_ran(one) == "bf16, fp32 in heads"
    assert precision_that_ran(trial(1)) == "bf16"


def test_values_of_own_code_are_shown_as_they_are() -> None:
    record = searching(trial(0, compile=True), trial(1, compile="[x"), compile=[True, "[x"])
    assert {"True", "[x"} <= set(brief_summary(StudyTables(record))["compile"])


def test_the_first_lines_name_parts_in_fp32(tmp_path: Path) -> None:
    parts = {"fp32_parts": {"requested": "auto", "resolved": ["heads"]}}
    record = searching(trial(0), trial(1, fp32_parts="auto", facts=parts), fp32_parts=[[], "auto"])
    page = without_plotly(write_report(record, tmp_path))
    assert "<dd>bf16, fp32 in heads</dd>" in page
    assert "<th>fp32 parts</th>" in page
    assert "<dt>adapter</dt>" not in page
    assert "fp32 in heads" in "".join(str(part) for part in screens.best(record))
    note = study_note(StudyTables(record))
    assert "fp32 in heads" in note
    assert "fp32 parts" in note


def test_tables_of_a_shared_format_say_it(tmp_path: Path) -> None:
    record = searching(trial(0), trial(1), training={"adapter": "lora"})
    said = "All trials have adapter=lora."
    assert "<dt>adapter</dt><dd>lora</dd>" in without_plotly(write_report(record, tmp_path))
    assert said in without_plotly(write_report(record, tmp_path))
    assert said in "".join(str(part) for part in screens.summary(record))
    assert "All trials have adapter=lora" in study_note(StudyTables(record))


def test_statistics_over_several_formats_say_so() -> None:
    record = adapters()
    assert costs_of(record)["bf16"].measured_by == (
        "4 complete trials that differ in adapter, base_precision, optimizer_state"
    )
    assert costs_of(record)["fp32"].measured_by == "1 complete trial"
    chart = precision_metric(StudyTables(record))
    assert len(chart.x_ticks) == 4
    assert "bf16\nlora\nint8\nbf16 (n = 2)" in chart.x_ticks
    told = [
        notice.text for notice in caveats(StudyTables(record)) if "different configurations" in notice.text
    ]
    assert not any("adapter" in text for text in told), "each adapter has rows of its own"
