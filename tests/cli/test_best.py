import json
import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support import own_code_studies
from support.command_line import finish, hpo_command, ok, refused, start_hpo, stored
from support.tiny import write_study
from transformers import AutoModel

from hpo.training import checkpoint


def metrics_of(document: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {
        task: {metric: of["value"] for metric, of in found["metrics"].items()}
        for task, found in document["tasks"].items()
    }


def test_best_shows_the_evaluation_of_the_run(ran: Path) -> None:
    (best,) = ok(hpo_command(ran, "best", "tiny.yaml", "--json")).json["trials"]
    assert best["detailed"]["test"] == stored(ran).trials[best["number"]].detailed["test"]
    text = ok(hpo_command(ran, "best", "tiny.yaml")).out
    for part in (
        r"^ +test, 24 rows: score -?\d\.\d.* \(best constant prediction 0\.\d",
        r"^best trial \d: score \S+ \(best constant prediction 0\.\d",
        r"^Trial \d on validation, measured by the search",
        r"^ +task +metric +value +best constant",
        r"^Trial \d on test: 24 rows",
    ):
        assert re.search(part, text, re.MULTILINE), part


def test_best_stores_its_evaluation(folder: Path) -> None:
    (folder / "tiny.yaml").rename(folder / "gone.yaml")  # the database has the study
    before = hpo_command(folder, "best", "tiny", "--json").json["trials"][0]["detailed"]
    assert list(before) == ["test"]
    result = ok(hpo_command(folder, "best", "tiny", "--json", "--evaluate", "validation")).json
    (best,), evaluation = result["trials"], result["evaluation"]
    assert best["precision"]["observed"]["linear_products"] == {"float32": 17}
    assert evaluation["split"] == "validation"
    assert metrics_of(evaluation["detailed"]) == evaluation["metrics"] == best["metrics"]
    assert best["detailed"] == before | {"validation": evaluation["detailed"]}
    assert best["baseline"] == evaluation["detailed"]["baseline"]
    assert {"score", "criteria/f1_macro", "severity/accuracy", "burden/r2"} <= best["baseline"].keys()
    again = ok(hpo_command(folder, "best", "tiny", "--json", "--evaluate", "test")).json
    assert again["evaluation"]["detailed"] == before["test"], "the run's evaluation"
    text = ok(hpo_command(folder, "best", "tiny", "--evaluate", "validation")).out
    assert "measured by the search" not in text


def test_best_does_not_evaluate_by_a_changed_file(folder: Path) -> None:
    write_study(folder, data={"source": "synthetic", "synthetic": {"num_train": 9, "num_validation": 9}})
    assert hpo_command(folder, "best", "tiny.yaml").exit_code == 0
    message = "~ data.synthetic.num_train: 48 -> 9"
    refused(hpo_command(folder, "best", "tiny.yaml", "--evaluate", "test"), message)


def test_export_replaces_only_a_model_of_the_same_study(folder: Path) -> None:
    export = ("best", "tiny.yaml", "--export", "model", "--json")
    for provenance in ('{"study": "other"}', "torn"):
        (folder / "model").mkdir()
        (folder / "model" / "hpo.json").write_text(f'{{"provenance": {provenance}}}')
        refused(hpo_command(folder, *export), "Name another folder, or remove that one.")
        shutil.rmtree(folder / "model")
    for _ in range(2):
        (best,) = ok(hpo_command(folder, *export)).json["trials"]
    assert AutoModel.from_pretrained(folder / "model").config.hidden_size == 32
    provenance = json.loads((folder / "model" / "hpo.json").read_text())["provenance"]
    scores = {"validation": best["metrics"], "test": metrics_of(best["detailed"]["test"])}
    assert (provenance["study"], provenance["scores"]) == ("tiny", scores)


def test_weights_lost_on_a_full_disk_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_study(tmp_path, n_trials=1)
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(checkpoint, "save_file", full)
    lost = r"Warning: The best weights of trial 0 were not kept: .*No space left on device\. Free some space"
    for command in ("run", "status", "best"):
        assert re.search(lost, ok(hpo_command(tmp_path, command, "tiny.yaml", width=1000)).out), command
    (warning,) = ok(hpo_command(tmp_path, "status", "tiny.yaml", "--json")).json["warnings"][:1]
    assert re.search(lost, f"Warning: {warning}")
    assert hpo_command(tmp_path, "best", "tiny.yaml", "--export", "model").exit_code == 1


def test_reproduce_changes_nothing_in_the_study(folder: Path) -> None:
    before, files = stored(folder), set((folder / "runs" / "tiny").rglob("*"))
    reproduce = ("best", "tiny.yaml", "--reproduce", "--into", "again", "--json")
    result = ok(hpo_command(folder, *reproduce)).json
    assert (result["same"], result["weights"], result["results"]) == (True, "same", [])
    assert result["num_evaluations"] == len(before.trials[result["trial"]].evaluations)
    assert list((folder / "again").glob("best-*/model.safetensors"))
    assert stored(folder).trials == before.trials
    assert set((folder / "runs" / "tiny").rglob("*")) == files
    refused(hpo_command(folder, *reproduce), "again: must be a new")
    refused(hpo_command(folder, *reproduce, "--evaluate", "test"), "--reproduce must be alone")
    with sqlite3.connect(folder / "runs" / "hpo.db") as database:
        database.execute("UPDATE trial_params SET param_value = param_value * 1.5")
    finished = hpo_command(folder, "best", "tiny.yaml", "--reproduce")
    assert finished.exit_code == 1
    assert "is not reproduced bit for bit. The best weights: different." in finished.out


def test_reproduce_refuses_changed_data_and_code(tmp_path: Path) -> None:
    own_code_studies.write(tmp_path, training={**own_code_studies.TRAINING, "max_steps": 4}, n_trials=1)
    ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    reproduce = ("best", "tiny.yaml", "--reproduce")
    assert "Trial 0 is reproduced bit for bit" in ok(hpo_command(tmp_path, *reproduce)).out
    rows = tmp_path / "rows" / "train.jsonl"
    written = rows.read_text()
    rows.write_text(written.replace("today", "now", 1))
    refused(hpo_command(tmp_path, *reproduce), "The data of the study `tiny` have changed")
    rows.write_text(written)
    code = tmp_path / "own_kind.py"
    code.write_text(f"{code.read_text()}\n# changed\n")
    refused(hpo_command(tmp_path, *reproduce), "~ code", "own_kind")
    named = ("best", "tiny", "--reproduce", "--trust-code", "own_kind.py")
    refused(finish(start_hpo(tmp_path, *named)), "is other code")  # this process still has the first code
