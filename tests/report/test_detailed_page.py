from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from browser import page_that_fits, without_plotly
from detailed_documents import (
    calibration,
    class_row,
    document,
    error,
    every_kind,
    nothing_known,
    single_label,
    task_document,
)
from study_records import fake_trial, record_of, with_values

from hpo.report.detailed_page import HEADING
from hpo.report.report import write_report

HOSTILE = "<script>window.hacked=1</script><img src=x onerror='window.hacked=1'>\"'&`$"
BANK = [f"intent {at:03d} of the customers of a bank" for at in range(150)]


def write(folder: Path, *documents: dict[str, Any]) -> Path:
    """The report of a study whose best trial, number 6, has these detailed evaluations."""
    by_split = {one["split"]: one for one in documents}
    return write_report(record_of([dataclasses.replace(fake_trial(6, "fp32"), detailed=by_split)]), folder)


def section(path: Path) -> str:
    """What the report says between its heading and the next section."""
    text = without_plotly(path)
    return text[text.index(f"<h2>{HEADING}") : text.index("<h2>Before you draw")]


def hostile() -> dict[str, Any]:
    topic = single_label([HOSTILE, "b"], worst=[error(HOSTILE, HOSTILE, HOSTILE, "b")], warnings=[HOSTILE])
    spans = [[HOSTILE, 3, 20]], [[HOSTILE, 10, 40], ["b", 2, 5]]
    phrases = task_document(
        "token_classification",
        {HOSTILE: 0.5},
        classes=[class_row(HOSTILE, 1, 2, 3), class_row("b", 1, 1, 1)],
        worst=[error("1", HOSTILE, *spans)],
    )
    return document({HOSTILE: topic, "phrases": phrases}, decided_on=HOSTILE)


def test_the_section_stands_after_the_best_and_before_the_caveats(tmp_path: Path) -> None:
    text = write(tmp_path, every_kind()).read_text()
    places = [text.index(f"<h2>{title}") for title in ("Best", HEADING, "Before you draw conclusions")]
    assert places == sorted(places)


def test_the_first_screen_has_the_score_with_its_interval(tmp_path: Path) -> None:
    text = write(tmp_path, every_kind(), document({}, "validation")).read_text()
    card = "<dt>score on test</dt><dd>0.712 [0.682,\u00a00.742]</dd>"
    assert card in text.partition(HEADING)[0]
    assert text.count("<dt>score on") == 1


def test_the_section_says_what_is_stored(tmp_path: Path) -> None:
    text = section(write(tmp_path, every_kind()))
    assert "<h3>Trial 6 on test: 500 rows</h3>" in text
    assert re.findall("<summary>(.*?)</summary>", text)[1:] == [
        f"{name} ({of['kind']})" for name, of in every_kind()["tasks"].items()
    ]
    assert "1\u202f000 resamples" in text
    assert "Thresholds were chosen on validation." in text
    assert (
        "<li>tags: The class <code>rude</code> is true in 12 rows of test and never predicted.</li>" in text
    )
    assert text.index("never predicted") < text.index("<table>"), "warnings are on top"
    assert "<td>0.712\u00a0[0.682,\u00a00.742]</td>" in text
    assert "480 rows have the truth. Threshold 0.41. 4 classes, the most frequent first." in text
    assert "1 true, 1 predicted, 0 of them the same spans" in text
    assert "· true 1, predicted 4.27" in text
    assert '<mark class="missed"><b>−delay</b>came</mark>' in text.replace("came ", "came")
    assert text.count("several spans, each with its sign") == 2
    assert "and 3 wrong spans outside this excerpt" in text
    assert '<mark class="mixed"><b>− +</b>' in text, "an answer that is right in part is wrong"
    charts = set(re.findall(r'<div id="([a-z_0-9]+)" class="plotly', text))
    assert {
        "intervals_test_trial_6",
        "confusion_test_trial_6_task_1",
        "classes_test_trial_6_task_3",
    } <= charts


def test_splits_and_trials_have_a_part_each(tmp_path: Path) -> None:
    trials = [
        dataclasses.replace(
            with_values(at, values), detailed={s: document({}, s) for s in ("validation", "test")}
        )
        for at, values in enumerate([(0.5, 1.0), (0.6, 2.0)])
    ]
    objectives = {"metric_names": ("score", "seconds"), "directions": ("maximize", "minimize")}
    text = section(write_report(record_of(trials, **objectives), tmp_path))
    assert text.count("Thresholds were chosen on validation, so the scores here are flattering.") == 2
    titles = re.findall("<h3>(.*?): 500 rows</h3>", text)
    assert titles == [f"Trial {at} on {split}" for at in (1, 0) for split in ("test", "validation")]


@pytest.mark.parametrize(
    ("study_file", "said"), [(None, "fake"), ("my study.yaml", "&#39;my study.yaml&#39;")]
)
def test_without_an_evaluation_the_command_that_makes_one_is_named(
    study_file: str | None, said: str, tmp_path: Path
) -> None:
    trial = fake_trial(0, "fp32")
    path = write_report(record_of([trial]), tmp_path, study_file)
    assert f"<code>hpo best {said} --evaluate validation</code>" in section(path)
    splits = {"train": 9, "validation": 9, "test": 9}
    trial.telemetry["data"] = {"num_cut_examples": 0, "num_lost_spans": {}, "splits": splits}
    path = write_report(record_of([trial]), tmp_path, study_file)
    assert f"<code>hpo best {said} --evaluate test</code>" in section(path)


def test_a_study_without_checkpoints_is_not_told_to_evaluate_one(tmp_path: Path) -> None:
    record = record_of([fake_trial(0, "fp32")])
    definition = record.definition | {"checkpoint": {"top_k": 0}}  # as that of a comparison
    text = section(write_report(dataclasses.replace(record, definition=definition), tmp_path))
    assert "--evaluate" not in text
    assert "keeps no checkpoint" in text


def test_without_a_best_trial_there_is_no_section(tmp_path: Path) -> None:
    assert HEADING not in write_report(record_of([]), tmp_path).read_text()


def test_regression_alone(tmp_path: Path) -> None:
    stars = every_kind()["tasks"]["stars"]
    text = section(write(tmp_path, document({"stars": stars})))
    assert "stars (regression)" in text
    assert "<mark" not in text
    assert re.findall(r'<div id="([a-z_0-9]+)" class="plotly', text) == ["intervals_test_trial_6"]


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    text = section(write(tmp_path, nothing_known()))
    assert "0 rows have the truth. 2 classes" in text
    assert "· true –, predicted –" in text
    assert "None" not in text
    assert "resamples" not in text


def test_hostile_text_is_escaped(tmp_path: Path) -> None:
    text = section(write(tmp_path, hostile()))
    assert not re.search("<script>window|<img src=x", text)
    assert "&lt;script&gt;window.hacked=1&lt;/script&gt;" in text


@pytest.mark.browser
@pytest.mark.parametrize("width", [1200, 400])
def test_a_section_of_every_kind_fits(width: int, chromium: Any, tmp_path: Path) -> None:
    with page_that_fits(chromium, write(tmp_path, every_kind()), width, num_plots=9) as page:
        page.evaluate("document.querySelectorAll('details').forEach(fold => fold.open = true)")
        mark = page.locator("mark.missed").first
        style = mark.evaluate("e => [getComputedStyle(e).borderBottomStyle, e.innerText[0]]")
        assert style == ["dashed", "−"]


@pytest.mark.browser
@pytest.mark.parametrize("width", [1200, 400])
def test_150_classes_scroll_in_their_table(width: int, chromium: Any, tmp_path: Path) -> None:
    long = "word " * 180 + "a-word-without-a-place-to-break-" * 3
    worst = [error(f"row-{at}", long, BANK[0], BANK[1]) for at in range(20)]
    tasks = {"intent": single_label(BANK, worst=worst, calibration=calibration(3))}
    with page_that_fits(chromium, write(tmp_path, document(tasks)), width, num_plots=4) as page:
        page.evaluate("document.querySelectorAll('details').forEach(fold => fold.open = true)")
        shape = page.locator(".tall").first.evaluate("e => [e.clientHeight, e.scrollHeight, e.scrollWidth]")
        assert shape[0] <= 460 < shape[1]
        assert page.locator(".tall tbody tr").count() == 150
        page.locator(".tall").first.evaluate("e => e.scrollTo(0, 2000)")
        header = page.locator(".tall th").first.bounding_box()["y"]
        assert header == pytest.approx(page.locator(".tall").first.bounding_box()["y"], abs=2)
