"""Summary of a study: the end of `hpo run` and the dashboard's note."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from hpo.report.screens import best
from hpo.report.status import record_warnings
from hpo.report.tables import StudyTables, precision_table
from hpo.report.terminal import Part, warning
from hpo.study.reading.study_record import StudyRecord, complete_trials


def summary(record: StudyRecord) -> Iterator[Part]:
    """Show the table by precision, the best configuration, warnings and the next commands."""
    if any(trial.ended for trial in record.trials):
        yield f"{record.name}: by requested precision", precision_table(StudyTables(record))
    yield from best(record)
    yield from map(warning, record_warnings(record))
    if complete_trials(record):
        hints = "   ".join(f"hpo {command} {record.name}" for command in ("report", "dashboard", "best"))
        yield Text(f"More about it: {hints}", style="dim")
