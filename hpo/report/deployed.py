"""What `hpo deploy` has found, as tables of text, sentences and charts. It takes `Deployment.as_json()`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from hpo.config.study_config import SMALLER_IS_BETTER
from hpo.report.figures import OTHER_STYLE, PRECISION_STYLES, Chart, Series
from hpo.report.formats import format_interval, format_number
from hpo.study.study_record import is_number

_BLUE, _ORANGE, _GREEN, _PINK, _YELLOW = "#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442"
ARTIFACT_STYLES = {
    "fp32": PRECISION_STYLES["fp32"],
    "bf16": PRECISION_STYLES["bf16"],
    "fp16": PRECISION_STYLES["fp16"],
    "onnx_fp32": (_BLUE, ("square", "s")),
    "onnx_int8_dynamic": (_GREEN, ("triangle-down", "v")),
    "onnx_int8_dynamic_per_channel": (_GREEN, ("pentagon", "p")),
    "onnx_int8_static": (_PINK, ("hexagon", "h")),
    "onnx_int8_static_per_channel": (_PINK, ("star", "*")),
}
_KEEPS_FP32 = ("bf16", "fp16")
_MENDED_MARKERS = ("cross", "P")

Stored = Mapping[str, Any]


def artifact_name(row: Stored) -> str:
    """`onnx_int8_dynamic, 2 layers in float`."""
    num = len(row["float_layers"])
    return f"{row['artifact']}, {num} layer{'s' * (num > 1)} in float" if num else str(row["artifact"])


def quality_table(found: Stored) -> pd.DataFrame:
    """A row for each artifact: the objective, what it lost of fp32, and the verdict, as text."""
    rows = []
    for index, row in enumerate(found["artifacts"]):
        is_reference = row["artifact"] == "fp32"
        rows.append(
            {
                **_named(row, found),
                found["objective"]: _interval(row["score"], digits=4),
                "drop": "" if is_reference else _interval(row["drop"], sign="+"),
                "change": "" if is_reference else _change(row["largest_change"]),
                "verdict": "chosen" if index == found["chosen"] else _verdict(row),
            }
        )
    return pd.DataFrame(rows)


def latency_table(found: Stored) -> pd.DataFrame:
    """A row for each artifact: median and 99th percentile in ms, the speed-up, and sizes, as text."""
    rows = []
    for row in found["artifacts"]:
        cells = _named(row, found)
        for size, timing in row["timings"].items():
            speed, texts = timing["speed_up"], "1 text" if size == "1" else f"{size} texts"
            cells[texts] = f"{timing['p50_ms']:.3g} / {timing['p99_ms']:.3g}"
            faster = format_interval(speed["ratio"], speed["low"], speed["high"])
            cells[f"speed, {texts}"] = "1" if row["artifact"] == "fp32" else faster
        cells["weights"] = _megabytes(row["weight_bytes"])
        rows.append(cells)
    return pd.DataFrame(rows).fillna("–")


def _named(row: Stored, found: Stored) -> dict[str, str]:
    """The artifact, in words that a line can break at, and its trial where there are several."""
    several = len({one["trial"] for one in found["artifacts"]}) > 1
    return {"artifact": artifact_name(row).replace("_", " ")} | (
        {"trial": str(row["trial"])} if several else {}
    )


def task_table(found: Stored) -> pd.DataFrame:
    """A row for each artifact, but fp32, and task: the primary metric and what it lost, as text."""
    rows = []
    for row in found["artifacts"]:
        if row["artifact"] == "fp32":
            continue
        for task, drop in row["task_drops"].items():
            cells = _named(row, found)
            metric, value = next(iter(row["metrics"][task].items()))
            cells |= {"task": task, "metric": metric}
            rows.append(cells | {"value": _interval(value, digits=4), "drop": _interval(drop, sign="+")})
    return pd.DataFrame(rows)


def sentences(found: Stored) -> list[str]:
    """Why artifacts are not as good, which layers mend them, and what limits the numbers."""
    said = []
    if cast := [name for name in _KEEPS_FP32 if name in {row["artifact"] for row in found["artifacts"]}]:
        each = "it computes" if len(cast) == 1 else "they compute"
        said.append(f"{' and '.join(cast)}: the weights are stored in fp32, which {each} from.")
    for row in found["artifacts"]:
        of = f" of trial {row['trial']}" if len({one["trial"] for one in found["artifacts"]}) > 1 else ""
        name = f"{artifact_name(row)}{of}"
        if row["mended"]:
            said.append(f"{name}: {_mended(row, found['split'])}")
        if row["reason"]:
            said.append(f"{name}: {row['reason']}")
    said += [f"{name} is left out: {reason}" for name, reason in found["left_out"].items()]
    return [*said, *found["notes"]]


def verdict(found: Stored) -> str:
    """What to use, in one sentence."""
    best = found["artifacts"][found["chosen"]]
    size = found["batch_size"]
    timing = best["timings"][str(size)]
    speed = timing["speed_up"]
    told = f"{format_number(timing['p50_ms'])} ms a batch of {size} (median), "
    if best["artifact"] == "fp32":
        return (
            f"fp32 of trial {best['trial']} is the fastest that is as good: {told}nothing faster is as good."
        )
    faster = format_interval(speed["ratio"], speed["low"], speed["high"]).replace("\u00a0", " ")
    slow = speed["low"] <= 1
    drop = _interval(best["drop"], sign="+").replace("\u00a0", " ")
    return (
        f"{artifact_name(best)} of trial {best['trial']} is the fastest that is as good as fp32: {told}"
        f"{faster} times fp32's speed, a drop of {drop} {found['unit']}."
        + (" In a round it was no faster than fp32: time it again when the machine is quiet." if slow else "")
    )


def loading(found: Stored, model: str) -> str:
    """The Python expression that loads the chosen artifact from the folder `model`, where it was measured."""
    where = ', device="cpu"' if found["device"]["type"] == "cpu" else ""
    return f'hpo.load("{model}"{where})'


def card_section(found: Stored) -> str:
    """What was measured of the chosen artifact, for its model card (Markdown)."""
    best = found["artifacts"][found["chosen"]]
    table = latency_table({**found, "artifacts": [best]}).drop(columns="artifact").iloc[0].to_dict()
    facts = {
        "artifact": artifact_name(best),
        f"{found['objective']} on {found['num_examples']:,} rows of {found['split']}": _interval(
            best["score"], digits=4
        ),
        f"drop of fp32's, {found['unit']}": ""
        if best["artifact"] == "fp32"
        else _interval(best["drop"], "+"),
        **table,
        "timed on": f"{found['device']['name']}, {threads(found)}",
    }
    rows = [f"| {name} | {value} |" for name, value in facts.items() if value]
    return "\n".join(
        [
            "## As deployed",
            "",
            "Measured by `hpo deploy`, with 95 % intervals. Of each number of texts: ms from texts to",
            "predictions, median / 99th percentile; speed is times fp32's, with the extremes of the rounds.",
            "",
            "| | |",
            "| --- | --- |",
            *rows,
            "",
        ]
    )


def latency_charts(found: Stored) -> list[Chart]:
    """The score against the latency, at each batch size; bars are the scores' intervals."""
    several = len({row["trial"] for row in found["artifacts"]}) > 1
    corner = "Lower" if found["objective"].rpartition("/")[2] in SMALLER_IS_BETTER else "Upper"
    charts = []
    for size in found["artifacts"][0]["timings"]:
        series = []
        for row in found["artifacts"]:
            if row["score"] is None:
                continue
            color, markers = ARTIFACT_STYLES.get(row["artifact"], OTHER_STYLE)
            markers = _MENDED_MARKERS if row["float_layers"] else markers
            name = artifact_name(row) + (f" (trial {row['trial']})" if several else "")
            score, timing = row["score"], row["timings"][size]
            told = (
                f"{name}\n{found['objective']} {_interval(score, digits=4)}\np50 {timing['p50_ms']:.3g} ms, "
                f"p99 {timing['p99_ms']:.3g} ms\n{row['verdict'].replace('_', ' ')}"
            )
            x = timing["p50_ms"]
            bar = [score["low"], score["high"]]
            series += [
                Series(name, color, x=[x, x], y=bar, draw="line", in_legend=False, hover=[told, told]),
                Series(name, color, x=[x], y=[score["value"]], markers=markers, hover=[told]),
            ]
        charts.append(
            Chart(
                key=f"latency_{size}",
                title=f"Score against latency, {_texts(int(size))}",
                x_label=f"median ms of a prediction of {_texts(int(size))}, {threads(found)}",
                y_label=f"{found['objective']} on {found['split']}",
                series=series,
                caption=(
                    f"Each artifact's {found['objective']} on the {found['num_examples']:,} rows of "
                    f"{found['split']}, with its 95 % interval. {corner} left is better."
                ),
            )
        )
    return charts


def _texts(size: int) -> str:
    return "one text" if size == 1 else f"{size} texts"


def threads(found: Stored) -> str:
    """`1 thread`, `2 threads`."""
    return f"{found['num_threads']} thread{'s' * (found['num_threads'] > 1)}"


def _mended(row: Stored, split: str) -> str:
    """What the layers in float do, on the rows that they were found by and on the split."""
    mended, layers = row["mended"], ", ".join(row["float_layers"])
    minimal = "none of these layers can be left out" if mended["is_smallest"] else "the time given has ended"
    told = f"{layers} ({minimal}; {mended['num_quantizations']} models in int8 were made to find them)"
    if row["verdict"] == "as_good":
        return f"layers in float that mend it: {told}."
    return f"layers in float that mend it on the rows they were found by, but not surely on {split}: {told}."


def _verdict(row: Stored) -> str:
    if row["score"] is None:
        return "refused: not finite"
    return "refused: worse" if row["verdict"] == "worse" else str(row["verdict"].replace("_", " "))


def _interval(interval: Stored | None, sign: str = "", digits: int = 2) -> str:
    """`0.9012 [0.8870, 0.9151]` without a break in it."""
    if interval is None:
        return "–"
    value, low, high = (
        f"{interval[name]:{sign}.{digits}f}" if interval[name] is not None else "–"
        for name in ("value", "low", "high")
    )
    return f"{value} [{low}, {high}]".replace(" ", "\u00a0")


def _megabytes(size: int) -> str:
    """`91.0 MB`, `438 MB`, without a break in it."""
    megabytes = size / 1e6
    return f"{megabytes:.1f}\u00a0MB" if megabytes < 100 else f"{megabytes:.0f}\u00a0MB"


def _change(value: Any) -> str:
    return f"{value:.1e}" if is_number(value) else "–"
