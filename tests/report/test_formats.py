from typing import Any

import pytest

from hpo.report.formats import (
    format_bytes,
    format_interval,
    format_metric,
    format_number,
    format_percent,
    format_seconds,
    plural,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_number(0.82143), "0.8214"),
        (format_number(12840.4), "12,840"),
        (format_number(None), "–"),
        (format_percent(0.62), "62%"),
        (format_percent(0.02451), "2.45%"),
        (format_percent(0.0004), "<0.1%"),
        (format_percent(0.9999), "99.9%"),
        (format_bytes(1.5 * 2**30), "1.5 GiB"),
        (format_seconds(0.44), "0.4 s"),
        (format_seconds(59.6), "1 min 00 s"),
        (format_seconds(7500), "2 h 05 min"),
        (format_metric("peak_memory_bytes", 2**30), "1 GiB"),
        (plural(1, "trial") + plural(1200, "row"), "1 trial1,200 rows"),
    ],
)
def test_numbers_as_text(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((0.8214, 0.79, 0.848), "0.821 [0.790, 0.848]"),
        ((0.5, 0.49996, 0.50004), "0.500000 [0.499960, 0.500040]"),
        ((152345.678, 152000.1, 152700.2), "152,346 [152,000, 152,700]"),
        ((25.31, 22.8, 27.82), "25.3 [22.8, 27.8]"),
        ((2.0, 1.99996, 2.00004), "2.000 [2.000, 2.000]"),
        ((2.0, None, None), "2.00 [unknown]"),
        ((None, None, None), "–"),
    ],
)
def test_digits_of_an_interval_follow_its_width(numbers: tuple[Any, Any, Any], expected: str) -> None:
    assert format_interval(*numbers) == expected.replace(" ", "\u00a0")
