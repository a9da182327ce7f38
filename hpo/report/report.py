"""A study as one HTML file that opens offline, PNG plots and CSV tables.

    <folder>/report.html      everything
    <folder>/figures/*.png    the charts, as far as they can be drawn
    <folder>/tables/*.csv     the numbers behind them, in base units (seconds, bytes)

Each file is written under a temporary name and renamed, so a reader never sees half a file.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from hpo.errors import RunError
from hpo.report.charts import CHART_KEYS, all_charts
from hpo.report.figures import png
from hpo.report.importances import importance_table
from hpo.report.page import report_html
from hpo.report.tables import (
    evaluations_table,
    reasons_table,
    summary_by_precision,
    task_metrics_table,
    trials_table,
)
from hpo.study.study_record import best_trials

if TYPE_CHECKING:
    from hpo.study.study_record import StudyRecord


def write_report(record: StudyRecord, out_dir: Path, study_file: str | None = None) -> Path:
    """Write the report of `record` into `out_dir`, over an earlier one, and return the HTML file's path.

    `study_file` is the study as `hpo train` takes it, for the commands that the report names.
    Raises RunError when a file cannot be written; files of an earlier report are then still whole.
    """
    charts = all_charts(record)
    try:
        for folder in (out_dir, out_dir / "figures", out_dir / "tables"):
            folder.mkdir(parents=True, exist_ok=True)
        for name, table in report_tables(record).items():
            _write(out_dir / "tables" / f"{name}.csv", table.to_csv(index=False).encode())
        drawn = {chart.key for chart in charts if not chart.absent}
        for chart in charts:
            if chart.key in drawn:
                _write(out_dir / "figures" / f"{chart.key}.png", png(chart))
        for old in (out_dir / "figures").glob("*.png"):
            if old.stem not in drawn and old.stem.rstrip("_0123456789") in CHART_KEYS:
                old.unlink()
        path = out_dir / "report.html"
        _write(path, report_html(record, charts, study_file).encode())
    except OSError as error:
        raise RunError(
            f"the report could not be written to {out_dir}: {error.strerror or error}. "
            "Free some space or name another folder."
        ) from error
    return path


def report_tables(record: StudyRecord) -> dict[str, pd.DataFrame]:
    """The report's CSV tables by file name (without `.csv`)."""
    best = best_trials(record)
    metrics = [task_metrics_table(trial).assign(number=trial.number) for trial in best]
    nothing = pd.DataFrame(columns=["task", "metric", "value", "number"])
    return {
        "precision": summary_by_precision(record),
        "trials": trials_table(record),
        "evaluations": evaluations_table(record),
        "best_task_metrics": pd.concat(metrics) if metrics else nothing,
        "importances": importance_table(record),
        "not_complete": reasons_table(record),
    }


def _write(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)  # mkstemp makes files that nobody else may read
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
