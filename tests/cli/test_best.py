"""`hpo best`: what it shows, scores and exports."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from command_line import hpo_command, ok
from tiny import write_study


def test_best(ran: Path) -> None:
    status = hpo_command(ran, "status", "tiny.yaml", "--json").json
    found = ok(hpo_command(ran, "best", "tiny.yaml", "--json", "--evaluate", "validation")).json
    (best,) = found["trials"]
    assert {key: best[key] for key in ("number", "values", "params")} == status["best"][0]
    assert best["precision"]["observed"]["linear_dtypes"] == {"float32": 17}
    assert found["evaluation"]["split"] == "validation"
    assert found["evaluation"]["metrics"] == best["metrics"], "the checkpoint is the best evaluation's"
    text = ok(hpo_command(ran, "best", "tiny.yaml", "--evaluate", "test")).out
    assert re.search(r"Trial \d on test", text)
    assert re.search(r"criteria +f1_macro +0\.\d+", text)


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
