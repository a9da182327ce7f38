from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support import planted_encoder
from support.command_line import finish, hpo_command, ok, refused, start_hpo
from support.planted_encoder import PlantedLayer, planted, write_planted_study
from support.tiny import ENCODER, write_study
from torch import Tensor

from hpo.compare.comparison_study import open_comparison
from hpo.compare.planning import Request
from hpo.config.study_config import stored_study
from hpo.device import DeviceInfo
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import TrialRecord
from hpo.study.store.storage import open_storage
from hpo.study.store.studies import create_or_resume_study

SPACE = {
    "fp_precision": {"type": "categorical", "choices": ["fp32", "bf16"]},
    "learning_rate": {"type": "categorical", "choices": [1e-4, 1e-3]},
}
KEYS = {"precision", "metric", "verdict", "difference", "low", "high", "num_seeds", "speed_ratio"}
KEYS |= {"baseline", "collapse_share", "sentence"}
OPTIONS = ("--top", "1", "--max-seeds", "3", "--precisions", "bf16")


def test_precisions(tmp_path: Path) -> None:
    write_study(tmp_path, n_trials=4, sampler={"name": "grid"}, search_space=SPACE)
    ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    found = ok(hpo_command(tmp_path, "compare", "tiny.yaml", *OPTIONS, "--json")).json
    assert all(row.keys() >= KEYS for row in found["verdicts"])
    (row,) = found["verdicts"]
    assert (row["precision"], row["num_seeds"]) == ("bf16", 3)
    assert row["verdict"] in ("as_good", "worse", "not_shown")
    with open_storage(f"sqlite:///{tmp_path}/runs/hpo.db") as storage:
        trials = read_study(storage, "tiny-compare").trials
    assert all(trial.telemetry["test_metrics"] for trial in trials)
    assert not list(tmp_path.glob("runs/tiny-compare/checkpoints-*/trial-*/best-*"))

    again = ok(hpo_command(tmp_path, "compare", "tiny.yaml"))
    assert found["recommendation"] in again.out
    with open_storage(f"sqlite:///{tmp_path}/runs/hpo.db") as storage:
        assert len(read_study(storage, "tiny-compare").trials) == len(trials), "nothing is trained twice"

    assert found["recommendation"] in ok(hpo_command(tmp_path, "best", "tiny")).out


def test_what_is_stored(tmp_path: Path) -> None:
    """The configurations are those that have an adapter, or moments that can be kept short."""
    space = {
        "adapter": {"type": "categorical", "choices": ["none", "lora"]},
        "base_precision": {"type": "categorical", "choices": ["fp32", "int8"], "when": {"adapter": "lora"}},
        "optimizer": {"type": "categorical", "choices": ["adamw", "adafactor"]},
    }
    changes = {"search_space": space, "model": {"encoder": {**ENCODER, "hidden_size": 64}}}
    training = {
        "max_steps": 2,
        "batch_size": 8,
        "max_length": 64,
        "lora_rank": 64,
    }  # of large enough matrices
    write_study(tmp_path, n_trials=6, training=training, **changes)
    ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    bases, moments = (
        ok(
            hpo_command(
                tmp_path, "compare", "tiny", "--over", *options, "--top", "1", "--max-seeds", "3", "--json"
            )
        ).json
        for options in (
            ("base_precision", "--precisions", "bf16,int8"),
            ("optimizer_state", "--precisions", "int8"),
        )
    )
    assert [row["name"] for row in bases["verdicts"]] == ["base_precision bf16", "base_precision int8"]
    assert {one["params"]["adapter"] for one in bases["configurations"]} == {"lora"}
    assert {one["params"]["optimizer"] for one in moments["configurations"]} == {"adamw"}
    for row in (bases["verdicts"][0], moments["verdicts"][0]):
        assert row["num_runs"] == 3
        assert row["stored_ratio_low"] <= row["stored_ratio"] <= row["stored_ratio_high"] < 0.9
    with open_storage(f"sqlite:///{tmp_path}/runs/hpo.db") as storage:
        trials = read_study(storage, "tiny-compare-base").trials
    effective = [trial.telemetry["base_precision"]["effective"] for trial in trials]
    assert effective == [trial.params["base_precision"] for trial in trials]

    ok(hpo_command(tmp_path, "report", "tiny"))
    verdicts = (tmp_path / "runs" / "tiny" / "report" / "tables" / "verdicts.csv").read_text()
    named = {line.partition(",")[0] for line in verdicts.splitlines()}
    assert named == {"precision", "base_precision bf16", "base_precision int8", "optimizer_state int8"}
    assert bases["recommendation"] in ok(hpo_command(tmp_path, "best", "tiny")).out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--over", "base_precision"),
            "--over base_precision: no complete trial of `planted` can have another. ",
        ),
        (("--over", "optimizer_state", "--precisions", "bf17"), "optimizer_state must be one of fp32, bf16"),
    ],
)
def test_an_impossible_comparison_is_refused(
    planted_folder: Path, options: tuple[str, ...], message: str
) -> None:
    refused(hpo_command(planted_folder, "compare", "planted", *options), message)


@pytest.fixture(scope="module")
def planted_search(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    write_planted_study(folder)
    with planted("sound"):
        ok(hpo_command(folder, "run", "tiny.yaml"))
    return folder


@pytest.fixture
def planted_folder(planted_search: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPO_ALLOW", str(planted_search))  # the data of the copy stay there
    return shutil.copytree(planted_search, tmp_path / "planted")


def compared_trials(folder: Path) -> list[TrialRecord]:
    with open_storage(f"sqlite:///{folder}/runs/hpo.db") as storage:
        return read_study(storage, "planted-compare").trials if storage.has_study("planted-compare") else []


PLANTED = ("compare", "tiny.yaml", "--top", "1", "--precisions", "bf16")


def check_verdict(row: Any, difference: float, verdict: str, planted_folder: Path) -> None:
    """The seeds differ by what they draw, the two trials of a pair by the loss alone."""
    assert (row["precision"], row["verdict"]) == ("bf16", verdict)
    assert row["difference"] == pytest.approx(difference)
    assert row["high"] - row["low"] > 0.4, "a thousand texts prove no more"
    for trial in compared_trials(planted_folder):
        assert trial.telemetry["precision"]["agrees"]


def test_an_encoder_with_a_planted_loss(planted_folder: Path) -> None:
    with planted("lossy"):
        (row,) = ok(hpo_command(planted_folder, *PLANTED, "--json")).json["verdicts"]
    check_verdict(row, -2, "worse", planted_folder)


def test_killed_comparisons_go_on_to_the_same_verdicts(planted_folder: Path, tmp_path: Path) -> None:
    """Killed while a trial trains, and again between a look and what it leads to. No trial is lost."""
    undisturbed = shutil.copytree(planted_folder, tmp_path / "undisturbed")
    options = ("--margin", "1.5", "--max-seeds", "5")
    with planted("noisy"):
        whole = ok(hpo_command(undisturbed, *PLANTED, *options, "--json")).json

    num_ended = 0
    for place, at in (("step", 4 * 4 + 3), ("judged", 1)):
        program = (str(Path(planted_encoder.__file__)), "noisy", place, str(at))
        killed = finish(start_hpo(planted_folder, *PLANTED, *options, program=program))
        assert killed.exit_code == -signal.SIGKILL, killed
        ended = [trial for trial in compared_trials(planted_folder) if trial.outcome == "complete"]
        assert len(ended) > num_ended
        num_ended = len(ended)
    with planted("noisy"):
        found = ok(hpo_command(planted_folder, *PLANTED, *options, "--json")).json
    assert without_costs(found) == without_costs(whole)
    trials, expected = compared_trials(planted_folder), compared_trials(undisturbed)
    scores = {str(sorted(trial.params.items())): trial.telemetry["test_metrics"] for trial in trials}
    assert scores == {
        str(sorted(trial.params.items())): trial.telemetry["test_metrics"] for trial in expected
    }
    assert len(trials) == len(expected) == len(scores)


def without_costs(found: Any) -> Any:
    """All of a result but its speeds and memory, and what is recommended: the faster of two as good."""
    if isinstance(found, dict):
        timed = {key for key in found if "_ratio" in key} | {"recommendation"}
        return {key: without_costs(value) for key, value in found.items() if key not in timed}
    return [without_costs(one) for one in found] if isinstance(found, list) else found


def test_the_end_of_its_job_ends_a_comparison_which_goes_on_later(planted_folder: Path) -> None:
    forward = PlantedLayer.forward

    def slow_forward(self: PlantedLayer, words_BW: Tensor) -> Tensor:
        time.sleep(0.5)
        return forward(self, words_BW)

    with planted("sound"):
        with mock.patch.object(PlantedLayer, "forward", slow_forward):
            ended = hpo_command(planted_folder, *PLANTED, "--until", "+1", "--json").json
            assert ended["study"] == "planted-compare"
            assert ended["ended"] in ("stopped", "timeout")
            again = hpo_command(planted_folder, *PLANTED, "--until", "+1")
            assert "To continue: hpo compare tiny.yaml --top 1 --precisions bf16 --until +1" in again.out
        result = ok(hpo_command(planted_folder, "compare", "planted", "--json")).json
    assert result["has_ended"]
    check_verdict(result["verdicts"][0], 0, "as_good", planted_folder)


def test_a_precision_without_support_on_this_device(folder: Path) -> None:
    """Nothing is stored, so that a comparison without it can be begun; one that was begun elsewhere stays."""
    refused(hpo_command(folder, "compare", "tiny.yaml", "--precisions", "tf23"), "Did you mean `tf32`?")
    refused(
        hpo_command(folder, "compare", "tiny.yaml", "--precisions", "tf32", "--json"),
        "needs tf32, but this is ",
        "`tf32` needs CUDA with compute capability >= 8.0",
        "Leave tf32 out of --precisions, or compare on a device that does.",
    )
    with open_storage(f"sqlite:///{folder}/runs/hpo.db") as storage:
        assert not storage.has_study("tiny-compare")
        record = read_study(storage, "tiny")
        config = stored_study("tiny", record.definition)
        request = Request(precisions=("fp32", "tf32"), top=1, max_seeds=3)
        gpu = DeviceInfo("cuda", "Test GPU", compute_capability=(8, 0), cuda_bf16=True)
        elsewhere = open_comparison(storage, record, config, request, device=gpu, has_test=True)
        create_or_resume_study(storage, elsewhere)
    message = "Continue on a device that does, or start again without its trials: hpo delete"
    refused(hpo_command(folder, "compare", "tiny.yaml", "--json"), message)
