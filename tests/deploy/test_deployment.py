"""The artifacts of a trained model: what they score, what is refused, what mends it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from planted_int8 import OUTPUT, ruin, write_mood_study
from tiny import tiny_executor

import hpo
from hpo.config.study_config import load_study
from hpo.deploy.deployment import Candidate, Place, deploy
from hpo.deploy.request import DeploymentRequest
from hpo.deploy.result import Deployment
from hpo.deploy.timing import Effort
from hpo.device import probe_device
from hpo.errors import RunError
from hpo.trial.best_model import export_checkpoint, score_checkpoint
from hpo.trial.executor import Executor
from hpo.trial.provenance import TrialSource

QUICK = Effort(rounds=2, seconds=0.1)


def trained(executor: Executor, folder: Path) -> Candidate:
    """A trial of `executor`, exported."""
    result = executor.run({}, folder / "trial", "key")
    assert result.outcome == "complete", result.reason
    source = TrialSource(0, {}, result.telemetry)
    return Candidate(0, export_checkpoint(executor, folder / "trial", folder / "export", source))


def deployed(executor: Executor, candidate: Candidate, folder: Path, *names: str, **of: object) -> Deployment:
    request = DeploymentRequest(names, effort=QUICK, **of)  # type: ignore[arg-type]
    place = Place(probe_device("cpu"), folder / "artifacts", folder / "tokens")
    return deploy(executor.study, executor.dataset, [candidate], request, place)


@pytest.fixture(scope="module")
def mood(tmp_path_factory: pytest.TempPathFactory) -> tuple[Executor, Candidate]:
    folder = tmp_path_factory.mktemp("mood")
    executor = Executor(load_study(write_mood_study(folder)), probe_device("cpu"), folder / "runs")
    return executor, trained(executor, folder)


def test_artifacts_score_as_an_evaluation_and_as_what_is_loaded(tmp_path: Path) -> None:
    executor = tiny_executor(tmp_path, search_space={}, amp={"preset": "basic"})
    candidate = trained(executor, tmp_path)
    names = ("onnx_fp32", "onnx_int8_dynamic_per_channel", "onnx_int8_static")
    found = deployed(executor, candidate, tmp_path, *names, max_drop=5.0)
    fp32, onnx, dynamic, static = found.artifacts
    assert [row.artifact.name for row in found.artifacts] == ["fp32", *names]
    expected = score_checkpoint(executor, tmp_path / "trial", "test")
    for task, metrics in expected.items():
        for metric, value in metrics.items():
            assert fp32.metrics[task][metric].value == pytest.approx(value, abs=1e-6)
            assert onnx.metrics[task][metric].value == pytest.approx(value, abs=1e-3)
    assert (fp32.drop.value, fp32.drop.low, fp32.drop.high) == (0, 0, 0)
    assert onnx.largest_change < 1e-5 < dynamic.largest_change < 0.5
    assert fp32.batch_change is onnx.batch_change is static.batch_change is None
    assert 1e-5 < dynamic.batch_change < 0.5, "ranges are those of a batch"
    for row in found.artifacts:
        assert row.score.low <= row.score.high
        assert row.drop.value == pytest.approx(100 * (fp32.score.value - row.score.value), abs=1e-6)
        assert row.drop == row.behind_best
        assert set(row.task_drops) == {task.name for task in executor.tasks}
        assert set(row.timings) == {1, 32}
        assert row.timings[1].p50_ms <= row.timings[1].p99_ms
    assert dynamic.weight_bytes < onnx.weight_bytes / 2
    assert dynamic.weight_bytes < dynamic.folder_bytes
    assert found.best in [row for row in found.artifacts if row.verdict == "as_good"]
    assert "24 rows are few" in found.notes[0]
    assert f"here by up to {dynamic.batch_change:.2g} between texts alone" in found.notes[-1]
    model = hpo.load(tmp_path / "artifacts" / dynamic.folder, device="cpu")
    assert model.precision == "int8"
    assert model.predict(["I sleep badly."])[0].keys() == {task.name for task in executor.tasks}
    stored = json.loads(json.dumps(found.as_json()))
    assert stored["artifacts"][2]["artifact"] == "onnx_int8_dynamic_per_channel"
    assert stored["artifacts"][2]["timings"]["32"]["speed_up"].keys() == {"ratio", "low", "high"}


def test_a_model_that_int8_ruins_is_refused_and_mended_by_naming_the_layer(
    mood: tuple[Executor, Candidate], tmp_path: Path
) -> None:
    executor, candidate = mood
    sound = deployed(executor, candidate, tmp_path / "sound", "onnx_int8_static_per_channel")
    assert [row.verdict for row in sound.artifacts] == ["as_good", "as_good"]
    ruin(candidate.exported)
    found = deployed(executor, candidate, tmp_path, "onnx_int8_static_per_channel")
    fp32, broken, mended = found.artifacts
    assert fp32.score.value == sound.artifacts[0].score.value == 1.0, "in fp32 it is the same function"
    assert (broken.verdict, broken.drop.value) == ("worse", pytest.approx(50))
    assert "is beyond --max-drop 1" in broken.reason
    assert broken.mended is None
    assert mended.artifact.keep_float == mended.mended.names == (OUTPUT,)
    assert mended.mended.is_smallest
    assert (mended.verdict, mended.drop.value) == ("as_good", 0.0)
    assert found.best.artifact.name in ("fp32", "onnx_int8_static_per_channel")
    assert found.best is not broken
    kept = json.loads((tmp_path / "artifacts" / mended.folder / "hpo.json").read_text())
    assert OUTPUT in kept["onnx"]["quantization"]["kept_float"]
    left = {path.name for path in (tmp_path / "artifacts" / "trial-00000").iterdir()}
    assert left == {"fp32", "onnx_fp32", broken.artifact.name, f"{broken.artifact.name}_mended"}


def test_what_cannot_be_made_is_left_out_with_the_reason(
    mood: tuple[Executor, Candidate], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, candidate = mood

    def fail(*_: object, **__: object) -> Path:
        raise RunError("no such operator.")

    monkeypatch.setattr("hpo.deploy.onnx_export.export_onnx", fail)
    found = deployed(executor, candidate, tmp_path, "onnx_fp32", "onnx_int8_dynamic")
    assert [row.artifact.name for row in found.artifacts] == ["fp32"]
    assert found.left_out == {
        "onnx_fp32 of trial 0": "no such operator.",
        "onnx_int8_dynamic of trial 0": "no such operator.",
    }


def test_a_model_that_is_not_finite_in_fp32_ends_it(
    mood: tuple[Executor, Candidate], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, candidate = mood
    monkeypatch.setattr("hpo.deploy.deployment.answers", lambda *_: None)
    with pytest.raises(RunError, match="trial 0 are not finite in fp32"):
        deployed(executor, candidate, tmp_path)
