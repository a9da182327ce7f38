"""Results of `hpo compare` and `hpo deploy` as text and tables; the sentences are stored with them."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text

from hpo.report.formats import (
    MISSING,
    format_cell,
    format_interval,
    format_number,
    plural,
)
from hpo.report.terminal import Part, Rows
from hpo.study.reading.study_record import StudyRecord

Comparison = Mapping[str, Any]  # A stored result of `hpo compare`
VERDICT_COLUMNS = [
    *("precision", "metric", "fp32", "baseline", "difference"),
    *("verdict", "runs", "collapsed", "speed"),
]
"""Columns of a table of verdicts. A comparison of stored weights or moments also has `stored`."""

_COMPUTES_LOWER = ("bf16", "fp16")  # forms with weights in fp32
Stored = Mapping[str, Any]


def recommendations(record: StudyRecord) -> list[str]:
    return [
        f"{comparison['recommendation']}{'' if comparison['has_ended'] else ' (the comparison goes on)'}"
        for comparison in record.comparisons.values()
    ]


def details(comparison: Comparison) -> list[str]:
    """Return the verdict on each precision with its evidence, then the collapsed runs."""
    verdicts = [row["sentence"] for row in comparison.get("verdicts", ())]
    collapsed = [f"Collapsed: {sentence}" for sentence in comparison.get("collapsed", ())]
    return [*verdicts, comparison["error"], *collapsed]


def comparison_parts(result: Comparison) -> Iterator[Part]:
    for table in comparison_tables(result):
        yield result["study"], table
    yield from details(result)
    yield Text(result["recommendation"], style="bold")


def comparison_tables(comparison: Comparison) -> list[Rows]:
    return [table for table in (verdict_table(comparison), configuration_table(comparison)) if table]


def verdict_table(comparison: Comparison) -> Rows:
    """A row for each precision in the metric that decides, then one for each task's own metric."""
    rows = []
    verdicts = comparison.get("verdicts", ())
    has_stored = any(row.get("stored_ratio") is not None for row in verdicts)
    for row in verdicts:
        facts = {
            "verdict": row["verdict"].replace("_", " "),
            "runs": str(row["num_runs"]),
            "collapsed": _collapsed(row),
            "speed": _ratio(row, "speed_ratio"),
            **({"stored": _ratio(row, "stored_ratio")} if has_stored else {}),
        }
        for metric, numbers in {row["metric"]: row, **row["tasks"]}.items():
            cells = {"precision": row["name"], "metric": metric}
            cells |= {name: format_number(numbers[name]) for name in ("fp32", "baseline")}
            difference = format_interval(numbers["difference"], numbers["low"], numbers["high"], "+")
            rows.append(
                {
                    **cells,
                    "difference": difference,
                    **(facts if metric == row["metric"] else dict.fromkeys(facts, "")),
                }
            )
    return rows


def configuration_table(comparison: Comparison) -> Rows:
    rows = comparison.get("configurations", ())
    names = list(dict.fromkeys(name for row in rows for name in row["params"]))
    if len(rows) > 1:
        names = [name for name in names if len({repr(row["params"].get(name)) for row in rows}) > 1]
    return [
        {
            "trial": str(row["trial"]),
            **({"precision": row["precision"]} if "precision" in row else {}),
            **{name: format_cell(row["params"].get(name)) for name in names},
            **(_scores(comparison, row) if "mean" in row else {}),
        }
        for row in rows
    ]


def _scores(comparison: Comparison, row: Comparison) -> dict[str, str]:
    seen = " (seen before)" if comparison["test_seen"] else ""
    failed = f", {row['num_failed']} without a score" if row["num_failed"] else ""
    return {
        f"{comparison['metric']} in the search": format_number(row["search"]),
        f"new seeds, {comparison['split']}{seen}": format_interval(row["mean"], row["low"], row["high"]),
        "runs": f"{row['num_runs']}{failed}",
    }


def _ratio(row: Comparison, name: str) -> str:
    return format_interval(row.get(name), row.get(f"{name}_low"), row.get(f"{name}_high"))


def _collapsed(row: Comparison) -> str:
    return MISSING if row["num_collapsed"] is None else str(row["num_collapsed"])


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
