"""Precision facts of a trial, and the formats of the rows in tables."""

import dataclasses
from typing import Any

import pytest
from support.study_records import DEFINITION, fake_trial, record_of

from hpo.report.charts import slices
from hpo.report.plan import costs_of
from hpo.report.tables import StudyTables, precision_table
from hpo.report.trial_precision import precision_facts, shared_formats, trial_formats
from hpo.study.reading.study_record import StudyRecord, TrialRecord

SEEN = {"linear_products": {"bfloat16": 38}, "tf32": False, "compiled": False}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"agrees": False, "reason": "x gave fp32."}, "this is NOT the requested precision (x gave fp32)."),
        ({"agrees": None, "observed": {}}, "observed: nothing; the precision is unverified."),
        ({"observed": {"float8_linears": 12, "tf32": True, "compiled": True}}, "12 float8 layers, TF32 on"),
        ({}, "observed: products of 38 weight matrices in bfloat16, TF32 off"),
        (
            {"agrees": None, "observed": {**SEEN, "linear_products": {"tf32": 37, "unmeasured": 1}}},
            "1 weights not measured, TF32 off, not compiled; the precision is unverified",
        ),
    ],
)
def test_facts_about_the_precision_of_computing(change: dict[str, Any], text: str) -> None:
    trial = fake_trial(0, "bf16")
    trial.telemetry["precision"] |= change
    assert text in precision_facts(trial)
    trial.telemetry.clear()
    assert precision_facts(trial) == "Nothing about its precision is stored."


def trial(number: int, precision: str = "bf16", facts: Any = None, **params: Any) -> TrialRecord:
    made = fake_trial(number, precision)
    telemetry, values = {**made.telemetry, **(facts or {})}, (0.5 + number / 100,)
    return dataclasses.replace(made, values=values, params={**made.params, **params}, telemetry=telemetry)


def searching(*trials: TrialRecord, training: Any = None, **space: list[Any]) -> StudyRecord:
    """Record of a study with a searched precision and these choices."""
    choices = {"fp_precision": ["fp32", "bf16"], **space}
    searched = {name: {"type": "categorical", "choices": values} for name, values in choices.items()}
    definition = {**DEFINITION, "search_space": searched, "training": training or {}}
    return record_of(list(trials), definition=definition)


def adapters() -> StudyRecord:
    int8 = {"adapter": "lora", "base_precision": "int8"}
    fallback = {"requested": "bf16", "effective": "fp32", "reason": "no matrix of the model is large enough."}
    return searching(
        trial(0, adapter="none", optimizer_state="fp32"),
        trial(1, **int8, optimizer_state="fp32"),
        trial(2, **int8, optimizer_state="bf16"),
        trial(3, **int8, optimizer_state="bf16", facts={"optimizer_state": fallback}),
        trial(4, "fp32", adapter="none", optimizer_state="fp32"),
        training={"attention": "eager"},
        adapter=["none", "lora"],
        base_precision=["fp32", "int8"],
        optimizer_state=["fp32", "bf16"],
    )


def test_each_combination_of_formats_has_its_own_row_and_group() -> None:
    record = adapters()
    rows = precision_table(StudyTables(record))
    columns = ["precision", "adapter", "base precision", "optimizer state", "outcomes", "score, best"]
    assert [[row[name] for name in columns] for row in rows] == [
        ["fp32", "none", "–", "fp32", "1 complete", "0.54"],
        ["bf16", "lora", "int8", "bf16, ran as fp32", "2 complete", "0.53"],
        ["bf16", "lora", "int8", "fp32", "1 complete", "0.51"],
        ["bf16", "none", "–", "fp32", "1 complete", "0.5"],
    ]
    assert "attention" not in rows[0]
    costs = costs_of(record)
    assert (
        costs["bf16"].measured_by
        == "4 complete trials, different in adapter, base_precision, optimizer_state"
    )
    assert costs["fp32"].measured_by == "1 complete trial"
    chart = next(slices(StudyTables(record)))
    assert "bf16<br>lora<br>int8<br>bf16 (n = 2)" in chart.figure.layout.xaxis.ticktext


def test_formats_of_all_trials_are_named_without_defaults() -> None:
    def shared(record: StudyRecord) -> str:
        return shared_formats(record.trials, record.definition)

    assert shared(adapters()) == "All trials have attention=eager."
    assert shared(searching(trial(0), trial(1))) == ""
    assert shared(searching(trial(0, adapter="none"), adapter=["none", "lora"])) == (
        "All trials have adapter=none."
    )
    fallback = {"optimizer_state": {"requested": "bf16", "effective": "fp32"}}
    record = searching(trial(0, facts=fallback), training={"adapter": "lora", "optimizer_state": "bf16"})
    assert shared(record) == "All trials have adapter=lora, optimizer_state=bf16, ran as fp32."


@pytest.mark.parametrize(
    ("precision", "params", "facts", "shown"),
    [
        ("bf16", {"fp32_parts": '["heads", "norms"]'}, {}, "heads, norms"),
        ("bf16", {"fp32_parts": "auto"}, {"requested": "auto", "resolved": ["heads"]}, "auto: heads"),
        ("fp32", {"fp32_parts": '["heads"]'}, {}, "–"),
        ("bf16", {"fp32_parts": "[x"}, {}, "[x"),
        ("bf16", {}, {}, "none"),
    ],
)
def test_parts_in_fp32_are_named(precision: str, params: Any, facts: Any, shown: str) -> None:
    one = trial(0, precision, {"fp32_parts": facts} if facts else {}, **params)
    record = searching(one, trial(1, fp32_parts="layers"), fp32_parts=[[], "auto", ["heads"]])
    assert shown in [row["fp32 parts"] for row in precision_table(StudyTables(record))]
    assert trial_formats(one, record.definition)["fp32_parts"] in (shown, "auto")
