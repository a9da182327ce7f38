import shutil
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.command_line import FAULTY_HPO, finish, hpo_command, ok, refused, start_hpo, stored
from support.planted_encoder import PlantedLayer, planted, write_planted_study
from support.tiny import write_study
from torch import Tensor

import hpo
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
KEYS |= {"baseline", "condition", "sentence"}
QUICK = ("--top", "1", "--max-seeds", "3", "--anyway")
LIMIT = "With 24 labelled rows of test, "


def test_precisions_and_configurations_are_compared(tmp_path: Path) -> None:
    write_study(tmp_path, n_trials=4, sampler={"name": "grid"}, search_space=SPACE)
    ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    few = (
        "So no precision can be shown to be as good as fp32. Label more rows of test to change that. To train"
    )
    refused(hpo_command(tmp_path, "compare", "tiny.yaml", *QUICK[:-1], "--precisions", "bf16"), LIMIT, few)
    first = ok(hpo_command(tmp_path, "compare", "tiny.yaml", *QUICK, "--precisions", "bf16"))
    assert first.err.index(LIMIT) < first.err.index("At most 6 trials, about ")
    result = ok(hpo_command(tmp_path, "compare", "tiny", "--json")).json
    assert result["recommendation"] in first.out
    (row,) = result["verdicts"]
    assert row.keys() >= KEYS
    assert (row["precision"], row["num_seeds"]) == ("bf16", 3)
    assert row["verdict"] in ("as_good", "worse", "not_shown")
    limit, trials = result["in_advance"]
    assert limit.startswith(LIMIT)
    assert "no precision can be shown to be as good" in limit
    assert trials.startswith("At most 6 trials, about ")
    compared = stored(tmp_path, "tiny-compare").trials
    assert len(compared) == 6, "the second command trains nothing"
    assert all(trial.telemetry["test_metrics"] for trial in compared)
    assert not list(tmp_path.glob("runs/tiny-compare/checkpoints-*/trial-*/best-*"))

    ok(hpo_command(tmp_path, "compare", "tiny.yaml", "--configurations", "--top", "2"))
    ranked = ok(hpo_command(tmp_path, "compare", "tiny", "--configurations", "--json")).json
    one, other = ranked["configurations"]
    assert one["trial"] != other["trial"]
    assert one["low"] < one["mean"] < one["high"]
    assert (one["num_runs"], ranked["in_advance"][0][: len(LIMIT)]) == (3, LIMIT)
    assert hpo.Study("tiny", storage=f"sqlite:///{tmp_path}/runs/hpo.db").compare("configurations") == ranked
    ok(hpo_command(tmp_path, "report", "tiny"))
    page = (tmp_path / "runs" / "tiny" / "report" / "report.html").read_text()
    assert "labelled rows of test" in page
    best = ok(hpo_command(tmp_path, "best", "tiny")).out
    assert result["recommendation"] in best
    assert f"Comparison of configurations on new seeds: {ranked['recommendation']}" in best


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
    return stored(folder, "planted-compare").trials


PLANTED = ("compare", "tiny.yaml", "--top", "1", "--precisions", "bf16")


def check_verdict(row: Any, difference: float, verdict: str, planted_folder: Path) -> None:
    """Seeds differ by their draws, the two trials of a pair only by the loss."""
    assert (row["precision"], row["verdict"]) == ("bf16", verdict)
    assert row["difference"] == pytest.approx(difference)
    assert row["high"] - row["low"] > 0.4, "a thousand texts prove no more"
    for trial in compared_trials(planted_folder):
        assert trial.telemetry["precision"]["agrees"]


def test_a_planted_loss_is_worse(planted_folder: Path) -> None:
    with planted("lossy"):
        (row,) = ok(hpo_command(planted_folder, *PLANTED, "--json")).json["verdicts"]
    check_verdict(row, -2, "worse", planted_folder)


def test_a_killed_comparison_reaches_the_same_verdict(planted_folder: Path, tmp_path: Path) -> None:
    """Killed during a trial, and again between a judgement and its consequence. No trial is lost."""
    undisturbed = shutil.copytree(planted_folder, tmp_path / "undisturbed")
    options = ("--margin", "1.5", "--max-seeds", "5", "--anyway")
    with planted("noisy"):
        whole = ok(hpo_command(undisturbed, *PLANTED, *options, "--json")).json
    num_ended = 0
    for place, at in (("step", 4 * 4 + 3), ("judged", 1)):
        program = (FAULTY_HPO, f"killed,noisy,{place},{at}")
        killed = finish(start_hpo(planted_folder, *PLANTED, *options, program=program))
        assert killed.exit_code == -signal.SIGKILL, killed
        ended = [trial for trial in compared_trials(planted_folder) if trial.outcome == "complete"]
        assert len(ended) > num_ended
        num_ended = len(ended)
    with planted("noisy"):
        resumed = ok(hpo_command(planted_folder, *PLANTED, *options, "--json")).json
    assert without_costs(resumed) == without_costs(whole)
    trials, expected = (
        {str(sorted(trial.params.items())): trial.telemetry["test_metrics"] for trial in compared_trials(of)}
        for of in (planted_folder, undisturbed)
    )
    assert trials == expected
    assert len(compared_trials(planted_folder)) == len(trials)


def without_costs(result: Any) -> Any:
    """A result without speeds, memory, and the recommendation, which is the faster of two as good."""
    if isinstance(result, dict):
        timed = {key for key in result if "_ratio" in key} | {"recommendation"}
        return {key: without_costs(value) for key, value in result.items() if key not in timed}
    return [without_costs(one) for one in result] if isinstance(result, list) else result


def test_a_comparison_continues_after_the_end_of_its_job(planted_folder: Path) -> None:
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


def test_an_impossible_comparison_is_refused(folder: Path) -> None:
    """Nothing is stored, so another comparison can begin; a comparison from another device is kept."""
    message = "no complete trial of `tiny` can have another. "
    refused(hpo_command(folder, "compare", "tiny.yaml", "--over", "base_precision"), message)
    options = {"--precisions": "bf16", "--margin": "1", "--over": "fp_precision", "--max-seeds": "5"}
    for option in options.items():
        other = hpo_command(folder, "compare", "tiny.yaml", "--configurations", *option)
        refused(other, f"--configurations takes no {option[0]}: each configuration")
    unsupported = hpo_command(folder, "compare", "tiny.yaml", "--precisions", "tf32", "--json")
    refused(unsupported, "needs tf32, but this is ", "Leave tf32 out of --precisions, or compare on a device")
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
