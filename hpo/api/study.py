"""A study from Python and from notebooks.

    study = hpo.Study("studies/own_data.yaml")
    study.run(hours=2)
    study.trials_dataframe()

It is the same study as that of the commands: in the same database, and `hpo worker` may join it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from hpo.cli.comparing import prepared
from hpo.cli.options import (
    RUNS,
    existing_database,
    make_runs_folder,
    progress_shown,
    resized,
    trials_done,
)
from hpo.cli.running import run_here
from hpo.compare.looks import run_looks
from hpo.compare.planning import Request
from hpo.config.comparison import Question
from hpo.config.study_config import StudyConfig, load_study
from hpo.config.study_file import problems_of
from hpo.errors import InputError, RunError
from hpo.json_safe import json_safe
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import StudyRecord, TrialRecord, best_trials
from hpo.study.running.stopping import stop_on_signals
from hpo.study.running.supervisor import WorkerProcesses

if TYPE_CHECKING:
    import pandas as pd

    from hpo.study.running.worker import RunSummary


class Study:
    """A study file, or a mapping with its keys, and what its database has of it.

    Args:
        study: a name in `studies/`, the path of a YAML file, or a mapping; paths in a mapping are relative to
            the working folder.
        storage: the URL of the database; None: `HPO_STORAGE`, else `sqlite:///runs/hpo.db`.
        quiet: show no progress.

    Raises:
        InputError: the study is not valid; the message lists every problem.
    """

    def __init__(
        self, study: str | Path | Mapping[str, Any], *, storage: str | None = None, quiet: bool = False
    ) -> None:
        self.config = _study_of(study) if isinstance(study, Mapping) else load_study(study)
        self._storage, self._quiet = storage, quiet

    def run(self, *, n_trials: int | None = None, hours: float | None = None) -> RunSummary:
        """Create or resume the study and run its trials in this process until its budget is used up.

        An interrupt (Ctrl-C, or a notebook's stop) checkpoints the trial in hand and returns; a second one
        ends at once. `ended` of what is returned says how it ended.

        Args:
            n_trials: in place of the study's.
            hours: of device time, a budget in place of a number of trials.

        Raises:
            InputError: data, model or device cannot be used.
            StudyChangedError: the database has another study of this name.
        """
        self.config = resized(self.config, n_trials, hours)
        with progress_shown(quiet=self._quiet):
            return self._run(self.config)[1]

    @property
    def record(self) -> StudyRecord:
        """All that the database has of the study, as of now. Raises StorageError where it has nothing."""
        with existing_database(self._storage) as database:
            return read_study(database, self.config.name)

    def trials_dataframe(self) -> pd.DataFrame:
        """A row for each trial: outcome, precision that was asked for and that ran, speed, memory, values as
        `objective.NAME`, parameters as `param.NAME`; seconds and bytes."""
        from hpo.report.tables import StudyTables

        return StudyTables(self.record).trials.copy()

    def best(self) -> list[TrialRecord]:
        """The best complete trial, or with several objectives the front; [] if none is complete."""
        return best_trials(self.record)

    def compare(self, question: Question = "precisions", **options: Any) -> Mapping[str, Any]:
        """Train the best configurations with new seeds, and judge, as `hpo compare` does; it goes on where it
        was.

        Args:
            question: `precisions`, `base_precision`, `optimizer_state`: is each as good as fp32;
                `configurations`: which of the best is.
            **options: `precisions` (names, fp32 among them), `top`, `seeds`, `max_seeds`, `margin`.

        Returns what `hpo compare --json` prints.

        Raises:
            RunError: it was interrupted; what has ended is kept.
        """

        def run_look(companion: StudyConfig) -> StudyRecord:
            record, summary = self._run(companion)
            if summary.ended != "finished":
                raise RunError(
                    f"The comparison `{companion.name}` was {summary.ended}; call it again to go on."
                )
            return record

        with progress_shown(quiet=self._quiet), existing_database(self._storage) as database:
            record = read_study(database, self.config.name)
            config = self.config.resumed(record.definition)
            companion, data, price, _ = prepared(database, record, config, Request(question, **options))
            result = run_looks(database, companion, record, data.tasks, run_look, price)
        content: Mapping[str, Any] = json_safe(result.content)
        return content

    def _run(self, config: StudyConfig) -> tuple[StudyRecord, RunSummary]:
        """Run the trials of this study, or of its comparison, in this process."""
        make_runs_folder(config.name)
        with stop_on_signals() as stop:
            processes = WorkerProcesses([])
            record, summary, _ = run_here(config, processes, stop, self._storage, quiet=self._quiet)
        return record, summary

    def report(self, folder: Path | None = None) -> Path:
        """Write the page and its tables into a folder (default: `runs/NAME/report`); returns the page."""
        from hpo.report.report import write_report

        return write_report(self.record, folder or RUNS / self.config.name / "report")

    def _repr_html_(self) -> str:
        """In a notebook: how far it is, the best, and its history as a picture."""
        from hpo.report.charts import history
        from hpo.report.picture import svg
        from hpo.report.tables import StudyTables, brief_summary

        record = self.record
        counts = trials_done(record.slots, has_budget=record.definition.get("budget") is not None)
        tables = StudyTables(record)
        summary = brief_summary(tables).to_html(index=False)
        return f"<b>{record.name}</b>: {counts}{summary}{svg(history(tables))}"


def _study_of(content: Mapping[str, Any]) -> StudyConfig:
    folder = Path.cwd()
    try:
        return StudyConfig.model_validate(
            {**content, "path": folder / "study.yaml"}, context={"folder": folder}
        )
    except ValidationError as error:
        raise InputError("\n".join(map(str, problems_of(error, StudyConfig)))) from None
