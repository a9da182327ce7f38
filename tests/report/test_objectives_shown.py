"""Each screen names the study's objectives, and says once what `score` is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from support.browser import without_plotly
from support.detailed_documents import every_kind
from support.study_records import DEFINITION, fake_trial, record_of
from support.tiny import tiny_study

from hpo.report import progress, screens
from hpo.report.dashboard import study_note
from hpo.report.detailed import Detailed, headline
from hpo.report.formats import SCORE
from hpo.report.report import write_report
from hpo.report.status import study_status
from hpo.report.tables import StudyTables
from hpo.study.reading.study_record import StudyRecord

TASK = "tags/f1_micro"


def record(*metrics: str) -> StudyRecord:
    """A study of these objectives, whose best trial is evaluated on test."""
    values = tuple(0.5 + index for index in range(len(metrics)))
    trial = dataclasses.replace(fake_trial(3, "fp32"), values=values, detailed={"test": every_kind()})
    return record_of([trial], metric_names=metrics, directions=("maximize",) * len(metrics))


def text_of(parts: object) -> str:
    return "\n".join(str(part) for part in parts).replace("\u00a0", " ")  # type: ignore[attr-defined]


SCREENS: dict[str, Callable[[StudyRecord, Path], str]] = {
    "summary": lambda record, _: text_of(screens.summary(record)),
    "best": lambda record, _: text_of(screens.best_model(record, None, None)),
    "status": lambda record, _: text_of(screens.status(record, study_status(record))),
    "dashboard": lambda record, _: study_note(StudyTables(record)).replace("\\_", "_"),
    "page": lambda record, folder: without_plotly(write_report(record, folder)),
}


@pytest.mark.parametrize("screen", SCREENS)
def test_a_screen_explains_the_score_once(screen: str, tmp_path: Path) -> None:
    show = SCREENS[screen]
    assert show(record("score", "peak_memory_bytes"), tmp_path).count(SCORE) == 1
    assert SCORE not in show(record(TASK), tmp_path)


def test_the_score_of_own_code_is_not_explained() -> None:
    own = {**DEFINITION, "code": {"own_loop.py": "0" * 64}, "data": {"source": "none"}}
    assert SCORE not in text_of(screens.best(dataclasses.replace(record("score"), definition=own)))


def test_a_headline_has_the_objectives_with_their_intervals() -> None:
    one = Detailed(3, "test", every_kind())
    assert headline(one, ["score"]).startswith("test, 500 rows: score ")
    assert headline(one, [TASK]).startswith(f"test, 500 rows: {TASK} ")
    shown = headline(one, ["score", "peak_memory_bytes", TASK])
    assert (shown.count("score"), shown.count(TASK), shown.count("[")) == (1, 1, 2)
    assert "score" in headline(one, ["peak_memory_bytes"]), "costs say nothing about quality"


@pytest.mark.parametrize("screen", SCREENS)
def test_the_evaluation_on_test_is_that_of_the_objective(screen: str, tmp_path: Path) -> None:
    shown = SCREENS[screen](record(TASK), tmp_path)
    if screen == "page":
        assert f"<dt>{TASK} on test</dt>" in shown
        assert "score on test" not in shown
    else:
        assert f"test, 500 rows: {TASK}" in shown
        assert "500 rows: score" not in shown


def test_lines_of_a_run_name_each_value(tmp_path: Path) -> None:
    goals = [{"metric": "criteria/f1_micro"}, {"metric": "peak_memory_bytes", "direction": "minimize"}]
    display = progress.StudyDisplay(tiny_study(tmp_path, objective=goals))
    assert display.values([0.5, 2**30]) == "criteria/f1_micro 0.5, peak_memory_bytes 1 GiB"
