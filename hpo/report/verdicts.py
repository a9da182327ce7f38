"""The results of `hpo compare` as tables and charts; the sentences are stored with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.text import Text

from hpo.json_safe import is_number
from hpo.report.figures import OTHER_STYLE, PRECISION_STYLES, TEXT_COLOR, Chart, Series, interval_line
from hpo.report.formats import format_cell, format_interval, format_number
from hpo.report.tables import StudyTables
from hpo.study.reading.study_record import StudyRecord

if TYPE_CHECKING:
    from hpo.report.terminal import Part

MARGIN_COLOR = "#6B6B6B"

_OF_METRIC = ("precision", "metric", "fp32", "baseline", "difference")
_OF_PRECISION = ("verdict", "runs", "collapsed", "speed", "stored")

Comparison = Mapping[str, Any]
"""The result of a comparison, as it is stored."""


def sentences(tables: StudyTables) -> list[str]:
    return [
        f"{comparison['recommendation']}{'' if comparison['has_ended'] else ' (the comparison goes on)'}"
        for comparison in tables.record.comparisons.values()
    ]


def details(comparison: Comparison) -> list[str]:
    """The verdict on each precision with its evidence, then the collapsed runs."""
    verdicts = [row["sentence"] for row in comparison.get("verdicts", ())]
    collapsed = [f"Collapsed: {sentence}" for sentence in comparison.get("collapsed", ())]
    return [*verdicts, comparison["error"], *collapsed]


def shown(result: Comparison) -> Iterator[Part]:
    """The result of `hpo compare`, and the recommendation."""
    for table in comparison_tables(result):
        yield result["study"], table
    yield from details(result)
    yield Text(result["recommendation"], style="bold")


def chosen_on_test(record: StudyRecord) -> list[str]:
    """A sentence where `hpo compare` has chosen between precisions on the test split."""
    asked = [
        row["name"]
        for comparison in record.comparisons.values()
        for row in comparison.get("verdicts", ())
        if comparison.get("split") == "test" and row["num_runs"]
    ]
    if not asked:
        return []
    used = f"The test split has been used to choose between fp32 and {', '.join(asked)} (`hpo compare`)"
    return [f"{used}: a score on test of what was chosen is a little too good."]


def comparison_tables(comparison: Comparison) -> list[pd.DataFrame]:
    made = (verdict_table(comparison), configuration_table(comparison))
    return [table for table in made if not table.empty]


def verdict_table(comparison: Comparison) -> pd.DataFrame:
    """A row for each precision of the metric that decides, then one for each task's own metric."""
    rows = []
    for row in comparison.get("verdicts", ()):
        of_precision = {
            "verdict": row["verdict"].replace("_", " "),
            "runs": str(row["num_runs"]),
            "collapsed": _collapsed(row),
            **{name: _ratio(row, f"{name}_ratio") for name in ("speed", "stored")},
        }
        for metric, of_metric in {row["metric"]: row, **row["tasks"]}.items():
            numbers = (format_number(of_metric[name]) for name in ("fp32", "baseline"))
            cells = (row["name"], metric, *numbers, format_interval(*_bounds(of_metric), sign="+"))
            decides = metric == row["metric"]
            shown = of_precision if decides else dict.fromkeys(_OF_PRECISION, "")
            rows.append(dict(zip(_OF_METRIC, cells, strict=True)) | shown)
    table = pd.DataFrame(rows, columns=[*_OF_METRIC, *_OF_PRECISION])
    return table if table["stored"].str.contains(r"\d").any() else table.drop(columns="stored")


def configuration_table(comparison: Comparison) -> pd.DataFrame:
    """A row for each configuration with its trial and the settings that differ; of one, all settings."""
    rows = comparison.get("configurations", ())
    names = list(dict.fromkeys(name for row in rows for name in row["params"]))
    if len(rows) > 1:
        names = [name for name in names if len({repr(row["params"].get(name)) for row in rows}) > 1]
    return pd.DataFrame(
        {
            "trial": str(row["trial"]),
            **({"precision": row["precision"]} if "precision" in row else {}),
            **{name: format_cell(row["params"].get(name)) for name in names},
            **(_scores(comparison, row) if "mean" in row else {}),
        }
        for row in rows
    )


def _scores(comparison: Comparison, row: Comparison) -> dict[str, str]:
    """The scores of one configuration in the search and on new seeds."""
    seen = " (seen before)" if comparison["test_seen"] else ""
    return {
        f"{comparison['metric']} in the search": format_number(row["search"]),
        f"new seeds, {comparison['split']}{seen}": format_interval(row["mean"], row["low"], row["high"]),
        "runs": f"{row['num_runs']}{f', {failed} without a score' if (failed := row['num_failed']) else ''}",
    }


def forests(tables: StudyTables) -> list[Chart]:
    compared = tables.record.comparisons.items()
    return [forest(question, comparison) for question, comparison in compared if comparison.get("verdicts")]


def forest(question: str, comparison: Comparison) -> Chart:
    """The difference of each precision to fp32 with its interval, in the metric that decides."""
    key, title = "verdicts", "Difference to fp32 on new seeds"
    if question != "precisions":
        key, title = f"{key}_{question}", f"{title}: {question.replace('_', ' ')}"
    rows = list(comparison["verdicts"])[::-1]
    margin = comparison["margin"]
    ends = [-0.6, len(rows) - 0.4]
    series = [
        Series("no difference", MARGIN_COLOR, [0.0, 0.0], ends, "line"),
        Series("margin", MARGIN_COLOR, [-margin, -margin], ends, "line", dashed=True),
    ]
    known = [row for row in rows if is_number(row["low"])]
    extent = [0.0, -margin, *(row[end] for row in known for end in ("low", "high"))]
    for position, row in enumerate(rows):
        if row not in known:
            middle = (min(extent) + max(extent)) / 2
            text = row["reason"] or "too few runs for an interval"
            series.append(Series(text, TEXT_COLOR, [middle], [position], "text", in_legend=False))
            continue
        color, markers = PRECISION_STYLES.get(row["precision"], OTHER_STYLE)
        text = f"{row['name']}: {format_interval(*_bounds(row), sign='+')} {row['unit']}"
        place = [position, position]
        series.append(interval_line(row["precision"], color, [row["low"], row["high"]], place))
        point = [row["difference"]], [position]
        series.append(Series(row["precision"], color, *point, markers=markers, hover=[text], in_legend=False))
    return Chart(
        key,
        title,
        x_label=f"{rows[0]['unit']} of {rows[0]['metric']}",
        series=series,
        y_ticks=[row["name"] for row in rows],
        caption=(
            "Each end of an interval errs in at most 2.5 % of comparisons, at whichever look they stop. As "
            f"good: right of the margin of {margin:g}; worse: left of it."
        ),
        height=170 + 34 * len(rows),
    )


def _bounds(row: Comparison) -> tuple[Any, Any, Any]:
    return row["difference"], row["low"], row["high"]


def _ratio(row: Comparison, name: str) -> str:
    return format_interval(row.get(name), row.get(f"{name}_low"), row.get(f"{name}_high"))


def _collapsed(row: Comparison) -> str:
    if row["num_collapsed"] is None:
        return "–"
    return f"{row['num_collapsed']} (≤ {100 * row['collapse_share']:.0f} %)"
