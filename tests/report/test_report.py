import dataclasses
import errno
import html
import re
import shlex
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.browser import without_plotly
from support.command_line import hpo_command, ok
from support.detailed_documents import class_row, document, error, single_label, task_document
from support.study_records import DEFINITION, ENDINGS, fake_record, fake_trial, record_of
from support.tiny import write_study

from hpo.errors import RunError
from hpo.report.detailed import HEADING
from hpo.report.report import write_report
from hpo.report.tables import StudyTables
from hpo.report.verdicts import VERDICT_COLUMNS

HOSTILE = "<script>window.hacked=1</script><img src=x onerror='window.hacked=1'>\"'&`$"
CHARTS = {"history", "precision_metric", "metric_throughput", "learning_curves"}
SEARCH = {"importances", "parallel", *(f"slice_{place}" for place in range(1, 5))}


@pytest.fixture(scope="module")
def full_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(fake_record(), tmp_path_factory.mktemp("report") / "out")


def printed_commands(path: Path) -> list[list[str]]:
    """Return the words of the commands to train a trial again, in a shell."""
    found = re.findall("<pre>(.*?)</pre>", without_plotly(path), re.DOTALL)
    return [shlex.split(html.unescape(re.sub("</?span>", "", text))) for text in found]


def charts_of(text: str) -> set[str]:
    return set(re.findall(r'<div id="(\w+)" class="plotly', text))


def test_a_report_is_one_page_with_its_tables(full_report: Path) -> None:
    assert charts_of(without_plotly(full_report)) == CHARTS | SEARCH
    assert {file.name for file in full_report.parent.iterdir()} == {"report.html", "tables"}
    tables = {file.stem: pd.read_csv(file) for file in (full_report.parent / "tables").glob("*.csv")}
    assert tables.keys() == {"evaluations", "precision", "trials", "verdicts"}
    by_precision = StudyTables(fake_record()).by_precision
    pd.testing.assert_frame_equal(tables["precision"], by_precision, check_dtype=False)
    assert len(tables["trials"]) == 40
    assert [*tables["verdicts"].columns] == VERDICT_COLUMNS


def test_page_begins_with_the_best_trial(full_report: Path) -> None:
    record, text = fake_record(), without_plotly(full_report)
    best = max((trial for trial in record.trials if trial.values), key=lambda trial: trial.values)
    assert "<p>Objective: maximize score. <code>score</code> is the mean" in text
    assert f"<dt>trial</dt><dd>{best.number}</dd>" in text
    assert "<dt>score on" not in text, "nothing was evaluated in detail"
    assert f"learning_rate={best.params['learning_rate']!r}" in printed_commands(full_report)[0]
    assert printed_commands(full_report)[0][:4] == ["hpo", "train", "STUDY.yaml", "--param"]
    assert "requested fp16, ran fp16 (emulated), observed: products of 38 weight" in text
    order = ["Best", "Before you draw conclusions", "The search", "The study", "Tables"]
    assert [title for title in re.findall("<h2>(.*?)</h2>", text) if title in order] == order


def test_page_has_every_outcome_with_its_reason(full_report: Path) -> None:
    text = re.sub("</?code>", "", without_plotly(full_report))
    for number, (outcome, reason) in ENDINGS.items():
        assert re.search(rf"<td>{number}</td><td>\S+</td><td>{outcome}</td>", text)
        assert html.escape(reason[:12].replace("`", "")) in text
    assert "40 trials, 27 complete." in text
    assert "38 of 40 trials ended." in text


def test_table_of_trials_has_skipped_steps_and_parts_in_fp32(tmp_path: Path) -> None:
    trials = [fake_trial(number, precision) for number, precision in enumerate(["fp32", "bf16", "fp16"])]
    plain = without_plotly(write_report(record_of(trials[:2]), tmp_path))
    assert "skipped steps" not in plain
    trials[1].telemetry["fp32_parts"] = {"requested": ["heads"], "resolved": ["heads"]}
    text = without_plotly(write_report(record_of(trials), tmp_path))
    assert "<th>skipped steps</th>" in text
    assert re.search(
        r"<td>2</td><td>complete</td><td>fp16</td><td>fp16</td><td>[\d.]+</td><td>[\d.]+</td><td>3</td>", text
    )
    assert "<td>bf16</td><td>bf16, fp32 in heads</td>" in text


def test_speed_on_a_busy_device_is_marked(tmp_path: Path) -> None:
    trials = [fake_trial(number, "fp32") for number in range(2)]
    for trial in trials:
        trial.telemetry["device_time"] = {"programs": 0.6, "stolen": 0.0, "share": 0.4, "busy": True}
    text = without_plotly(write_report(record_of(trials), tmp_path))
    assert re.search(r"<dt>train examples/s</dt><dd>[\d.]+ <small>\(busy\)</small></dd>", text)
    assert len(re.findall(r"<td>[\d.]+ \(busy\)</td>", text)) == 2


def test_page_loads_nothing_from_outside(full_report: Path) -> None:
    text = without_plotly(full_report)
    assert full_report.stat().st_size < 3e6, "small enough for a message"
    assert not re.findall(r"(?:src|href|action)\s*=\s*[\"']?(?!#)[^\s>]+|url\(|@import", text)
    assert "default-src 'none'" in text


def test_text_of_users_and_trials_is_escaped(tmp_path: Path) -> None:
    spans = [[HOSTILE, 3, 20]], [[HOSTILE, 10, 40], ["b", 2, 5]]
    tasks = {
        HOSTILE: single_label(
            [HOSTILE, "b"], worst=[error(HOSTILE, HOSTILE, HOSTILE, "b")], warnings=[HOSTILE]
        ),
        "phrases": task_document(
            "token_classification",
            {HOSTILE: 0.5},
            classes=[class_row(HOSTILE, 1, 2, 3), class_row("b", 1, 1, 1)],
            worst=[error("1", HOSTILE, *spans)],
        ),
    }
    detailed = {"test": document(tasks, decided_on=HOSTILE)}
    trial = dataclasses.replace(fake_trial(0, "fp32"), detailed=detailed)
    trial.telemetry["device"]["name"] = HOSTILE
    trial.telemetry["metrics"] = {HOSTILE: {HOSTILE: 0.5}}
    trial.telemetry["precision"] |= {"agrees": False, "reason": HOSTILE}
    trial.params["encoder"] = HOSTILE
    failed = dataclasses.replace(fake_trial(1, "fp32", "failed"), reason=HOSTILE)
    failed.params["fp_precision"] = HOSTILE
    failed.telemetry["precision"]["requested"] = HOSTILE
    definition = {**DEFINITION, "training": {HOSTILE: HOSTILE}}
    record = record_of([trial, failed], name=HOSTILE, metric_names=(HOSTILE,), definition=definition)
    text = without_plotly(write_report(record, tmp_path))
    assert f"<h2>{HEADING}" in text
    assert not re.search("<script>window|<img", text)
    assert "&lt;script&gt;window.hacked=1&lt;/script&gt;" in text


@pytest.mark.parametrize(
    ("outcomes", "message", "charts"),
    [
        ([], "There is no trial yet.", set()),
        (["failed", "unsupported"], "No trial is complete. Outcomes: 1 failed, 1 unsupported.", set()),
        (["complete"], "Every trial is complete.", CHARTS),
    ],
    ids=["no trial", "all failed", "one trial"],
)
def test_a_study_with_few_trials_has_a_report(
    outcomes: list[str], message: str, charts: set[str], tmp_path: Path
) -> None:
    record = record_of([fake_trial(number, "fp32", outcome) for number, outcome in enumerate(outcomes)])
    text = without_plotly(write_report(record, tmp_path))
    assert message in text
    assert charts_of(text) == charts


def test_a_full_disk_leaves_the_old_report_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ordinary").write_text("")
    path = write_report(record_of([]), tmp_path)
    assert path.stat().st_mode == (tmp_path / "ordinary").stat().st_mode, "others may read it"
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(RunError, match=r"could not be written to .*: No space left on device"):
        write_report(fake_record(), tmp_path)
    assert path.read_bytes() == before
    assert not [file for file in tmp_path.rglob(".*") if file.is_file()]
    with pytest.raises(RunError, match=r"could not be written to .*ordinary: Not a directory"):
        write_report(record_of([]), tmp_path / "ordinary")


def test_printed_command_repeats_the_trial(tmp_path: Path) -> None:
    """With a choice of null, a list, and a file with another name than the study."""
    space = {
        "fp_precision": {"type": "categorical", "choices": ["fp32"]},
        "max_grad_norm": {"type": "categorical", "choices": [None]},
        "betas": {"type": "categorical", "choices": [[0.9, 0.98]]},
        "gradient_checkpointing": {"type": "categorical", "choices": [False]},
        "learning_rate": {"type": "float", "low": 1e-5, "high": 1e-4},
    }
    training = {"max_steps": 2, "batch_size": 8, "max_length": 64}
    write_study(tmp_path, n_trials=1, search_space=space, training=training).rename(tmp_path / "my file.yaml")
    ok(hpo_command(tmp_path, "run", "my file.yaml", "--json"))
    path = ok(hpo_command(tmp_path, "report", "my file.yaml", "--json")).json["report"]
    (words,) = printed_commands(tmp_path / path)
    assert words[:3] == ["hpo", "train", "my file.yaml"]
    trained = ok(hpo_command(tmp_path, *words[1:], "--json")).json
    stored = ok(hpo_command(tmp_path, "best", "my file.yaml", "--json")).json["trials"][0]
    assert trained["values"] == stored["values"]
