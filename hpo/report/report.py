"""A study as one HTML file that opens offline, and CSV tables with the numbers in base units (seconds,
bytes).

Each file is written under a temporary name and renamed, so a reader never sees half a file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from hpo.errors import RunError
from hpo.memory import collector_paused
from hpo.report.charts import all_charts
from hpo.report.page import report_html
from hpo.report.tables import StudyTables
from hpo.report.verdicts import verdict_table

if TYPE_CHECKING:
    from hpo.study.reading.study_record import StudyRecord


def write_report(record: StudyRecord, out_dir: Path, study_file: str | None = None) -> Path:
    """Write the report into `out_dir`, over an earlier one, and return the HTML file's path.

    `study_file` is the study as `hpo train` takes it. Raises RunError when a file cannot be written.
    """
    tables = StudyTables(record)
    with collector_paused():
        frames = _csv_tables(tables)
        csv = {f"tables/{name}.csv": frame.to_csv(index=False) for name, frame in frames.items()}
        pages = {**csv, "report.html": report_html(tables, all_charts(tables), study_file)}
    try:
        for name, text in pages.items():
            (out_dir / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(out_dir / name, text.encode())
    except OSError as error:
        raise RunError(
            f"the report could not be written to {out_dir}: {error.strerror or error}. "
            "Free some space or name another folder."
        ) from error
    return out_dir / "report.html"


def _csv_tables(tables: StudyTables) -> dict[str, pd.DataFrame]:
    return {
        "precision": tables.by_precision,
        "trials": tables.trials,
        "evaluations": tables.evaluations,
        "verdicts": pd.concat(map(verdict_table, [{}, *tables.record.comparisons.values()])),
    }


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under another name and rename it, so that it is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
