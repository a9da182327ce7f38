from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from support.study_records import fake_record, fake_tables, fake_trial, tables_of, with_values

from hpo.report.caveats import Notice, caveats
from hpo.report.limits import no_better_than_constant
from hpo.study.reading.study_record import TrialRecord


def texts(trials: list[TrialRecord], **changes: Any) -> str:
    return " ".join(notice.text for notice in caveats(tables_of(trials, **changes)))


@pytest.mark.parametrize(
    "text",
    [
        "1 trial (number 9): the precision observed is not the one requested (38 weights were not multiplied",
        "1 trial (number 10) fell back (fp16 ran as fp32)",
        "fp16 was emulated on Example CPU",
        "1 trial (number 6): the compatibility check found larger errors",
        "1 trial (number 12) shared a device",
        "Example CPU was busy 62% of the time (median of",
        "complete configurations was trained with one seed only",
    ],
)
def test_notices_name_what_limits_the_conclusions(text: str) -> None:
    assert text in texts(fake_record().trials)


def cut_notices(*data: dict[str, Any]) -> list[Notice]:
    trials = [fake_trial(number, "fp32") for number in range(len(data))]
    for trial, lost in zip(trials, data, strict=True):
        trial.telemetry["data"] = lost
    return [notice for notice in caveats(tables_of(trials)) if "max_length" in notice.text]


def cut(num_cut: int, spans: dict[str, int], num: int = 2400) -> dict[str, Any]:
    return {"num_cut_examples": num_cut, "num_lost_spans": spans, "num_examples": num}


MOST = (
    "2 trials lost training text at `max_length`; most in trial 2: 1,200 of 2,400 texts cut, "
    "1,540 true spans lost (evidence 40, pii 1,500)."
)
MANY = [cut(0, {"pii": 0}), cut(300, {"pii": 0, "evidence": 7}), cut(1200, {"pii": 1500, "evidence": 40})]


@pytest.mark.parametrize(
    ("data", "said", "advice"),
    [
        (MANY, MOST, "Raise `max_length`, or set `data.long_text: window`; a span"),
        (
            [cut(0, {"evidence": 2}, 10)],
            "0 of 10 texts cut, 2 true spans lost (evidence 2).",
            "`data.stride`",
        ),
        ([cut(3, {"pii": 0}, 10)], "3 of 10 texts cut, no true span lost.", "`data.stride`"),
    ],
    ids=["the one that lost most", "spans that no window holds", "no span"],
)
def test_cut_texts_and_lost_spans_are_said(data: list[dict[str, Any]], said: str, advice: str) -> None:
    (notice,) = cut_notices(*data)
    assert said in notice.text
    assert advice in notice.advice


def test_low_utilisation_says_what_to_raise() -> None:
    (advice,) = [notice.advice for notice in caveats(fake_tables()) if "busy" in notice.text]
    assert re.search("batch_size.*workers per device", advice)
    assert "On a GPU, NVML counts any running kernel as busy, so less of it may be in use." in advice


def test_a_clean_study_has_only_the_notices_that_always_hold() -> None:
    trials = [fake_trial(number, precision) for number, precision in enumerate(["fp32", "bf16", "bf16"])]
    for trial in trials:
        trial.telemetry["device_utilization"] = 0.95
    definition = {"search_space": {"fp_precision": {"choices": ["fp32", "bf16"]}}}
    assert [notice.text[:25] for notice in caveats(tables_of(trials, definition=definition))] == [
        "Each of the 3 complete co",
        "The precision table compa",
    ]


def test_invalid_trials_are_said_with_their_reasons() -> None:
    reasons = ["fp32 raised IndexError.", "the metric tone/rank is not defined.", "fp32 raised IndexError."]
    trials = [
        dataclasses.replace(fake_trial(number, "bf16", "invalid"), reason=reason)
        for number, reason in enumerate(reasons)
    ]
    said = (
        "3 trials (number 0, 1, 2) are invalid: fp32 raised IndexError. the metric tone/rank is not defined."
    )
    assert said in texts([*trials, fake_trial(3, "fp32")])


def test_equal_configurations_under_every_precision_are_no_caveat() -> None:
    trials = [fake_trial(number, precision) for number, precision in enumerate(["fp32", "bf16"] * 3)]
    for trial in trials:
        trial.params.update(learning_rate=10.0 ** -(3 + trial.number // 2), batch_size=8, head_type="mlp")
    assert "different configurations" not in texts(trials)
    assert "different configurations (settings: learning_rate)" in texts(trials[:-1])
    assert "different configurations" not in texts(trials[::2]), "one precision alone"


def test_precisions_that_no_trial_ran_are_said() -> None:
    said = texts([fake_trial(0, "fp32")])
    assert "Not run here: tf32, fp16. `tf32` needs CUDA with compute capability >= 8.0" in said
    assert "No trial tried bf16." in said


def test_one_seed_is_a_caveat_until_configurations_are_compared_on_new_ones() -> None:
    trials = [fake_trial(0, "fp32"), fake_trial(1, "bf16")]
    assert "with one seed only" in texts(trials)
    assert "with one seed only" not in texts(trials, comparisons={"precisions": {}})
    again = dataclasses.replace(trials[0], number=2, params={**trials[0].params, "seed": 7})
    assert "one seed" not in texts([trials[0], again])


@pytest.mark.parametrize(
    ("metric", "value", "baseline", "told"),
    [
        ("score", 0.4, {"score": 0.4}, "score is not above {} (0.4)."),
        ("score", 0.41, {"score": 0.4}, None),
        ("stars/mae", 2.0, {"stars/mae": 1.5}, "stars/mae is not below {} (1.5)."),
        ("stars/mae", 1.0, {"stars/mae": 1.5}, None),
        ("train_examples_per_second", 2.0, {"score": 4.0}, None),
        ("score", 0.4, None, None),
    ],
)
def test_the_best_trial_is_no_better_than_a_constant(
    metric: str, value: float, baseline: Any, told: str | None
) -> None:
    trial = with_values(3, (value,))
    trial.telemetry["baseline"] = baseline
    tables = tables_of([trial], metric_names=(metric,))
    told = told and told.format("that of the best constant prediction")
    expected = [f"Trial 3 on validation: {told}"] if told else []
    assert no_better_than_constant(tables.record) == expected
    assert [one.text for one in caveats(tables) if "constant" in one.text] == expected
