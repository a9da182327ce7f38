from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from support.browser import page_that_fits, without_plotly
from support.detailed_documents import (
    class_row,
    document,
    error,
    every_kind,
    nothing_known,
    single_label,
    task_document,
)
from support.study_records import fake_trial, record_of

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


def test_the_first_screen_has_the_score_with_its_interval(tmp_path: Path) -> None:
    text = write(tmp_path, every_kind(), document({}, "validation")).read_text()
    value = "0.712 [0.682,\u00a00.742] (best constant prediction 0.25)"
    card = f"<dt>score on test</dt><dd>{value}</dd>"
    assert card in text.partition(HEADING)[0]
    assert text.count("<dt>score on") == 1
    places = [text.index(f"<h2>{title}") for title in ("Best", HEADING, "Before you draw conclusions")]
    assert places == sorted(places)


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
    pairs = re.findall("<h4>(.*)</h4>", text)
    assert "topic: most frequent confusions" in pairs
    assert "tags: classes true and predicted in the same rows" in pairs


def test_without_an_evaluation_the_command_that_makes_one_is_named(tmp_path: Path) -> None:
    trial = fake_trial(0, "fp32")
    assert HEADING not in write_report(record_of([]), tmp_path).read_text(), "of no best trial"
    path = write_report(record_of([trial]), tmp_path)
    assert "<code>hpo best fake --evaluate validation</code>" in section(path)
    splits = {"train": 9, "validation": 9, "test": 9}
    trial.telemetry["data"] = {"num_cut_examples": 0, "num_lost_spans": {}, "splits": splits}
    path = write_report(record_of([trial]), tmp_path, "my study.yaml")
    assert "<code>hpo best &#39;my study.yaml&#39; --evaluate test</code>" in section(path)


def test_a_study_without_checkpoints_is_not_told_to_evaluate_one(tmp_path: Path) -> None:
    record = record_of([fake_trial(0, "fp32")])
    definition = record.definition | {"checkpoint": {"top_k": 0}}  # as that of a comparison
    text = section(write_report(dataclasses.replace(record, definition=definition), tmp_path))
    assert "--evaluate" not in text
    assert "keeps no checkpoint" in text


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
def test_tasks_of_every_kind_and_150_classes_fit(chromium: Any, tmp_path: Path) -> None:
    long = "word " * 180 + "a-word-without-a-place-to-break-" * 3
    worst = [error(f"row-{at}", long, BANK[0], BANK[1]) for at in range(20)]
    intent = single_label(BANK, worst=worst)
    path = write(tmp_path, document({"intent": intent, **every_kind()["tasks"]}))
    with page_that_fits(chromium, path, width=400, num_plots=9) as page:
        page.evaluate("document.querySelectorAll('details').forEach(fold => fold.open = true)")
        mark = page.locator("mark.missed", has_text="delay").first
        style = mark.evaluate("e => [getComputedStyle(e).borderBottomStyle, e.innerText[0]]")
        assert style == ["dashed", "−"]
        table = page.locator(".tall").first
        shape = table.evaluate("e => [e.clientHeight, e.scrollHeight, e.scrollWidth]")
        assert shape[0] <= 460 < shape[1]
        assert table.locator("tbody tr").count() == 150
        table.evaluate("e => e.scrollTo(0, 2000)")
        header = table.locator("th").first.bounding_box()["y"]
        assert header == pytest.approx(table.bounding_box()["y"], abs=2)
