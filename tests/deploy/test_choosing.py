"""The choice among the artifacts of several trials, and what is scored of each."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planted_int8 import ruin, write_mood_study
from test_deployment import QUICK, deployed, trained

import hpo
from hpo.config.study_config import load_study
from hpo.data.examples import Example
from hpo.deploy.artifacts import Artifact
from hpo.deploy.deployment import Candidate, Place, deploy
from hpo.deploy.request import DeploymentRequest
from hpo.deploy.result import Deployment
from hpo.device import probe_device
from hpo.errors import RunError
from hpo.inference.model import TrainedModel
from hpo.trial.executor import Executor

DYNAMIC = "onnx_int8_dynamic_per_channel"


def of_all(executor: Executor, candidates: list[Candidate], folder: Path, *names: str) -> Deployment:
    place = Place(probe_device("cpu"), folder / "artifacts", folder / "tokens")
    request = DeploymentRequest(names, effort=QUICK)
    return deploy(executor.study, executor.dataset, candidates, request, place)


@pytest.fixture(scope="module")
def mood(tmp_path_factory: pytest.TempPathFactory) -> tuple[Executor, Candidate, Candidate]:
    """An executor, a trial that has learned all, and one that has learned nothing."""
    folder = tmp_path_factory.mktemp("mood")
    executor = Executor(load_study(write_mood_study(folder)), probe_device("cpu"), folder / "runs")
    (folder / "poor").mkdir()
    study = write_mood_study(folder / "poor", training={"max_steps": 1, "learning_rate": 1e-6})
    poor = Executor(load_study(study), probe_device("cpu"), folder / "runs")
    return executor, trained(executor, folder), Candidate(7, trained(poor, folder / "poor").exported)


def test_the_fastest_of_all_trials_is_chosen_unless_it_is_behind_the_best(
    mood: tuple[Executor, Candidate, Candidate], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faster_and_faster(predict: Mapping[int, Any], *_: Any) -> dict[int, list[list[float]]]:
        return {number: [[1 / (number + 1)] * 2] for number in predict}

    monkeypatch.setattr("hpo.deploy.deployment.time_in_turn", faster_and_faster)
    executor, best, poor = mood
    alike = Candidate(3, best.exported)
    found = of_all(executor, [best, alike, poor], tmp_path)
    assert [row.trial for row in found.artifacts] == [0, 3, 7]
    assert [row.verdict for row in found.artifacts] == ["as_good", "as_good", "worse"]
    assert found.best.trial == 3, "the fastest of those that are as good"
    refused = found.artifacts[2]
    assert refused.drop.value == 0, "it is as good as its own fp32"
    assert refused.behind_best.value == pytest.approx(50)
    assert refused.reason.startswith("against fp32 of trial 0, the best, the drop of +50.00 [")
    assert "2 artifacts are judged beside fp32 of the best trial" in found.notes[-1]
    assert found.notes[-1].endswith("that any of them does of at most 5 %.")


def test_a_trial_behind_the_best_is_not_mended(
    mood: tuple[Executor, Candidate, Candidate], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, best, poor = mood
    broken = Candidate(7, ruin(Path(shutil.copytree(poor.exported, tmp_path / "broken"))))
    asked: list[Artifact] = []
    monkeypatch.setattr("hpo.deploy.mending.Mender.mend", lambda _, artifact, **__: asked.append(artifact))
    found = of_all(executor, [best, broken], tmp_path, DYNAMIC)
    assert [row.verdict for row in found.artifacts] == ["as_good", "as_good", "worse", "worse"]
    assert asked == []


def test_the_labels_of_a_loaded_artifact_are_those_that_are_scored(
    mood: tuple[Executor, Candidate, Candidate], tmp_path: Path
) -> None:
    executor, best, _ = mood
    ruined = Candidate(0, ruin(Path(shutil.copytree(best.exported, tmp_path / "ruined"))))
    names = ("onnx_fp32", "onnx_int8_dynamic", DYNAMIC, "onnx_int8_static")
    found = deployed(executor, ruined, tmp_path, *names, max_drop=90.0, split="validation")
    examples: list[Example] = executor.dataset.splits["validation"]
    truth = [example.labels["mood"] for example in examples]
    scores = set()
    for row in found.artifacts:
        model = hpo.load(tmp_path / "artifacts" / row.folder, device="cpu")
        said = [model.predict([example.text])[0]["mood"].label for example in examples]
        right = [label == true for label, true in zip(said, truth, strict=True)]
        assert sum(right) / len(right) == row.metrics["mood"]["accuracy"].value, row.artifact.name
        scores.add(row.score.value)
    assert len(scores) > 1, "some of them have other labels than fp32"


def test_what_fails_in_mending_or_in_timing_does_not_end_the_others(
    mood: tuple[Executor, Candidate, Candidate], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, best, _ = mood
    ruined = Candidate(0, ruin(Path(shutil.copytree(best.exported, tmp_path / "ruined"))))

    def fail(*_: object, **__: object) -> None:
        raise RunError("no room.")

    with monkeypatch.context() as patched:
        patched.setattr("hpo.deploy.mending.Mender.mend", fail)
        found = deployed(executor, ruined, tmp_path / "mending", "onnx_int8_static")
    fp32, broken = found.artifacts
    assert (fp32.verdict, broken.verdict, found.left_out) == ("as_good", "worse", {})
    assert broken.reason.endswith("It could not be mended: no room.")

    predict = TrainedModel.predict

    def failing(model: TrainedModel, rows: Any, **of: Any) -> Any:
        if model.precision == "int8" and len(rows) > 1:
            raise RunError("too many texts.")
        return predict(model, rows, **of)

    monkeypatch.setattr(TrainedModel, "predict", failing)
    found = deployed(executor, best, tmp_path, "onnx_fp32", "onnx_int8_static")
    assert [row.artifact.name for row in found.artifacts] == ["fp32", "onnx_fp32"]
    reason = "it failed while it was timed: too many texts."
    assert found.left_out == {"onnx_int8_static of trial 0": reason}
    assert found.best in found.artifacts


def test_a_flaw_that_the_judging_rows_do_not_show_names_no_layer(
    mood: tuple[Executor, Candidate, Candidate], tmp_path: Path
) -> None:
    executor, best, _ = mood
    ruined = Candidate(0, ruin(Path(shutil.copytree(best.exported, tmp_path / "ruined"))))
    place = Place(probe_device("cpu"), tmp_path / "artifacts", tmp_path / "tokens")
    request = DeploymentRequest(("onnx_int8_static_per_channel",), effort=QUICK)
    splits = executor.dataset.splits
    # Of two classes the ruined model knows one.
    by_class = [[one for one in splits["validation"] if word in one.text] for word in (" good ", " bad ")]
    reasons = []
    for number, rows in enumerate(by_class):
        data = replace(executor.dataset, splits={**splits, "validation": rows}, fingerprint=f"class {number}")
        one_place = replace(place, folder=place.folder / str(number))
        found = deploy(executor.study, data, [ruined], request, one_place)
        assert found.artifacts[1].verdict == "worse"
        if len(found.artifacts) == 2:
            reasons.append(found.artifacts[1].reason)
            assert (one_place.folder / found.artifacts[1].folder / "model.onnx").is_file()
        else:
            assert found.artifacts[2].mended is not None
    assert len(reasons) == 1
    assert reasons[0].endswith("it is as good without any, so they cannot tell which layers break it.")
