"""`hpo deploy`: from a study to a folder with the artifact to use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Finished, hpo_command, ok
from planted_int8 import OUTPUT, VALUE, ruined_exports, write_mood_study

import hpo
from hpo.deploy.artifacts import NAMES
from hpo.deploy.timing import Effort, time_in_turn

INT8 = "onnx_int8_dynamic,onnx_int8_dynamic_per_channel"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time little."""

    def little(predict: Any, rows: Any, size: int, _: Effort) -> Any:
        return time_in_turn(predict, rows, size, Effort(rounds=2, seconds=0.1))

    monkeypatch.setattr("hpo.deploy.deployment.time_in_turn", little)


def refused(finished: Finished, message: str) -> None:
    assert (finished.exit_code, finished.out) == (2, ""), finished
    assert message in finished.err


@pytest.fixture(scope="module")
def mood(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mood")
    ok(hpo_command(folder, "run", str(write_mood_study(folder))))
    return folder


def test_what_int8_ruins_is_refused_and_mended(mood: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with ruined_exports():
        finished = ok(hpo_command(mood, "deploy", "mood", "--artifacts", INT8, "--out", str(out)))
    assert finished.out.count("refused: worse") == 2
    lines = [line for line in finished.out.splitlines() if "layers in float that mend it" in line]
    for line, layers in zip(lines, (f"{OUTPUT}, {VALUE}", OUTPUT), strict=True):
        assert f"mend it: {layers} (" in line
    assert f'hpo.load("{out}/model", device="cpu")' in finished.out
    assert "looking for the layers that break onnx_int8_dynamic" in finished.err
    assert {path.name for path in out.iterdir()} == {"model", "deploy.json", "deploy.png", "deploy.html"}
    stored = json.loads((out / "deploy.json").read_text())
    verdicts = [row["verdict"] for row in stored["artifacts"]]
    assert verdicts == ["as_good", "worse", "as_good", "worse", "as_good"]
    assert stored["artifacts"][stored["chosen"]]["verdict"] == "as_good"
    assert stored["command"].startswith("hpo deploy mood --artifacts")
    page = (out / "deploy.html").read_text()
    assert OUTPUT in page
    assert "refused: worse" in page
    predictions = hpo.load(out / "model", device="cpu").predict(["a good day", "a bad day"])
    assert [one["mood"].label for one in predictions] == ["good", "bad"]


def test_several_trials_as_json_and_every_artifact_kept(folder: Path) -> None:
    finished = ok(
        hpo_command(
            folder,
            *("deploy", "tiny", "--artifacts", "onnx_fp32", "--split", "validation", "--max-drop", "90"),
            *("--threads", "1", "--batch", "32", "--keep-all", "--top", "2", "--json"),
        )
    )
    found = finished.json
    assert finished.err == "" or "is left out" in finished.err
    assert (found["split"], found["num_threads"], found["batch_size"]) == ("validation", 1, 32)
    assert "thresholds were chosen by the split validation" in found["notes"][0]
    out = folder / found["folder"]
    assert out == folder / "runs" / "tiny" / "deploy"
    for row in found["artifacts"]:
        assert (out / "artifacts" / row["folder"] / "hpo.json").is_file()
    as_good = [row for row in found["artifacts"] if row["verdict"] == "as_good" and row["behind_best"]]
    assert found["artifacts"][found["chosen"]] in as_good
    # A second one replaces it as a whole.
    ok(hpo_command(folder, "deploy", "tiny", "--artifacts", "fp32"))
    assert not (out / "artifacts").exists()
    assert hpo.load(out / "model", device="cpu").precision == "fp32"


def test_narrow_terminals_show_whole_tables(folder: Path) -> None:
    arguments = ("deploy", "tiny", "--artifacts", "onnx_int8_dynamic_per_channel", "--max-drop", "90")
    finished = ok(hpo_command(folder, *arguments, width=60))
    tables = finished.out.split("Drop:")[0]
    assert max(map(len, tables.splitlines())) <= 60
    assert "dynamic" in tables


def test_what_is_refused_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("mine")
    cases = [
        (("--artifacts", "onxn_fp32"), "there is no 'onxn_fp32'. Did you mean `onnx_fp32`?"),
        (("--batch", "5"), "--batch must be 1 or 32, but got 5."),
        (("--out", str(other)), "this one holds other files"),
        (("--max-drop", "0"), "Invalid value for '--max-drop'"),
    ]
    for options, message in cases:
        refused(hpo_command(folder, "deploy", "tiny", *options), message)
    assert [path.name for path in other.iterdir()] == ["mine.txt"]
    assert not (folder / "runs" / "tiny" / "deploy").exists()
    assert not list((folder / "runs" / "tiny").glob(".deploy*"))


def test_interrupted_it_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> Iterator[None]:
        raise KeyboardInterrupt

    monkeypatch.setattr("hpo.deploy.deployment.time_in_turn", interrupt)
    finished = hpo_command(folder, "deploy", "tiny", "--artifacts", "onnx_fp32")
    assert finished.exit_code in (1, 130)
    assert not list((folder / "runs" / "tiny").glob("*deploy*"))


def test_without_onnx_the_others_are_compared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpo.inference.onnx_network.find_spec", lambda _: None)
    finished = ok(hpo_command(folder, "deploy", "tiny", "--max-drop", "90"))
    assert "onnx_int8_static is left out: needs the package onnx and onnxruntime" in finished.out
    assert "pip install 'hpo[onnx]'" in finished.out
    stored = json.loads((folder / "runs" / "tiny" / "deploy" / "deploy.json").read_text())
    left_out = {name for name in NAMES if name.startswith("onnx")}
    assert left_out <= stored["left_out"].keys()
    assert {row["artifact"] for row in stored["artifacts"]} == {*NAMES} - stored["left_out"].keys()


def test_a_study_without_a_model(tmp_path: Path) -> None:
    ok(hpo_command(tmp_path, "init", str(write_mood_study(tmp_path))))
    finished = hpo_command(tmp_path, "deploy", "mood")
    assert finished.exit_code == 1
    assert "has no complete trial yet, whose model could be deployed" in finished.err
