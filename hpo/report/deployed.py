"""The result of `hpo deploy` as tables and sentences, from `Deployment.as_json()`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text

from hpo.report.formats import MISSING, format_interval, format_number, plural
from hpo.report.terminal import Part, Rows

_COMPUTES_LOWER = ("bf16", "fp16")
"""Forms with weights in fp32."""

Stored = Mapping[str, Any]


def deployment_parts(stored: Stored) -> Iterator[Part]:
    rows = plural(stored["num_examples"], "row")
    yield f"{stored['study']}: {stored['objective']} on {rows} of validation", _quality(stored)
    text = f"Drop: {stored['unit']} lost against fp32. As good: its interval is below {stored['max_drop']:g}."
    yield Text(text, style="dim")
    threads = plural(stored["num_threads"], "thread")
    yield (
        f"{threads}: ms from text to prediction, median / 99th percentile; speed against fp32",
        _speed(stored),
    )
    forms = stored["artifacts"]
    if cast := [form["artifact"] for form in forms if form["artifact"] in _COMPUTES_LOWER]:
        yield f"{' and '.join(cast)}: the stored weights are fp32."
    yield from (form["judged"]["reason"] for form in forms if form["judged"]["reason"])
    yield from (f"{name} is omitted: {reason}" for name, reason in stored["left_out"].items())
    yield from stored["notes"]
    yield Text(verdict(stored), style="bold")
    folder = stored["folder"]
    yield f"To use it: {loading(stored, f'{folder}/model')}. More: {folder}/deploy.json"


def _quality(stored: Stored) -> Rows:
    rows = []
    for index, form in enumerate(stored["artifacts"]):
        judged, baseline = form["judged"], form["judged"]["baseline"]
        if baseline is not None:  # in the form of the score
            baseline = baseline / 100 if stored["unit"] == "points" else -baseline
        verdict = "not finite" if judged["score"] is None else str(judged["verdict"].replace("_", " "))
        rows.append(
            {
                "form": _name(form),
                stored["objective"]: _interval(judged["score"]),
                "baseline": format_number(baseline),
                "drop": "" if form["artifact"] == "fp32" else _interval(judged["drop"], "+"),
                "verdict": "chosen" if index == stored["chosen"] else verdict,
            }
        )
    return rows


def _speed(stored: Stored) -> Rows:
    rows = []
    for form in stored["artifacts"]:
        cells = {"form": _name(form)}
        for size, timing in form["timings"].items():
            texts = plural(int(size), "text")
            cells[texts] = f"{timing['p50_ms']:.3g} / {timing['p99_ms']:.3g}"
            cells[f"speed, {texts}"] = "1" if form["artifact"] == "fp32" else _speed_up(timing)
        rows.append(cells | {"weights": f"{form['weight_bytes'] / 1e6:.3g}\u00a0MB"})
    columns = dict.fromkeys((name for row in rows for name in row), MISSING)
    return [columns | row for row in rows]


def verdict(stored: Stored) -> str:
    form, size = stored["artifacts"][stored["chosen"]], stored["batch_size"]
    timing = form["timings"][str(size)]
    text = f"{format_number(timing['p50_ms'])} ms for {plural(size, 'text')} (median)"
    if form["artifact"] == "fp32":
        return f"fp32 of trial {stored['trial']}: {text}. Nothing faster is known to be as good."
    slow = " In a round it was no faster than fp32: time it again when the machine is quiet."
    return (
        f"{form['artifact']} of trial {stored['trial']} is the fastest as good as fp32 on validation: "
        f"{text}, {_speed_up(timing)} times fp32's speed. {_confirmed(stored)}"
        + (slow if timing["speed_up"]["low"] <= 1 else "")
    ).replace("\u00a0", " ")


def _confirmed(stored: Stored) -> str:
    if stored["test"] is None:
        drop = _interval(stored["artifacts"][stored["chosen"]]["judged"]["drop"], "+")
        return f"Drop on validation, which chose it: {drop} {stored['unit']}. No other rows were scored."
    judged, rows = stored["test"]["judged"], plural(stored["test"]["num_examples"], "row")
    text = f"Drop on {rows} of test, which chose nothing: {_interval(judged['drop'], '+')} {stored['unit']}"
    return f"{text}: as good there too." if judged["verdict"] == "as_good" else f"{text}. {judged['reason']}"


def loading(stored: Stored, model: str) -> str:
    """Return the Python expression to load the chosen form from the folder `model`."""
    device = ', device="cpu"' if stored["device"]["type"] == "cpu" else ""
    return f'hpo.load("{model}"{device})'


def _name(form: Stored) -> str:
    return str(form["artifact"]).replace("_", " ")


def _speed_up(timing: Stored) -> str:
    speed = timing["speed_up"]
    return format_interval(speed["ratio"], speed["low"], speed["high"])


def _interval(interval: Stored | None, sign: str = "") -> str:
    if interval is None:
        return MISSING
    return format_interval(interval["value"], interval["low"], interval["high"], sign)
