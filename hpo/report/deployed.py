"""The result of `hpo deploy` as tables of text and sentences, from `Deployment.as_json()`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.text import Text

from hpo.report.formats import format_interval, format_number

if TYPE_CHECKING:
    from hpo.report.terminal import Part

_KEEPS_FP32 = ("bf16", "fp16")

Stored = Mapping[str, Any]


def shown(stored: Stored) -> Iterator[Part]:
    """The result of `hpo deploy`, and how to use it."""
    title = f"{stored['study']}: {stored['objective']} on {stored['num_examples']:,} rows of validation"
    yield title, quality_table(stored)
    told = f"Drop: {stored['unit']} lost against fp32. As good: its interval is below {stored['max_drop']:g}."
    yield Text(told, style="dim")
    title = f"{threads(stored)}: ms from texts to predictions, median / 99th percentile; times fp32's speed"
    yield title, latency_table(stored)
    tasks = task_table(stored)
    if not tasks.empty and tasks["task"].nunique() > 1:
        yield "by task: the primary metric; drops in points", tasks
    yield from sentences(stored)
    yield Text(verdict(stored), style="bold")
    folder = stored["folder"]
    yield f"To use it: {loading(stored, f'{folder}/model')}. More: {folder}/deploy.json"


def quality_table(stored: Stored) -> pd.DataFrame:
    """A row for each form: the objective on validation, the drop from fp32, and the verdict, as text."""
    rows = []
    for index, row in enumerate(stored["artifacts"]):
        is_reference, judged = row["artifact"] == "fp32", row["judged"]
        rows.append(
            {
                **_named(row),
                stored["objective"]: _interval(judged["score"], digits=4),
                "baseline": _baseline(judged["baseline"], stored["unit"]),
                "drop": "" if is_reference else _interval(judged["drop"], sign="+"),
                "verdict": "chosen" if index == stored["chosen"] else _verdict(judged),
            }
        )
    return pd.DataFrame(rows)


def latency_table(stored: Stored) -> pd.DataFrame:
    """A row for each form: median and 99th percentile in ms, the speed-up, and sizes, as text."""
    rows = []
    for row in stored["artifacts"]:
        cells = _named(row)
        for size, timing in row["timings"].items():
            speed, texts = timing["speed_up"], "1 text" if size == "1" else f"{size} texts"
            cells[texts] = f"{timing['p50_ms']:.3g} / {timing['p99_ms']:.3g}"
            faster = format_interval(speed["ratio"], speed["low"], speed["high"])
            cells[f"speed, {texts}"] = "1" if row["artifact"] == "fp32" else faster
        cells["weights"] = _megabytes(row["weight_bytes"])
        rows.append(cells)
    return pd.DataFrame(rows).fillna("–")


def _named(row: Stored) -> dict[str, str]:
    return {"form": str(row["artifact"]).replace("_", " ")}


def task_table(stored: Stored) -> pd.DataFrame:
    """A row for each form, but fp32, and task: the primary metric and what it lost, as text."""
    rows = []
    for row in stored["artifacts"]:
        if row["artifact"] == "fp32":
            continue
        for task, of in row["judged"]["tasks"].items():
            cells = _named(row) | {"task": task, "metric": of["metric"]}
            value, drop = _interval(of["value"], digits=4), _interval(of["drop"], sign="+")
            rows.append(cells | {"value": value, "drop": drop})
    return pd.DataFrame(rows)


def sentences(stored: Stored) -> list[str]:
    said = []
    if cast := [row["artifact"] for row in stored["artifacts"] if row["artifact"] in _KEEPS_FP32]:
        each = "it computes" if len(cast) == 1 else "they compute"
        said.append(f"{' and '.join(cast)}: the weights are stored in fp32, which {each} from.")
    reasons = {row["artifact"]: row["judged"]["reason"] for row in stored["artifacts"]}
    said += [reason for reason in reasons.values() if reason]
    said += [f"{name} is left out: {reason}" for name, reason in stored["left_out"].items()]
    return [*said, *stored["notes"]]


def verdict(stored: Stored) -> str:
    """What to use, and what test says of it."""
    best = stored["artifacts"][stored["chosen"]]
    size = stored["batch_size"]
    timing = best["timings"][str(size)]
    speed = timing["speed_up"]
    told = f"{format_number(timing['p50_ms'])} ms a batch of {size} (median)"
    if best["artifact"] == "fp32":
        return f"fp32 of trial {stored['trial']}: {told}. Nothing faster is known to be as good."
    faster = format_interval(speed["ratio"], speed["low"], speed["high"]).replace("\u00a0", " ")
    slow = " In a round it was no faster than fp32: time it again when the machine is quiet."
    return (
        f"{best['artifact']} of trial {stored['trial']} is the fastest that is as good as fp32 on "
        f"validation: {told}, {faster} times fp32's speed. {_confirmed(stored)}"
        + (slow if speed["low"] <= 1 else "")
    )


def _confirmed(stored: Stored) -> str:
    if stored["test"] is None:
        judged = stored["artifacts"][stored["chosen"]]["judged"]
        drop = _interval(judged["drop"], sign="+").replace("\u00a0", " ")
        return f"There it dropped by {drop} {stored['unit']}; no rows that did not choose it were scored."
    judged, rows = stored["test"]["judged"], stored["test"]["num_examples"]
    drop = _interval(judged["drop"], sign="+").replace("\u00a0", " ")
    said = f"On the {rows:,} rows of test, which chose nothing, it drops by {drop} {stored['unit']}"
    if judged["verdict"] == "as_good":
        return f"{said}: as good there too."
    return f"{said}. {judged['reason']}"


def loading(stored: Stored, model: str) -> str:
    """The Python expression that loads the chosen form from the folder `model`, where it was measured."""
    where = ', device="cpu"' if stored["device"]["type"] == "cpu" else ""
    return f'hpo.load("{model}"{where})'


def threads(stored: Stored) -> str:
    """`1 thread`, `2 threads`."""
    return f"{stored['num_threads']} thread{'s' * (stored['num_threads'] > 1)}"


def _baseline(value: float | None, unit: str) -> str:
    """The best constant prediction in the form of the score."""
    return format_number(value / 100 if unit == "points" else -value) if value is not None else "–"


def _verdict(judged: Stored) -> str:
    return "not finite" if judged["score"] is None else str(judged["verdict"].replace("_", " "))


def _interval(interval: Stored | None, sign: str = "", digits: int = 2) -> str:
    if interval is None:
        return "–"
    return format_interval(interval["value"], interval["low"], interval["high"], sign, digits)


def _megabytes(size: int) -> str:
    """`91.0 MB`, `438 MB`, without a break in it."""
    megabytes = size / 1e6
    return f"{megabytes:.1f}\u00a0MB" if megabytes < 100 else f"{megabytes:.0f}\u00a0MB"
