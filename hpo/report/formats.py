"""Numbers and precision facts as text for people."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpo.extensions import has_own_loop, own_loop_of
from hpo.json_safe import is_number
from hpo.report.number_formats import precision_that_ran

if TYPE_CHECKING:
    from hpo.study.reading.study_record import StudyRecord, TrialRecord


SCORE = "the mean of the primary metrics of all tasks"

BASELINE = "best constant"
"""The column of the best constant predictions."""


def format_metric(metric: str, value: Any) -> str:
    """An objective's value: bytes with their unit, everything else as a number."""
    return format_bytes(value) if metric.endswith("_bytes") else format_number(value)


def objective_values(record: StudyRecord, trial: TrialRecord) -> dict[str, str]:
    """The values of the objectives, each with its best constant prediction if it is known."""
    baseline = trial.telemetry.get("baseline") or {}
    pairs = zip(record.metric_names, trial.values or (), strict=True)
    return {
        metric: with_baseline(format_metric(metric, value), baseline.get(metric)) for metric, value in pairs
    }


def with_baseline(value: str, baseline: Any) -> str:
    return f"{value} (best constant prediction {format_number(baseline)})" if is_number(baseline) else value


def format_number(value: Any) -> str:
    """About four significant digits: 0.8214, 152.3, 12 840, 3e-05."""
    if not is_number(value):
        return "–"
    number = float(value)
    if number == 0 or abs(number) >= 1000:
        return f"{number:,.0f}".replace(",", "\u202f")
    return f"{number:.4g}"


def format_cell(value: Any) -> str:
    return format_number(value) if value is None or isinstance(value, float) else str(value)


def format_interval(value: Any, low: Any, high: Any, sign: str = "", digits: int = 2) -> str:
    """1.60 [1.50, 1.70] without a break in it; with `sign` "+", -0.10 [-0.40, +0.20]."""
    if not is_number(value):
        return "–"
    if not (is_number(low) and is_number(high)):
        return f"{value:{sign}.{digits}f}"
    shown, *ends = (f"{number:{sign}.{digits}f}" for number in (value, low, high))
    return f"{shown} [{', '.join(ends)}]".replace(" ", "\u00a0")


def format_metric_interval(value: Any, low: Any, high: Any) -> str:
    """`format_interval` of a metric in whatever unit: two digits of the interval's width, and three decimals
    at least of what lies between -1 and 1. Bounds that are not known: 0.821 [unknown].
    """
    if not is_number(value):
        return "–"
    numbers = [value, low, high] if is_number(low) and is_number(high) else [value]
    width = max(numbers) - min(numbers) or abs(value) / 10
    digits = 1 - math.floor(math.log10(width)) if width else 0
    largest = max(map(abs, numbers))
    if largest <= 1:
        digits = max(digits, 3)
    if digits > 9 or largest >= 1e9:
        shown = [f"{number:.{4 if largest >= 1e9 else 3}g}" for number in numbers]
    else:
        shown = [f"{number:,.{max(digits, 0)}f}".replace(",", "\u202f") for number in numbers]
    return f"{shown[0]} [{', '.join(shown[1:]) or 'unknown'}]".replace(" ", "\u00a0")


def format_bytes(value: Any) -> str:
    """Binary units: 0.31 MiB, 512 MiB, 1.43 GiB."""
    if not is_number(value):
        return "–"
    mebibytes = float(value) / 2**20
    if mebibytes >= 1000:
        return f"{mebibytes / 1024:.3g} GiB"
    return f"{mebibytes:.0f} MiB" if mebibytes >= 10 else f"{mebibytes:.2g} MiB"


def format_seconds(value: Any) -> str:
    """0.4 s, 12 s, 3 min 20 s, 2 h 05 min."""
    if not is_number(value):
        return "–"
    seconds = float(value)
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def precision_facts(trial: TrialRecord) -> str:
    """One sentence: what was requested, what ran, what was observed, and whether these agree."""
    precision = trial.telemetry.get("precision")
    if not precision:
        return "Nothing about its precision is stored."
    verdict = {
        True: "the observation agrees",
        False: "this is NOT the requested precision",
        None: "the precision is unverified",
    }[precision.get("agrees") if precision.get("observed") else None]
    reason = f" ({precision['reason'].rstrip('.')})" if precision.get("reason") else ""
    return (
        f"requested {precision['requested']}, ran {precision_that_ran(trial) or 'nothing'} "
        f"({precision['support']}), observed: {observed_precision(trial)}; {verdict}{reason}."
        f"{''.join(f' {name}: {_stored(facts)}.' for name, facts in stored_precisions(trial).items())}"
    )


def stored_precisions(trial: TrialRecord) -> dict[str, Mapping[str, Any]]:
    """The facts of `base_precision` and `optimizer_state`, without those that are plain fp32."""
    known = {name: trial.telemetry.get(name) or {} for name in ("base_precision", "optimizer_state")}
    return {
        name: facts
        for name, facts in known.items()
        if facts.get("requested", "fp32") != "fp32" or facts.get("effective") not in ("fp32", None)
    }


def _stored(facts: Mapping[str, Any]) -> str:
    verdict = "; this is NOT what was requested" if facts.get("agrees") is False else ""
    reason = f" ({facts['reason'].rstrip('.')})" if facts.get("reason") else ""
    return f"requested {facts['requested']}, ran {facts['effective'] or 'unknown'}{verdict}{reason}"


def observed_precision(trial: TrialRecord) -> str:
    """The formats in which weights were multiplied, TF32 and compilation; or `nothing`."""
    observed = (trial.telemetry.get("precision") or {}).get("observed") or {}
    products = observed.get("linear_products", {})
    seen = [
        f"{count} weights multiplied in {name}" for name, count in products.items() if name != "unmeasured"
    ]
    if count := products.get("unmeasured"):
        seen.append(f"{count} weights not measured")
    if observed.get("float8_linears"):
        seen.append(f"{observed['float8_linears']} float8 layers")
    if observed:
        seen.append("TF32 on" if observed["tf32"] else "TF32 off")
        seen.append("compiled" if observed["compiled"] else "not compiled")
    return ", ".join(seen) or "nothing"


def format_value(value: Any) -> str:
    """A parameter as one would write it in a study file; floats in full, so that it can be repeated."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def describe_params(params: Mapping[str, Any], *, in_full: bool = False) -> str:
    """`fp_precision=bf16 learning_rate=0.000314`; numbers with three digits unless `in_full`."""
    show = format_value if in_full else _three_digits
    return " ".join(f"{name}={show(value)}" for name, value in params.items())


def _three_digits(value: Any) -> str:
    if not isinstance(value, float):
        return format_value(value)
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e6 else f"{value:.3g}"


def objectives_text(metrics: Sequence[str], directions: Sequence[str]) -> str:
    """`maximize score, minimize peak_memory_bytes`."""
    return ", ".join(map(" ".join, zip(directions, metrics, strict=True)))


def score_explained(metrics: Sequence[str], definition: Mapping[str, Any]) -> str:
    """Say what `score` is, if it is an objective of a study whose metrics are not those of its own code."""
    with own_loop_of(definition):
        return f"`score` is {SCORE}." if "score" in metrics and not has_own_loop() else ""


def how_to_resume(study: str) -> str:
    """Name the commands that continue a paused or cancelled study."""
    return f"To continue it: hpo resume {study}, then hpo worker {study}"


def trials_done(counts: Mapping[str, int], *, has_budget: bool = False) -> str:
    """Describe the progress of a study. A study that has a budget may end with fewer trials."""
    paused = f", {counts['paused']} paused" if counts.get("paused") else ""
    at_most = "at most " if has_budget else ""
    return f"{counts['done']} of {at_most}{sum(counts.values())} trials ended{paused}"
