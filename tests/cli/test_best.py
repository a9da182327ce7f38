from __future__ import annotations

import itertools
import json
import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support import own_code_studies
from support.command_line import finish, hpo_command, ok, refused, start_hpo, stored
from support.tiny import write_study

from hpo.errors import StorageError
from hpo.evaluation.detailed import DetailedEvaluation


def metrics_of(document: dict[str, Any]) -> dict[str, dict[str, float]]:
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
        r"^ +test, 24 rows: score -?\d\.\d.* \(best constant prediction 0\.\d",
        r"^best trial \d: score \S+ \(best constant prediction 0\.\d",
        r"^Trial \d on validation, measured by the search",
        r"^ +task +metric +value +best constant",
        r"^Trial \d on test: 24 rows",
        r"^ +criteria +f1_macro +0\.\d+",
    ):
        assert re.search(part, text, re.MULTILINE), part


def test_best_stores_what_it_evaluates(folder: Path) -> None:
    status = hpo_command(folder, "status", "tiny.yaml", "--json").json
    before = hpo_command(folder, "best", "tiny.yaml", "--json").json["trials"][0]["detailed"]
    assert list(before) == ["test"]
    found = ok(hpo_command(folder, "best", "tiny.yaml", "--json", "--evaluate", "validation")).json
    (best,), evaluation = found["trials"], found["evaluation"]
    assert {key: best[key] for key in ("number", "values", "params")} == status["best"][0]
    assert best["precision"]["observed"]["linear_products"] == {"float32": 17}
    assert evaluation["split"] == "validation"
    assert metrics_of(evaluation["detailed"]) == evaluation["metrics"] == best["metrics"]
    assert best["detailed"] == before | {"validation": evaluation["detailed"]}
    assert best["baseline"] == evaluation["detailed"]["baseline"]
    assert {"score", "criteria/f1_macro", "severity/accuracy", "burden/r2"} <= best["baseline"].keys()
    assert before["test"]["baseline"].keys() == best["baseline"].keys()
    again = ok(hpo_command(folder, "best", "tiny.yaml", "--json", "--evaluate", "test")).json
    assert again["evaluation"]["detailed"] == before["test"], "as the run has evaluated it"
    text = ok(hpo_command(folder, "best", "tiny.yaml", "--evaluate", "validation")).out
    assert "measured by the search" not in text
    assert "on validation: 24 rows; thresholds were chosen on validation, so the scores here are" in text


def test_an_evaluation_that_cannot_be_stored_is_shown(ran: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Mock(side_effect=StorageError("it must be writable."))
    monkeypatch.setattr("hpo.api.models.store_detailed_evaluation", store)
    finished = ok(hpo_command(ran, "best", "tiny.yaml", "--evaluate", "validation"))
    assert "The evaluation is not stored: it must be writable." in finished.err
    assert re.search(r"Trial \d on validation", finished.out)


def test_best_takes_the_study_from_the_database_where_its_file_is_gone(folder: Path) -> None:
    (folder / "tiny.yaml").unlink()
    found = ok(hpo_command(folder, "best", "tiny", "--json", "--evaluate", "test")).json
    assert found["evaluation"]["metrics"].keys() == {"criteria", "evidence", "severity", "burden"}


def test_best_refuses_a_changed_file(folder: Path) -> None:
    data = {"source": "synthetic", "synthetic": {"num_train": 9, "num_validation": 9, "num_test": 9}}
    write_study(folder, data=data)
    assert hpo_command(folder, "best", "tiny.yaml").exit_code == 0
    message = "~ data.synthetic.num_train: 48 -> 9"
    refused(hpo_command(folder, "best", "tiny.yaml", "--evaluate", "test"), message)


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


@pytest.mark.parametrize("provenance", ['{"study": "other"}', "torn"])
def test_an_export_over_a_model_of_another_study_is_refused(folder: Path, provenance: str) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "hpo.json").write_text(f'{{"provenance": {provenance}}}')
    message = "Name another folder, or remove that one."
    refused(hpo_command(folder, "best", "tiny.yaml", "--export", "model"), message)
    shutil.rmtree(folder / "model")
    for _ in range(2):  # the second export replaces the first one, which is this study's own
        ok(hpo_command(folder, "best", "tiny.yaml", "--export", "model"))
    assert json.loads((folder / "model" / "hpo.json").read_text())["provenance"]["study"] == "tiny"


def test_best_says_why_there_is_no_checkpoint(folder: Path) -> None:
    for path in (folder / "runs" / "tiny").glob("checkpoints-*"):
        shutil.rmtree(path)
    finished = hpo_command(folder, "best", "tiny.yaml", "--evaluate", "test")
    assert finished.exit_code == 1
    assert "checkpoint.top_k says how many trials keep theirs" in finished.err


def full_disk_from(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are not written from the call of that number on."""
    from hpo.training import checkpoint

    calls, write = itertools.count(1), checkpoint.save_file

    def save_file(*args: Any, **options: Any) -> None:
        if next(calls) >= call:
            raise OSError(28, "No space left on device")
        write(*args, **options)

    monkeypatch.setattr(checkpoint, "save_file", save_file)


def test_weights_that_a_full_disk_did_not_take_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_study(tmp_path, n_trials=1)
    full_disk_from(1, monkeypatch)
    lost = r"Warning: The best weights of trial 0 were not kept: .*No space left on device\. Free some space"
    for command in ("run", "status", "best"):
        assert re.search(lost, ok(hpo_command(tmp_path, command, "tiny.yaml", width=1000)).out), command
    for command in ("status", "best"):
        warnings = ok(hpo_command(tmp_path, command, "tiny.yaml", "--json")).json["warnings"]
        assert any(re.search(lost, f"Warning: {text}") for text in warnings), command
    assert hpo_command(tmp_path, "best", "tiny.yaml", "--export", "model").exit_code == 1


def test_an_export_of_older_weights_has_their_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the best evaluation they could not be written any more."""
    write_study(tmp_path, n_trials=1, evaluation={"per_trial": 2})
    monkeypatch.setattr("hpo.trial.base_run.is_better", lambda *_: True)
    full_disk_from(2, monkeypatch)
    assert "The best weights of trial 0 were not kept" in ok(hpo_command(tmp_path, "run", "tiny.yaml")).out
    ok(hpo_command(tmp_path, "best", "tiny.yaml", "--export", "model"))
    told = json.loads((tmp_path / "model" / "hpo.json").read_text())["provenance"]["scores"]["validation"]
    (trial,) = stored(tmp_path).trials
    older, best = (evaluation.metrics for evaluation in trial.evaluations)
    assert told == {task: older[task] for task in told} != {task: best[task] for task in told}


# Trained again


def test_the_best_trial_is_reproduced(folder: Path) -> None:
    before, files = stored(folder), set((folder / "runs" / "tiny").rglob("*"))
    found = ok(hpo_command(folder, "best", "tiny.yaml", "--reproduce", "--into", "again", "--json"))
    number = hpo_command(folder, "best", "tiny.yaml", "--json").json["trials"][0]["number"]
    assert found.json == {
        "study": "tiny",
        "same": True,
        "trial": number,
        "outcome": "complete",
        "reason": "",
        "num_evaluations": len(before.trials[number].evaluations),
        "results": [],
        "weights": "same",
        "conditions": [],
        "cautions": [],
    }
    assert list((folder / "again").glob("best-*/model.safetensors"))
    assert stored(folder).trials == before.trials, "the study is not changed"
    assert set((folder / "runs" / "tiny").rglob("*")) == files
    refused(
        hpo_command(folder, "best", "tiny.yaml", "--reproduce", "--into", "again"), "again: must be a new"
    )


def test_another_result_has_exit_code_1(folder: Path) -> None:
    with sqlite3.connect(folder / "runs" / "hpo.db") as database:
        database.execute("UPDATE trial_params SET param_value = param_value * 1.5")
    finished = hpo_command(folder, "best", "tiny.yaml", "--reproduce")
    assert finished.exit_code == 1
    assert "is not reproduced bit for bit. The best weights: different." in finished.out
    assert "No recorded condition differs" in finished.out


def test_changed_data_and_code_are_refused(tmp_path: Path) -> None:
    own_code_studies.write(tmp_path, training={**own_code_studies.TRAINING, "max_steps": 4}, n_trials=1)
    ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    reproduced = ok(hpo_command(tmp_path, "best", "tiny.yaml", "--reproduce"))
    assert "Trial 0 is reproduced bit for bit" in reproduced.out
    rows = tmp_path / "rows" / "train.jsonl"
    written = rows.read_text()
    rows.write_text(written.replace("today", "now", 1))
    changed = hpo_command(tmp_path, "best", "tiny.yaml", "--reproduce")
    refused(changed, "The data of the study `tiny` have changed")
    rows.write_text(written)
    code = tmp_path / "own_kind.py"
    code.write_text(f"{code.read_text()}\n# changed\n")
    refused(hpo_command(tmp_path, "best", "tiny.yaml", "--reproduce"), "~ code", "own_kind")
    named = ("best", "tiny", "--reproduce", "--trust-code", "own_kind.py")
    refused(finish(start_hpo(tmp_path, *named)), "is other code")  # this process still has the first code


def test_reproduce_stands_alone(folder: Path) -> None:
    both = hpo_command(folder, "best", "tiny.yaml", "--reproduce", "--evaluate", "test")
    refused(both, "--reproduce must be alone")
    refused(hpo_command(folder, "best", "tiny.yaml", "--into", "again"), "give --reproduce, too")
