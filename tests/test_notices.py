from __future__ import annotations

import dataclasses

import pytest
from study_records import fake_record, fake_trial, record_of

from hpo.notices import notices
from hpo.tables import complete_trials


@pytest.mark.parametrize(
    "text",
    [
        "1 trial (number 9): the precision observed is not the one requested (linear layers gave float32",
        "1 trial (number 10) fell back (fp16 ran as fp32)",
        "fp16 ran emulated on Example CPU",
        "1 trial (number 6): the compatibility check found larger errors",
        "1 trial (number 12) shared a device",
        "The device was busy 62% of the time (median of",
        "complete configurations was trained with one seed only",
    ],
)
def test_notices_name_what_limits_the_conclusions(text: str) -> None:
    assert any(notice.text.startswith(text) or text in notice.text for notice in notices(fake_record()))


def test_low_utilisation_says_what_to_raise() -> None:
    advice = next(notice.advice for notice in notices(fake_record()) if "busy" in notice.text)
    assert "batch_size" in advice
    assert "workers per device" in advice


def test_a_clean_study_has_only_the_notices_that_always_hold() -> None:
    trials = [fake_trial(number, "fp32") for number in range(3)]
    for trial in trials:
        trial.telemetry["device_utilization"] = 0.95
    assert [notice.text[:25] for notice in notices(record_of(trials))] == [
        "Each of the 3 complete co",
        "The precision table compa",
    ]


def test_repeated_configurations_lift_the_caveat_of_one_seed() -> None:
    trial = fake_trial(0, "fp32")
    again = dataclasses.replace(trial, number=1, params={**trial.params, "seed": 7})
    assert not any("one seed" in notice.text for notice in notices(record_of([trial, again])))


def test_nothing_complete_is_said() -> None:
    record = record_of([fake_trial(0, "fp32", "failed")])
    assert [notice.text for notice in notices(record)] == ["No trial is complete."]
    assert complete_trials(record) == []
