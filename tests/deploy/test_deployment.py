import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.planted_int8 import MAX_DROP, ruin, write_mood_study
from support.tiny import CPU, executor_of, tiny_executor

import hpo
from hpo.deploy.artifacts import NAMES, ONNX_FP32, ONNX_INT8
from hpo.deploy.deployment import DeploymentRequest, DeployTarget, deploy
from hpo.deploy.result import Deployment
from hpo.deploy.timing import TimingBudget
from hpo.errors import RunError
from hpo.inference.model import TrainedModel
from hpo.training.metrics import primary_mean
from hpo.trial.best_model import export_checkpoint, split_predictions
from hpo.trial.executor import Executor
from hpo.trial.telemetry import StoredTrial

pytestmark = pytest.mark.usefixtures("onnx_exports")

Mood = tuple[Executor, Path]
QUICK = TimingBudget(rounds=2, seconds=0.1)


def trained(executor: Executor, folder: Path) -> Path:
    result = executor.run({}, folder / "trial", "key")
    assert result.outcome == "complete", result.reason
    source = StoredTrial(0, {}, result.telemetry)
    return export_checkpoint(executor, folder / "trial", folder / "export", source)


def deployed(executor: Executor, exported: Path, folder: Path, *names: str, **options: Any) -> Deployment:
    """Deploy; `options` are those of the request, `data` and `device`."""
    data, device = options.pop("data", executor.dataset), options.pop("device", CPU)
    request = DeploymentRequest(names, **{"max_drop": MAX_DROP, "budget": QUICK, **options})
    target = DeployTarget(device, folder / "artifacts", folder / "tokens")
    return deploy(executor.study, data, exported, request, target)


@pytest.fixture(scope="module")
def mood(tmp_path_factory: pytest.TempPathFactory) -> Mood:
    folder = tmp_path_factory.mktemp("mood")
    executor = executor_of(write_mood_study(folder))
    return executor, trained(executor, folder)


@pytest.fixture
def ruined(mood: Mood, tmp_path: Path) -> Path:
    return ruin(Path(shutil.copytree(mood[1], tmp_path / "ruined")))


def test_scores_equal_an_evaluation(tmp_path: Path) -> None:
    executor = tiny_executor(tmp_path, search_space={}, amp={"preset": "basic"})
    result = deployed(executor, trained(executor, tmp_path), tmp_path, ONNX_FP32, ONNX_INT8, max_drop=20.0)
    fp32, onnx, int8 = result.artifacts
    assert [row.artifact for row in result.artifacts] == ["fp32", ONNX_FP32, ONNX_INT8]
    expected = split_predictions(executor, tmp_path / "trial", {}, "validation").metrics()
    for task in executor.tasks:
        for row, tolerance in ((fp32, 1e-6), (onnx, 1e-3)):
            scored = row.judged.tasks[task.name]
            assert scored.metric == task.primary_metric
            assert scored.value.value == pytest.approx(expected[task.name][scored.metric], abs=tolerance)
    for row in result.artifacts:
        loss = 100 * (fp32.judged.score.value - row.judged.score.value)
        assert row.judged.drop.value == pytest.approx(loss, abs=1e-6)
        assert set(row.timings) == {1, 32}
    assert int8.weight_bytes < onnx.weight_bytes / 2
    assert result.best.judged.verdict == "as_good"
    on_test = split_predictions(executor, tmp_path / "trial", {}, "test").metrics()
    assert result.test.fp32_score.value == pytest.approx(primary_mean(executor.tasks, on_test), abs=1e-6)
    assert "Its score is that of texts predicted alone." in result.notes[-1]


@pytest.mark.parametrize("is_native", [False, True], ids=["without bf16", "with bf16"])
def test_timeout_chooses_among_scored_forms(mood: Mood, tmp_path: Path, is_native: bool) -> None:
    built = tmp_path / "artifacts" / ONNX_FP32
    device = replace(CPU, cpu_features=frozenset({"avx512_bf16"} if is_native else {"avx2"}))
    late = lambda: "it is late" * built.exists()  # noqa: E731
    result = deployed(*mood, tmp_path, ONNX_FP32, "bf16", device=device, stop_reason=late)
    assert [row.artifact for row in result.artifacts] == ["fp32", *(["bf16"] if is_native else [])]
    assert result.left_out[ONNX_FP32] == "not scored, because it is late."
    assert result.best.timings.keys() == {1, 32}
    assert result.test is not None


def test_fastest_form_is_confirmed(mood: Mood, ruined: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def later_is_faster(forms: Mapping[str, Any], *_: Any) -> dict[str, list[list[float]]]:
        return {name: [[1 / (1 + NAMES.index(name))] * 2] for name in forms}

    monkeypatch.setattr("hpo.deploy.deployment.time_in_turn", later_is_faster)
    result = deployed(*mood, tmp_path / "sound", ONNX_FP32, ONNX_INT8)
    assert result.best.artifact == ONNX_INT8
    assert (result.test.judged.verdict, result.test.judged.drop.value) == ("as_good", 0.0)
    # The ruined model knows one of two classes. Validation has two rows of the other, so test shows it.
    notes, splits = [], mood[0].dataset.splits
    for word in (" good ", " bad "):
        rows = sorted(splits["validation"], key=lambda one: word not in one.text)[:22]
        data = replace(mood[0].dataset, splits={**splits, "validation": rows}, fingerprint=word)
        result = deployed(mood[0], ruined, tmp_path / word, ONNX_INT8, data=data, max_drop=30.0)
        assert (result.best.artifact, result.test.judged.drop.value) == ("fp32", 0)
        notes += [note for note in result.notes if "was chosen" in note]
    assert notes == [f"{ONNX_INT8} was chosen, but it is worse on test, so fp32 is deployed."]
    untested = deployed(*mood, tmp_path / "untested", ONNX_FP32, has_test=False)
    assert (untested.best.artifact, untested.test) == (ONNX_FP32, None)


def test_loaded_form_predicts_the_scored_labels(mood: Mood, ruined: Path, tmp_path: Path) -> None:
    executor = mood[0]
    result = deployed(executor, ruined, tmp_path, ONNX_FP32, ONNX_INT8, max_drop=90.0)
    examples = executor.dataset.splits["validation"]
    scores = set()
    for row in result.artifacts:
        model = hpo.load(tmp_path / "artifacts" / row.artifact, device="cpu")
        labels = [model.predict([example.text])[0]["mood"].label for example in examples]
        right = [label == one.labels["mood"] for label, one in zip(labels, examples, strict=True)]
        assert sum(right) / len(right) == row.judged.score.value, row.artifact
        scores.add(row.judged.score.value)
    assert len(scores) > 1, "int8 predicts other labels than fp32"


def test_failing_form_is_left_out(mood: Mood, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("hpo.deploy.onnx_fp32.export_onnx", Mock(side_effect=RunError("no such operator.")))
        result = deployed(*mood, tmp_path / "built", ONNX_FP32, ONNX_INT8)
    assert [row.artifact for row in result.artifacts] == ["fp32"]
    assert result.left_out == dict.fromkeys((ONNX_FP32, ONNX_INT8), "no such operator.")
    predict = TrainedModel.predict

    def fail_with_many(model: TrainedModel, rows: Any) -> Any:
        if model.precision == "int8" and len(rows) > 1:
            raise RunError("too many texts.")
        return predict(model, rows)

    monkeypatch.setattr(TrainedModel, "predict", fail_with_many)
    result = deployed(*mood, tmp_path, ONNX_INT8)
    assert [row.artifact for row in result.artifacts] == ["fp32"]
    assert result.left_out == {ONNX_INT8: "it failed while it was timed: too many texts."}
    monkeypatch.setattr("hpo.deploy.deployment.split_statistics", lambda *_, **__: None)
    with pytest.raises(RunError, match="trial 0 are not finite in fp32"):
        deployed(*mood, tmp_path / "nonfinite")


def test_few_equal_rows_show_nothing(mood: Mood, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = deployed(*mood, tmp_path, ONNX_FP32, max_drop=1.0)
    assert (result.artifacts[1].judged.verdict, result.best.artifact) == ("not_shown", "fp32")
    limit = "With 40 labelled rows of validation, losses under 8.81 points cannot be excluded. A margin of 1 "
    assert caplog.messages[0] == result.notes[0], "before the first form is built"
    assert result.notes[0].startswith(f"No form can be shown to be as good. {limit}")
    reason = result.artifacts[1].judged.reason
    assert reason.endswith("1 run, 40 labelled rows of validation."), "one needed size, in the note"
