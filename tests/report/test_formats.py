from __future__ import annotations

import math
from typing import Any

import pytest
from support.study_records import fake_trial

from hpo.report.formats import (
    format_bytes,
    format_metric,
    format_metric_interval,
    format_number,
    format_seconds,
    precision_facts,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_number(0.82143), "0.8214"),
        (format_number(12840.4), "12\u202f840"),
        (format_number(3e-5), "3e-05"),
        (format_number(None), "–"),
        (format_number(math.nan), "–"),
        (format_bytes(512 * 2**20), "512 MiB"),
        (format_bytes(1.5 * 2**30), "1.5 GiB"),
        (format_seconds(0.44), "0.4 s"),
        (format_seconds(59.6), "1 min 00 s"),
        (format_seconds(7500), "2 h 05 min"),
        (format_metric("peak_memory_bytes", 2**30), "1 GiB"),
        (format_metric("score", 0.5), "0.5"),
    ],
)
def test_numbers_as_people_read_them(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((0.8214, 0.79, 0.848), "0.821 [0.790, 0.848]"),
        ((0.5, 0.2, 0.8), "0.500 [0.200, 0.800]"),
        ((0.5, 0.49996, 0.50004), "0.500000 [0.499960, 0.500040]"),
        ((0.000123, 0.0001, 0.00015), "0.000123 [0.000100, 0.000150]"),
        ((152345.678, 152000.1, 152700.2), "152\u202f346 [152\u202f000, 152\u202f700]"),
        ((25.31, 22.8, 27.82), "25.3 [22.8, 27.8]"),
        ((3e12, 2.9e12, 3.2e12), "3e+12 [2.9e+12, 3.2e+12]"),
        ((1.0, 1.0, 1.0), "1.000 [1.000, 1.000]"),
        ((2.0, None, None), "2.00 [unknown]"),
        ((None, None, None), "–"),
    ],
)
def test_an_interval_has_the_digits_of_its_width(numbers: tuple[Any, Any, Any], expected: str) -> None:
    assert format_metric_interval(*numbers) == expected.replace(" ", "\u00a0")


SEEN = {"linear_products": {"bfloat16": 38}, "tf32": False, "compiled": False}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"agrees": False, "reason": "x gave float32."},
            "this is NOT the requested precision (x gave float32).",
        ),
        ({"agrees": None, "observed": {}}, "observed: nothing; the precision is unverified."),
        (
            {"observed": {"float8_linears": 12, "tf32": True, "compiled": True}},
            "12 float8 layers, TF32 on, compiled",
        ),
        ({}, "observed: 38 weights multiplied in bfloat16, TF32 off"),
        (
            {"observed": {**SEEN, "linear_products": {"float32": 2, "bfloat16": 36}}},
            "2 weights multiplied in float32, 36 weights multiplied in bfloat16, TF32 off",
        ),
        (
            {"agrees": None, "observed": {**SEEN, "linear_products": {"tf32": 37, "unmeasured": 1}}},
            "1 weights not measured, TF32 off, not compiled; the precision is unverified",
        ),
    ],
)
def test_precision_facts(change: dict[str, Any], said: str) -> None:
    trial = fake_trial(0, "bf16")
    trial.telemetry["precision"] |= change
    assert said in precision_facts(trial)
    trial.telemetry.clear()
    assert precision_facts(trial) == "Nothing about its precision is stored."


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            {"base_precision": {"requested": "nf4", "effective": "nf4", "reason": "", "agrees": True}},
            " base_precision: requested nf4, ran nf4.",
        ),
        (
            {"base_precision": {"requested": "nf4", "effective": None}},
            " base_precision: requested nf4, ran unknown.",
        ),
        (
            {
                "base_precision": {
                    "requested": "fp32",
                    "effective": "bf16",
                    "reason": "as bf16_true.",
                    "agrees": False,
                }
            },
            " base_precision: requested fp32, ran bf16; this is NOT what was requested (as bf16_true).",
        ),
        (
            {
                "optimizer_state": {
                    "requested": "int8",
                    "effective": "fp32",
                    "reason": "no matrix is large enough.",
                }
            },
            " optimizer_state: requested int8, ran fp32 (no matrix is large enough).",
        ),
        (
            {
                "optimizer_state": {"requested": "fp32", "effective": "fp32"},
                "base_precision": {"requested": "fp32", "effective": None},
            },
            "",
        ),
    ],
)
def test_what_is_stored_in_other_precisions(told: dict[str, Any], said: str) -> None:
    trial = fake_trial(0, "bf16")
    before = precision_facts(trial)
    trial.telemetry.update(told)
    assert precision_facts(trial) == before + said
