from __future__ import annotations

from typing import Any

from support.study_records import fake_trial, record_of

from hpo.study.reading.study_record import unverified_precisions


def unverified(number: int, **facts: str) -> Any:
    trial = fake_trial(number, "fp32")
    trial.telemetry["precision"] |= {"agrees": None, **facts}
    return trial


def test_unverified_trials_are_listed_with_three_reasons() -> None:
    trials = [unverified(number, reason=f"Reason {number % 5}.") for number in range(10)]
    ((text, _),) = unverified_precisions(record_of(trials))
    assert text == (
        "The precision of 10 trials (number 0, 1, 2, 3, 4, 5, 6, 7 and 2 more) is unverified: "
        "Reason 0. Reason 1. Reason 2."
    )
    assert unverified_precisions(record_of([fake_trial(0, "fp32")])) == []
