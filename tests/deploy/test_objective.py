"""The objectives of the deployed model: measured when a trial has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_line import hpo_command, ok
from planted_int8 import ruined_exports, write_mood_study
from tiny import tiny_executor, write_study

from hpo.config.study_config import DEPLOYED_LATENCY, DEPLOYED_SCORE, load_study
from hpo.deploy.objective import with_deployed_values
from hpo.device import probe_device
from hpo.errors import InputError, ModelError
from hpo.study.reading.reader import read_study
from hpo.study.store.storage import open_storage
from hpo.trial.callbacks import Callbacks
from hpo.trial.executor import Executor
from hpo.trial.telemetry import ScoredEvaluation, TrialResult

OBJECTIVES = [
    {"metric": DEPLOYED_SCORE},
    {"metric": DEPLOYED_LATENCY, "direction": "minimize"},
    {"metric": "mood/accuracy"},
]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Executor, Path, TrialResult]:
    """A trial as it ends in training, and its checkpoint."""
    folder = tmp_path_factory.mktemp("ended")
    study = load_study(write_mood_study(folder, objective=OBJECTIVES))
    executor = Executor(study, probe_device("cpu"), folder / "runs")
    seen: list[ScoredEvaluation] = []
    result = executor.run({}, folder / "trial", "key", Callbacks(seen.append))
    score, latency, accuracy = seen[-1].values
    assert score == pytest.approx(1.0)
    assert latency != latency, "nothing is known of it while it trains"
    assert accuracy == 1.0
    return executor, folder / "trial", result


def test_the_values_are_of_the_model_in_int8(ended: tuple[Executor, Path, TrialResult]) -> None:
    executor, folder, result = ended
    found = with_deployed_values(executor, folder, result, iter((False, True)).__next__)
    assert found.outcome == "complete", found.reason
    cpu = probe_device("cpu")
    told = found.telemetry["deployed_int8"]
    assert found.values == (told["score"], told["p50_ms"], 1.0)
    assert told["score"] == pytest.approx(1.0)
    assert 0 < told["p50_ms"] <= told["p99_ms"]
    assert told["metrics"]["mood"]["accuracy"] == 1.0
    assert (told["cpu"], told["cpu_features"]) == (cpu.name, sorted(cpu.cpu_features))
    assert told["shared"], "a worker came while it was measured"
    assert found.telemetry["deploy_seconds"] > 0
    with ruined_exports("hpo.deploy.objective"):
        ruined = with_deployed_values(executor, folder, result)
    assert ruined.values[0] < 0.5 < ruined.values[2], "int8 alone is ruined"


def test_without_values_the_trial_does_not_end_well(
    ended: tuple[Executor, Path, TrialResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, folder, result = ended
    found = with_deployed_values(executor, tmp_path / "nowhere", result)
    assert (found.outcome, found.values) == ("failed", None)
    assert found.reason.startswith("no value of the deployed model: there is no intact checkpoint")
    monkeypatch.setattr("hpo.deploy.objective.answers", lambda *_: None)
    found = with_deployed_values(executor, folder, result)
    assert (found.outcome, found.values) == ("incompatible", None)
    assert found.reason == "no value of the deployed model: its logits are not finite in int8."
    pruned = TrialResult("pruned")  # type: ignore[arg-type]
    assert with_deployed_values(executor, folder, pruned) is pruned


def test_a_study_and_one_trial_have_the_values(tmp_path: Path) -> None:
    objectives = [{"metric": DEPLOYED_SCORE}, {"metric": DEPLOYED_LATENCY, "direction": "minimize"}]
    study = write_mood_study(tmp_path, objective=objectives, checkpoint={"top_k": 1})
    best = ok(hpo_command(tmp_path, "run", str(study), "--json"))
    assert best.json["outcomes"] == {"complete": 1}
    (trial,) = ok(hpo_command(tmp_path, "best", "mood", "--json")).json["trials"]
    with open_storage(f"sqlite:///{tmp_path}/runs/hpo.db", create=False) as storage:
        (stored,) = read_study(storage, "mood").trials
    assert stored.evaluations
    assert all(row.metrics.keys() == {"score", "mood"} for row in stored.evaluations)
    assert set(trial["values"]) == {DEPLOYED_SCORE, DEPLOYED_LATENCY}
    assert trial["values"][DEPLOYED_LATENCY] > 0
    compared = hpo_command(tmp_path, "compare", "mood", "--precisions", "fp32")
    assert "Compared are the models as they are trained, by score, and not" in compared.err
    trained = ok(hpo_command(tmp_path, "train", str(study)))
    lines = [line for line in trained.out.splitlines() if line.startswith("step ")]
    assert lines
    assert all("score 1" in line and "deployed_int8" not in line for line in lines)
    record = ok(hpo_command(tmp_path, "train", str(study), "--json")).json
    assert record["values"][DEPLOYED_SCORE] == pytest.approx(trial["values"][DEPLOYED_SCORE])
    assert record["telemetry"]["deploy_seconds"] > 0


def test_an_encoder_that_cannot_be_exported_is_refused_before_the_first_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise ModelError("an encoder cannot be exported to ONNX.")

    monkeypatch.setattr("hpo.deploy.objective.export_onnx", refuse)
    objective = {"metric": DEPLOYED_SCORE}
    finished = hpo_command(tmp_path, "run", str(write_mood_study(tmp_path, objective=objective)))
    assert finished.exit_code == 2
    assert "an encoder cannot be exported to ONNX." in finished.err
    with open_storage(f"sqlite:///{tmp_path}/runs/hpo.db") as storage:
        assert not storage.has_study("mood")


def test_a_trial_that_cannot_be_exported_is_incompatible(
    ended: tuple[Executor, Path, TrialResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise ModelError("an encoder cannot be exported to ONNX.")

    monkeypatch.setattr("hpo.deploy.onnx_export.export_onnx", refuse)
    executor, folder, result = ended
    found = with_deployed_values(executor, folder, result)
    assert (found.outcome, found.values) == ("incompatible", None)
    assert "an encoder cannot be exported" in found.reason


def test_what_is_refused_before_the_first_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def executor(**objective: Any) -> Executor:
        return tiny_executor(tmp_path, objective=objective)

    with pytest.raises(InputError, match="must be `minimize` for `deployed_int8/latency_ms`"):
        executor(metric=DEPLOYED_LATENCY)
    with pytest.raises(InputError, match="Did you mean `deployed_int8/score`"):
        executor(metric="deployed_int8/scores")
    late = {"metric": DEPLOYED_LATENCY, "direction": "minimize"}
    with pytest.raises(InputError, match="must be `none` with several objectives, or one that is known"):
        load_study(write_study(tmp_path, objective=late, pruner={"name": "median"}))
    monkeypatch.setattr("hpo.inference.onnx_network.find_spec", lambda _: None)
    with pytest.raises(InputError, match="deployed in int8 needs the package onnx and onnxruntime"):
        executor(metric=DEPLOYED_SCORE)
