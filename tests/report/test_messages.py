"""Sentences about a study, and the screens with them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.browser import without_plotly
from support.detailed_documents import every_kind
from support.study_records import fake_trial, record_of

from hpo.report import best_screens, screens
from hpo.report.best_screens import summary
from hpo.report.dashboard import study_note
from hpo.report.report import write_report
from hpo.report.status import SCORE, study_status
from hpo.report.tables import StudyTables
from hpo.study.reading.study_record import StudyRecord


def record(*metrics: str) -> StudyRecord:
    """Record of a study with these objectives and a best trial evaluated on test."""
    values = tuple(0.5 + index for index in range(len(metrics)))
    trial = dataclasses.replace(fake_trial(3, "fp32"), values=values, detailed={"test": every_kind()})
    return record_of([trial], metric_names=metrics, directions=("maximize",) * len(metrics))


def text_of(parts: Any) -> str:
    return "\n".join(map(str, parts)).replace("\u00a0", " ")


SCREENS: dict[str, Callable[[StudyRecord, Path], str]] = {
    "summary": lambda record, _: text_of(summary(record)),
    "best": lambda record, _: text_of(best_screens.best_model(record, None, None)),
    "status": lambda record, _: text_of(screens.status(record, study_status(record))),
    "dashboard": lambda record, _: study_note(StudyTables(record)).replace("\\_", "_"),
    "page": lambda record, folder: without_plotly(write_report(record, folder)),
}


@pytest.mark.parametrize("screen", SCREENS)
def test_every_screen_names_the_objective_and_explains_the_score_once(screen: str, tmp_path: Path) -> None:
    assert SCREENS[screen](record("score", "peak_memory_bytes"), tmp_path).count(SCORE) == 1
    shown = SCREENS[screen](record("tags/f1_micro"), tmp_path)
    assert SCORE not in shown
    named = "<dt>tags/f1_micro on test</dt>" if screen == "page" else "test, 500 rows: tags/f1_micro 0.610"
    assert named in shown.replace("\u00a0", " ")
