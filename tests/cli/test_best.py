"""`hpo best`: what it shows, scores and exports."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import sqlalchemy as sa
from command_line import hpo_command, ok, stored
from tiny import write_study

from hpo.config.study_config import load_study
from hpo.data.dataset import load_data
from hpo.errors import StorageError
from hpo.evaluation.detailed import DetailedEvaluation
from hpo.study.schema import detailed_evaluations
from hpo.study.storage import open_storage


def test_best(folder: Path) -> None:
    status = hpo_command(folder, "status", "tiny.yaml", "--json").json
    found = ok(hpo_command(folder, "best", "tiny.yaml", "--json", "--evaluate", "validation")).json
    (best,) = found["trials"]
    assert {key: best[key] for key in ("number", "values", "params")} == status["best"][0]
    assert best["precision"]["observed"]["linear_dtypes"] == {"float32": 17}
    assert found["evaluation"]["split"] == "validation"
    assert found["evaluation"]["metrics"] == best["metrics"], "the checkpoint is the best evaluation's"
    text = ok(hpo_command(folder, "best", "tiny.yaml", "--evaluate", "test")).out
    assert re.search(r"Trial \d on test", text)
    assert re.search(r"criteria +f1_macro +0\.\d+", text)


def metrics_of(document: dict[str, Any]) -> dict[str, dict[str, float]]:
    """{task: {metric: value}} of a detailed evaluation."""
    return {
        task: {metric: of["value"] for metric, of in found["metrics"].items()}
        for task, found in document["tasks"].items()
    }


def test_the_run_has_evaluated_the_best_trial_in_detail(ran: Path) -> None:
    (best,) = ok(hpo_command(ran, "best", "tiny.yaml", "--json")).json["trials"]
    (stored_record,) = (trial for trial in stored(ran).trials if trial.number == best["number"])
    assert best["detailed"]["test"] == stored_record.detailed["test"]
    document = best["detailed"]["test"]
    assert DetailedEvaluation.from_json(document).num_examples == 24
    assert document["decided_on"] == "validation"
    text = ok(hpo_command(ran, "best", "tiny.yaml")).out
    for part in (
        r"^ +test, 24 rows: score -?\d\.\d",
        r"^Trial \d on test: 24 rows",
        r"^criteria: multi label, 24",
    ):
        assert re.search(part, text, re.MULTILINE), part
    narrow = ok(hpo_command(ran, "best", "tiny.yaml", width=60)).out
    rows = [line for line in narrow.splitlines() if re.match(r" +(criteria|evidence|severity|burden) ", line)]
    assert rows
    assert max(map(len, rows)) <= 60


def test_best_stores_what_it_evaluates(folder: Path) -> None:
    before = hpo_command(folder, "best", "tiny.yaml", "--json").json["trials"][0]["detailed"]
    assert list(before) == ["test"]
    found = ok(hpo_command(folder, "best", "tiny.yaml", "--json", "--evaluate", "validation")).json
    (best,), evaluation = found["trials"], found["evaluation"]
    assert metrics_of(evaluation["detailed"]) == evaluation["metrics"] == best["metrics"]
    assert best["detailed"] == before | {"validation": evaluation["detailed"]}
    assert found["warnings"] == ok(hpo_command(folder, "best", "tiny.yaml", "--json")).json["warnings"]
    again = ok(hpo_command(folder, "best", "tiny.yaml", "--json", "--evaluate", "test")).json
    assert again["evaluation"]["detailed"] == before["test"], "as the run has evaluated it"
    text = ok(hpo_command(folder, "best", "tiny.yaml", "--evaluate", "validation")).out
    assert "on validation: 24 rows; thresholds were chosen on validation, so the scores here are" in text


def test_a_finished_study_is_not_evaluated_again(folder: Path) -> None:
    with open_storage(f"sqlite:///{folder}/runs/hpo.db") as storage, storage.engine.begin() as connection:
        connection.execute(sa.delete(detailed_evaluations))
    assert "(finished)" in ok(hpo_command(folder, "run", "tiny.yaml")).out
    assert all(not trial.detailed for trial in stored(folder).trials)


def test_best_of_a_database_that_may_only_be_read(ran: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise StorageError("it must be writable.")

    monkeypatch.setattr("hpo.study.detailed_evaluations.store_detailed_evaluation", refuse)
    finished = ok(hpo_command(ran, "best", "tiny.yaml", "--evaluate", "validation"))
    assert "The evaluation is not stored: it must be writable." in finished.err
    assert re.search(r"Trial \d on validation", finished.out)


def test_an_evaluation_of_a_study_made_anew_meanwhile_is_shown_and_not_stored(
    ran: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpo.study.detailed_evaluations.store_detailed_evaluation", lambda *_: False)
    finished = ok(hpo_command(ran, "best", "tiny.yaml", "--evaluate", "validation"))
    assert "The evaluation is not stored: the study was deleted, or made anew" in finished.err


def test_an_export_is_evaluated_on_test_first_and_that_is_stored(folder: Path) -> None:
    before = hpo_command(folder, "best", "tiny.yaml", "--json").json["trials"][0]["detailed"]["test"]
    with open_storage(f"sqlite:///{folder}/runs/hpo.db") as storage, storage.engine.begin() as connection:
        connection.execute(sa.update(detailed_evaluations).values(document="{}"))
    said = ok(hpo_command(folder, "best", "tiny.yaml", width=200)).out
    assert re.search(r"Warning: The detailed evaluation of trial \d on test is left out: a detailed", said)
    found = ok(hpo_command(folder, "best", "tiny.yaml", "--export", "model", "--json")).json
    assert found["trials"][0]["detailed"] == {"test": before}
    assert not [text for text in found["warnings"] if "left out" in text]
    told = json.loads((folder / "model" / "hpo.json").read_text())["provenance"]
    assert told["evaluations"]["test"]["score"] == before["score"]
    assert hpo_command(folder, "best", "tiny.yaml", "--json").json["trials"] == found["trials"]


def test_predictions_are_those_of_predict_with_the_truth(folder: Path) -> None:
    options = ("--evaluate", "test", "--predictions", "out.jsonl", "--json")
    assert ok(hpo_command(folder, "best", "tiny.yaml", *options)).json["predictions"] == "out.jsonl"
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    texts = "".join(json.dumps({"id": row["id"], "text": row["text"]}) + "\n" for row in rows)
    (folder / "texts.jsonl").write_text(texts)
    ok(hpo_command(folder, "predict", "tiny.yaml", "texts.jsonl", "--output", "predicted.jsonl"))
    predicted = [json.loads(line) for line in (folder / "predicted.jsonl").read_text().splitlines()]
    assert len(rows) == 24
    for row, expected in zip(rows, predicted, strict=True):
        truth = row.pop("truth")
        assert truth["labels"].keys() == {"criteria", "severity", "burden"}
        for spans in truth["spans"].values():
            assert all(0 <= start < end <= len(row["text"]) for start, end in spans)
        assert row["labels"].pop("burden") == pytest.approx(expected["labels"].pop("burden"), abs=1e-5)
        scores, of_predict = row.pop("scores"), expected.pop("scores")
        assert row == expected
        assert scores.keys() == of_predict.keys()
        for task, of_task in scores.items():
            assert of_task == pytest.approx(of_predict[task], abs=1e-6)
    with_truth = load_data(load_study(str(folder / "tiny.yaml")).data).splits["test"]
    assert [row["id"] for row in rows] == [example.id for example in with_truth]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_predictions_as_a_table(folder: Path, suffix: str) -> None:
    out = f"out.{suffix}"
    text = ok(hpo_command(folder, "best", "tiny.yaml", "--evaluate", "test", "--predictions", out)).out
    assert re.search(rf"The predictions of trial \d on test are in {re.escape(out)}\.", text)
    read = pd.read_csv if suffix == "csv" else pd.read_parquet
    table = read(folder / out)
    assert {"truth.severity", "labels.severity", "scores.severity", "truth.evidence"} <= set(table)
    document = hpo_command(folder, "best", "tiny.yaml", "--json").json["trials"][0]["detailed"]["test"]
    accuracy = document["tasks"]["severity"]["metrics"]["accuracy"]["value"]
    assert (table["truth.severity"] == table["labels.severity"]).mean() == pytest.approx(accuracy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--predictions", "out.csv"], "needs a split whose rows are predicted. Give --evaluate SPLIT."),
        (["--predictions", "out.xlsx", "--evaluate", "test"], "must end in .jsonl, .csv, .parquet"),
        (["--predictions", "no/out.csv", "--evaluate", "test"], "is no folder that may be written"),
        (["--predictions", "runs", "--evaluate", "test"], "must end in"),
    ],
)
def test_predictions_that_cannot_be_written(
    ran: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.setattr("hpo.trial.best_model.split_logits", lambda *_: pytest.fail("nothing is computed"))
    before = sorted(ran.iterdir())
    finished = hpo_command(ran, "best", "tiny.yaml", *options)
    assert (finished.exit_code, finished.out) == (2, "")
    assert message in finished.err
    assert finished.err.count("\n") == 1
    assert sorted(ran.iterdir()) == before


def test_best_takes_the_study_from_the_database_where_its_file_is_gone(folder: Path) -> None:
    (folder / "tiny.yaml").unlink()
    found = ok(hpo_command(folder, "best", "tiny", "--json", "--evaluate", "test")).json
    assert found["evaluation"]["metrics"].keys() == {"criteria", "evidence", "severity", "burden"}


def test_best_refuses_a_file_that_has_changed_since(folder: Path) -> None:
    data = {"source": "synthetic", "synthetic": {"num_train": 9, "num_validation": 9, "num_test": 9}}
    write_study(folder, data=data)
    assert hpo_command(folder, "best", "tiny.yaml").exit_code == 0
    refused = hpo_command(folder, "best", "tiny.yaml", "--evaluate", "test")
    assert refused.exit_code == 2
    assert "~ data.synthetic.num_train: 48 -> 9" in refused.err


def test_best_exports_a_model(folder: Path) -> None:
    from transformers import AutoModel

    from hpo.models.export import load_exported

    found = ok(hpo_command(folder, "best", "tiny.yaml", "--export", "model", "--json")).json
    assert found["export"] == "model"
    assert AutoModel.from_pretrained(folder / "model").config.hidden_size == 32
    assert load_exported(folder / "model")
    told = json.loads((folder / "model" / "hpo.json").read_text())["provenance"]
    (best,) = hpo_command(folder, "best", "tiny.yaml", "--json").json["trials"]
    assert told["scores"] == {"validation": best["metrics"], "test": metrics_of(best["detailed"]["test"])}
    accuracy = best["detailed"]["test"]["tasks"]["severity"]["metrics"]["accuracy"]
    assert list(told["intervals"]) == ["test"]
    assert told["intervals"]["test"]["severity"]["accuracy"] == [accuracy["low"], accuracy["high"]]
    assert told["evaluations"] == {
        "test": {
            name: best["detailed"]["test"][name]
            for name in ("score", "num_examples", "level", "num_resamples")
        }
    }
    score = "| test | all tasks | score | {value:.4f} | {low:.4f} to {high:.4f} |"
    card = (folder / "model" / "README.md").read_text()
    assert score.format(**best["detailed"]["test"]["score"]) in card
    assert "95 % intervals: percentile bootstrap of 1,000 resamples over the 24 rows of test." in card
    line = "| test | severity | accuracy | {value:.4f} | {low:.4f} to {high:.4f} |".format(**accuracy)
    assert line in (folder / "model" / "README.md").read_text()


def test_best_pushes_a_model(ran: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("hpo.models.hub.check_push", asked.append)

    def push(folder: Path, repo: str) -> str:
        assert {"hpo.json", "README.md", "model.safetensors"} <= {file.name for file in folder.iterdir()}
        return f"https://huggingface.co/{repo}"

    monkeypatch.setattr("hpo.models.hub.push_folder", push)
    finished = ok(hpo_command(ran, "best", "tiny.yaml", "--push", "ann/complaints"))
    assert re.search(r"Trial \d is at https://huggingface.co/ann/complaints\.", finished.out)
    assert asked == ["ann/complaints"]
    found = ok(hpo_command(ran, "best", "tiny.yaml", "--push", "ann/complaints", "--json")).json
    assert found["pushed"] == "https://huggingface.co/ann/complaints"
    assert "export" not in found


def test_best_without_a_hub(ran: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    finished = hpo_command(ran, "best", "tiny.yaml", "--push", "ann/complaints")
    assert (finished.exit_code, finished.out) == (2, "")
    assert "Error: --push ann/complaints: HF_HUB_OFFLINE forbids asking the hub. Unset it." in finished.err
    assert finished.err.count("\n") == 1


def test_best_says_why_there_is_no_checkpoint(folder: Path) -> None:
    for path in (folder / "runs" / "tiny").glob("checkpoints-*"):
        shutil.rmtree(path)
    finished = hpo_command(folder, "best", "tiny.yaml", "--evaluate", "test")
    assert finished.exit_code == 1
    assert "checkpoint.top_k says how many trials keep theirs" in finished.err


def test_best_without_such_a_split(ran: Path) -> None:
    finished = hpo_command(ran, "best", "tiny.yaml", "--evaluate", "tset", width=200)
    assert (finished.exit_code, finished.out) == (2, ""), "nothing is printed as if all were well"
    assert "'tset' is not one of 'train', 'validation', 'test'" in finished.err


def test_best_with_a_folder_that_cannot_be_made(ran: Path) -> None:
    for folder in ("/dev/null/x", "/dev/null/x/y"):
        finished = hpo_command(ran, "best", "tiny.yaml", "--export", folder)
        assert (finished.exit_code, finished.out) == (2, "")
        message = "an export needs a folder that may be made, but /dev/null is none."
        assert finished.err == f"Error: {folder}: {message}\n"
