"""Sentences about what is stored of a study's trials."""

from __future__ import annotations

from typing import Any

from support.study_records import fake_trial, record_of

from hpo.study.reading.study_record import unverified_precisions

REMEDY = (
    "Nothing was seen that contradicts it, so they count for the precision that they ran in. "
    "Check the layers named, or run `hpo verify`."
)


def unverified(number: int, **facts: str) -> Any:
    trial = fake_trial(number, "fp32")
    trial.telemetry["precision"] |= {"agrees": None, **facts}
    return trial


def test_unverified_trials_and_reasons_are_counted_beyond_the_first() -> None:
    trials = [unverified(number, reason=f"Reason {number % 5}.") for number in range(10)]
    text = (
        "The precision of 10 trials (number 0, 1, 2, 3, 4, 5, 6, 7 and 2 more) is unverified: "
        "Reason 0. Reason 1. Reason 2. There are 2 more reasons."
    )
    assert unverified_precisions(record_of(trials)) == [(text, REMEDY)]
    ((text, _),) = unverified_precisions(record_of(trials[:4]))
    assert text.endswith("Reason 0. Reason 1. Reason 2. There is 1 more reason.")


def test_the_reason_of_a_fallback_does_not_explain_an_unverified_precision() -> None:
    fallback, found = "bf16 is emulated here. Ran fp32 instead.", "No product with a weight was seen."
    trial = unverified(0, reason=f"{fallback} {found}", observed_reason=found)
    assert unverified_precisions(record_of([trial])) == [
        (f"The precision of 1 trial (number 0) is unverified: {found}", REMEDY)
    ]
