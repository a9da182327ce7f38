import dataclasses
from typing import Any

import pytest
from support.study_records import fake_record, fake_trial, record_of, tables_of, with_values

from hpo.device_time import REMEDY, busy_text
from hpo.report.best_screens import best_as_json, constant_warnings
from hpo.report.caveats import caveats
from hpo.report.status import study_status
from hpo.study.reading.study_record import TrialRecord


def texts(trials: list[TrialRecord], **changes: Any) -> str:
    return " ".join(notice.text for notice in caveats(tables_of(trials, **changes)))


@pytest.mark.parametrize(
    "text",
    [
        "1 trial (number 9): the precision observed is not the one requested (38 weights were not multiplied",
        "1 trial (number 10) fell back (fp16 ran as fp32)",
        "no instructions for it: fp16 on Example CPU",
        "1 trial (number 6): larger errors than usual",
        "1 trial (number 12) shared a device",
        "Example CPU was busy 62% of the time (median of",
        "complete configurations was trained with one seed only",
    ],
)
def test_notices_name_the_limits_of_a_study(text: str) -> None:
    assert text in texts(fake_record().trials)


@pytest.mark.parametrize(
    ("long_text", "remedy"),
    [("truncate", "set `data.long_text: window`."), ("window", "`data.stride` for shorter spans.")],
)
def test_lost_spans_have_a_remedy_of_the_study(long_text: str, remedy: str) -> None:
    trial = fake_trial(0, "fp32")
    trial.telemetry["data"] = {"num_examples": 9, "num_cut_examples": 0, "num_lost_spans": {"who": 5}}
    definition = fake_record().definition | {"data": {"long_text": long_text}}
    notices = caveats(tables_of([trial], definition=definition))
    (notice,) = [one for one in notices if "5 true spans of who lost" in one.text]
    assert notice.advice == f"Nothing is learned from it. Raise `max_length`, or {remedy}"


BUSY = {"programs": 0.62, "stolen": 0.0, "share": 0.38, "busy": True}


def busy_trial(number: int, **facts: Any) -> TrialRecord:
    trial = fake_trial(number, "fp32")
    trial.telemetry.update(device={**trial.telemetry["device"], "shared": True}, device_time=BUSY | facts)
    return trial


def test_busy_devices_have_their_own_advice_and_no_other() -> None:
    trials = [busy_trial(3), busy_trial(5, share=0.5, programs=0.5)]
    known = f"trial 3 ({busy_text(BUSY)})"
    notices = caveats(tables_of([*trials, fake_trial(6, "fp32")]))
    (notice,) = [one for one in notices if "busy in" in one.text]
    assert notice.text.startswith(
        f"The device was busy in 2 of 3 trials: {known}, trial 5 (busy: hpo got 50%"
    )
    assert notice.advice == f"Their speed is in no comparison. {REMEDY}"
    assert (
        f"{notice.text} {notice.advice}"
        in study_status(record_of([*trials, fake_trial(6, "fp32")]))["warnings"]
    )
    assert "shared a device" not in texts(trials)
    assert "was busy 62% of the time (median of 1 trial)" in texts([*trials, fake_trial(6, "fp32")])
    assert not any("batch_size" in one.advice for one in caveats(tables_of(trials)))
    assert not tables_of(trials).trials["counts_for_speed"].any()


def test_quiet_device_is_no_caveat() -> None:
    trials = [fake_trial(0, "fp32"), fake_trial(1, "fp32")]
    trials[0].telemetry["device_time"] = BUSY | {"busy": False}
    assert "busy in" not in texts(trials)
    assert tables_of(trials).trials["counts_for_speed"].all()


def test_equal_configurations_under_every_precision_have_no_caveat() -> None:
    trials = [fake_trial(number, precision) for number, precision in enumerate(["fp32", "bf16"] * 3)]
    for trial in trials:
        trial.params.update(learning_rate=10.0 ** -(3 + trial.number // 2), batch_size=8, head_type="mlp")
    assert "different configurations" not in texts(trials)
    assert "different configurations (settings: learning_rate)" in texts(trials[:-1])
    assert "different configurations" not in texts(trials[::2]), "one precision alone"


def test_one_seed_is_a_caveat_until_new_seeds_are_compared() -> None:
    trials = [fake_trial(0, "fp32"), fake_trial(1, "bf16")]
    assert "with one seed only" in texts(trials)
    assert "with one seed only" not in texts(trials, comparisons={"precisions": {}})
    again = dataclasses.replace(trials[0], number=2, params={**trials[0].params, "seed": 7})
    assert "one seed" not in texts([trials[0], again])


@pytest.mark.parametrize(
    ("metric", "value", "baseline", "warning"),
    [
        ("score", 0.4, {"score": 0.4}, "score is not above"),
        ("score", 0.41, {"score": 0.4}, ""),
        ("stars/mae", 2.0, {"stars/mae": 1.5}, "stars/mae is not below"),
        ("train_examples_per_second", 2.0, {"score": 4.0}, ""),
        ("score", 0.4, None, ""),
    ],
)
def test_the_best_trial_may_be_no_better_than_a_constant(
    metric: str, value: float, baseline: Any, warning: str
) -> None:
    trial = with_values(3, (value,))
    trial.telemetry["baseline"] = baseline
    tables = tables_of([trial], metric_names=(metric,))
    warnings = constant_warnings(tables.record)
    assert [text.startswith(f"Trial 3 on validation: {warning}") for text in warnings] == [True] * bool(
        warning
    )
    assert [one.text for one in caveats(tables) if "constant" in one.text] == warnings


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"scaler": {"skipped_steps": 30}, "num_steps": 40}, "trial 0 skipped 30 of 40 (75%)"),
        ({"scaler": {"skipped_steps": 3}, "num_steps": 40}, "trial 0 skipped 3 of 40 (8%)"),
        ({"moved_share": 0.123}, "Steps moved few weights in bf16: 12% in trial 0."),
        ({"scaler": {"skipped_steps": 2}, "num_steps": 40, "moved_share": 0.9}, ""),
        ({"scaler": {"skipped_steps": None}, "num_steps": 40}, ""),
    ],
)
def test_lost_updates_are_named_wherever_the_trial_is(facts: dict[str, Any], text: str) -> None:
    trial = fake_trial(0, "fp16")
    trial.telemetry.update(facts)
    record = record_of([trial])
    shown = {
        "best": best_as_json(record)["warnings"],
        "status": study_status(record)["warnings"],
        "report": [notice.text for notice in caveats(tables_of([trial]))],
    }
    for screen, warnings in shown.items():
        assert any(text in one for one in warnings) if text else "teps" not in " ".join(warnings), screen
