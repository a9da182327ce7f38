"""Numbers, durations and parameters as text, alike in the terminal, the page and the dashboard."""

import json
import math
from collections.abc import Mapping
from typing import Any

from hpo.json_safe import is_number

MISSING = "–"  # text of an unknown value


def format_number(value: Any) -> str:
    """About four significant digits: 0.8214, 152.3, 12,840, 3e-05."""
    if not is_number(value):
        return MISSING
    number = float(value)
    return f"{number:,.0f}" if number == 0 or abs(number) >= 1000 else f"{number:.4g}"


def format_interval(value: Any, low: Any, high: Any, sign: str = "") -> str:
    """Two digits of the interval's width, without a break: 0.821 [0.790, 0.848], 25.3 [22.8, 27.8].

    Numbers between -1 and 1 have at least three decimals, others at most three.
    """
    if not is_number(value):
        return MISSING
    numbers = [value, low, high] if is_number(low) and is_number(high) else [value]
    width = max(numbers) - min(numbers) or abs(value) / 10 or 1
    least, most = (3, 9) if max(map(abs, numbers)) <= 1 else (0, 3)
    digits = min(max(1 - math.floor(math.log10(width)), least), most)
    shown = [f"{number:{sign},.{digits}f}" for number in numbers]
    return f"{shown[0]} [{', '.join(shown[1:]) or 'unknown'}]".replace(" ", "\u00a0")


def format_percent(share: Any) -> str:
    """Three digits: 62%, 2.45%, <0.1%. Only a share of exactly 0 or 1 is 0% or 100%."""
    if not is_number(share):
        return MISSING
    percent = 100 * float(share)
    if 0 < percent < 0.1:
        return "<0.1%"
    return f"{percent:.3g}%" if not 99.9 < percent < 100 else "99.9%"


def format_bytes(value: Any) -> str:
    """Binary units: 0.31 MiB, 512 MiB, 1.43 GiB."""
    if not is_number(value):
        return MISSING
    mebibytes = float(value) / 2**20
    if mebibytes >= 1000:
        return f"{mebibytes / 1024:.3g} GiB"
    return f"{mebibytes:.0f} MiB" if mebibytes >= 10 else f"{mebibytes:.2g} MiB"


def format_seconds(value: Any) -> str:
    """0.4 s, 12 s, 3 min 20 s, 2 h 05 min."""
    if not is_number(value):
        return MISSING
    seconds = float(value)
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def format_metric(metric: str, value: Any) -> str:
    """An objective's value: bytes with their unit, everything else as a number."""
    return format_bytes(value) if metric.endswith("_bytes") else format_number(value)


def format_cell(value: Any) -> str:
    return format_number(value) if value is None or isinstance(value, float) else str(value)


def format_value(value: Any) -> str:
    """A parameter as in a study file; floats in full, to repeat the trial."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def describe_params(params: Mapping[str, Any], *, in_full: bool = False) -> str:
    """`fp_precision=bf16 learning_rate=0.000314`; numbers with three digits unless `in_full`."""
    show = format_value if in_full else _three_digits
    return " ".join(f"{name}={show(value)}" for name, value in params.items())


def _three_digits(value: Any) -> str:
    if not isinstance(value, float):
        return format_value(value)
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e6 else f"{value:.3g}"


def plural(count: int, noun: str) -> str:
    """`1 trial`, `1,200 trials`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
