import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from support.command_line import hpo_command, ok, refused
from support.planted_int8 import MAX_DROP, ruined_exports, write_mood_study
from support.study_records import record_of, with_values
from support.worker_process import wait_for

import hpo
from hpo.api.deploying import best_model_of
from hpo.deploy.deployment import _Run
from hpo.deploy.timing import TimingBudget, time_in_turn

pytestmark = pytest.mark.usefixtures("onnx_exports")

INT8 = "onnx_int8_dynamic"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_briefly(predict: Any, rows: Any, size: int, *_: Any) -> Any:
        return time_in_turn(predict, rows, size, TimingBudget(rounds=2, seconds=0.1))

    monkeypatch.setattr("hpo.deploy.deployment.time_in_turn", time_briefly)


@pytest.fixture(scope="module")
def mood(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mood")
    ok(hpo_command(folder, "run", str(write_mood_study(folder))))
    return folder


def test_a_form_with_a_large_loss_is_refused(mood: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--artifacts", INT8, "--max-drop", f"{MAX_DROP:g}", "--out", str(out))
    with ruined_exports():
        finished = ok(hpo_command(mood, "deploy", "mood", *options))
    assert re.search(r"^ onnx int8 dynamic .* worse +$", finished.out, re.MULTILINE)
    assert f'hpo.load("{out}/model", device="cpu")' in finished.out
    assert {path.name for path in out.iterdir()} == {"model", "deploy.json"}
    stored = json.loads((out / "deploy.json").read_text())
    assert [row["judged"]["verdict"] for row in stored["artifacts"]] == ["as_good", "worse"]
    assert (stored["chosen"], stored["test"]["num_examples"]) == (0, 320)
    predictions = hpo.load(out / "model", device="cpu").predict(["a good day", "a bad day"])
    assert [one["mood"].label for one in predictions] == ["good", "bad"]


def test_the_first_objective_about_the_model_ranks() -> None:
    fast = with_values(0, (1.0, 0.5), learning_rate=1e-5)
    good = with_values(1, (9.0, 0.9), learning_rate=1e-4)
    names, directions = ("peak_memory_bytes", "score"), ("minimize", "maximize")
    assert best_model_of(record_of([fast, good], metric_names=names, directions=directions)).number == 1


def test_a_refused_deployment_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("mine")
    for options, message in (
        (("--artifacts", "onxn_fp32"), "there is no 'onxn_fp32'. Did you mean `onnx_fp32`?"),
        (("--out", str(other)), "this one holds other files"),
        (("--max-drop", "0"), "Invalid value for '--max-drop'"),
    ):
        refused(hpo_command(folder, "deploy", "tiny", *options), message)
    assert [path.name for path in other.iterdir()] == ["mine.txt"]
    assert not [*(folder / "runs" / "tiny").glob("*deploy*"), *(folder / "runs" / "tiny").glob(".deploy*")]


def test_an_interrupt_keeps_the_scored_forms(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = _Run._judge

    def judge_and_interrupt(run: Any, name: str, split: str) -> Any:
        judged = judge(run, name, split)
        if name == "fp32" and not run._request.stop_reason():
            signal.raise_signal(signal.SIGINT)
            wait_for(lambda: bool(run._request.stop_reason()))
        return judged

    monkeypatch.setattr(_Run, "_judge", judge_and_interrupt)
    finished = hpo_command(folder, "deploy", "tiny", "--artifacts", INT8, "--max-drop", "90")
    assert finished.exit_code == 130, finished.err
    assert "onnx_int8_dynamic is omitted: not scored, because the search was interrupted." in finished.out
    assert hpo.load(folder / "runs/tiny/deploy/model", device="cpu").predict(["I sleep badly."])
