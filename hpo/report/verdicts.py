"""Results of `hpo compare` as text and tables; the sentences are stored with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text

from hpo.report.formats import (
    MISSING,
    format_cell,
    format_interval,
    format_number,
    format_percent,
)
from hpo.report.terminal import Part, Rows
from hpo.study.reading.study_record import StudyRecord

Comparison = Mapping[str, Any]
"""A stored result of `hpo compare`."""
VERDICT_COLUMNS = [
    *("precision", "metric", "fp32", "baseline", "difference"),
    *("verdict", "runs", "collapsed", "speed"),
]
"""Columns of a table of verdicts. A comparison of stored weights or moments also has `stored`."""


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
    if row["num_collapsed"] is None:
        return MISSING
    return f"{row['num_collapsed']} (≤ {format_percent(row['collapse_share'])})"
