from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.planted_int8 import MAX_DROP, ruin, write_mood_study
from support.tiny import CPU, tiny_executor

import hpo
from hpo.config.resolved_study import resolve_study
from hpo.config.study_config import load_study
from hpo.deploy.artifacts import NAMES, REFERENCE
from hpo.deploy.deployment import Candidate, DeploymentRequest, Place, deploy
from hpo.deploy.making import Workshop
from hpo.deploy.result import Deployment
from hpo.deploy.timing import Effort
from hpo.device import DeviceInfo
from hpo.errors import RunError
from hpo.inference.model import TrainedModel
from hpo.tasks.example import Example
from hpo.training.metrics import primary_mean
from hpo.trial.best_model import TrialSource, export_checkpoint, split_predictions
from hpo.trial.executor import Executor

pytestmark = pytest.mark.usefixtures("onnx_exports")

QUICK = Effort(rounds=2, seconds=0.1)


def trained(executor: Executor, folder: Path, **params: Any) -> Candidate:
    result = executor.run({}, folder / "trial", "key")
    assert result.outcome == "complete", result.reason
    source = TrialSource(0, params, result.telemetry)
    return Candidate(0, export_checkpoint(executor, folder / "trial", folder / "export", source))


def deployed(
    executor: Executor,
    candidate: Candidate,
    folder: Path,
    *names: str,
    max_drop: float = MAX_DROP,
    device: DeviceInfo = CPU,
    **options: Any,
) -> Deployment:
    request = DeploymentRequest(names, max_drop, effort=QUICK, **options)
    place = Place(device, folder / "artifacts", folder / "tokens")
    return deploy(executor.study, executor.dataset, candidate, request, place)


@pytest.fixture(scope="module")
def mood(tmp_path_factory: pytest.TempPathFactory) -> tuple[Executor, Candidate]:
    folder = tmp_path_factory.mktemp("mood")
    executor = Executor(resolve_study(load_study(write_mood_study(folder)), CPU), folder / "runs")
    return executor, trained(executor, folder)


@pytest.fixture
def ruined(mood: tuple[Executor, Candidate], tmp_path: Path) -> Candidate:
    return Candidate(0, ruin(Path(shutil.copytree(mood[1].exported, tmp_path / "ruined"))))


def test_forms_score_as_an_evaluation_and_as_a_loaded_model(tmp_path: Path) -> None:
    executor = tiny_executor(tmp_path, search_space={}, amp={"preset": "basic"})
    candidate = trained(executor, tmp_path)
    names = ("onnx_fp32", "onnx_int8_dynamic", "onnx_int8_static")
    found = deployed(executor, candidate, tmp_path, *names, max_drop=20.0)
    fp32, onnx, dynamic, _ = found.artifacts
    assert [row.artifact for row in found.artifacts] == ["fp32", *names]
    expected = split_predictions(executor, tmp_path / "trial", {}, "validation").metrics()
    for task in executor.tasks:
        for row, near in ((fp32, 1e-6), (onnx, 1e-3)):
            of_task = row.judged.tasks[task.name]
            assert of_task.metric == task.primary_metric
            assert of_task.value.value == pytest.approx(expected[task.name][of_task.metric], abs=near)
    assert (fp32.judged.drop.value, fp32.judged.drop.low, fp32.judged.drop.high) == (0, 0, 0)
    for row in found.artifacts:
        score, drop = row.judged.score, row.judged.drop
        assert score.low <= score.high
        assert drop.value == pytest.approx(100 * (fp32.judged.score.value - score.value), abs=1e-6)
        assert set(row.timings) == {1, 32}
        assert row.timings[1].p50_ms <= row.timings[1].p99_ms
    assert dynamic.weight_bytes < onnx.weight_bytes / 2
    assert found.best in [row for row in found.artifacts if row.judged.verdict == "as_good"]
    on_test = split_predictions(executor, tmp_path / "trial", {}, "test").metrics()
    assert found.test.fp32_score.value == pytest.approx(primary_mean(executor.tasks, on_test), abs=1e-6)
    assert found.test.num_examples == len(executor.dataset.splits["test"])
    assert "Its score is that of texts predicted alone." in found.notes[-1]
    model = hpo.load(tmp_path / "artifacts" / "onnx_int8_dynamic", device="cpu")
    assert model.precision == "int8"
    assert model.predict(["I sleep badly."])[0].keys() == {task.name for task in executor.tasks}
    stored = json.loads(json.dumps(found.as_json()))
    assert stored["artifacts"][2]["artifact"] == "onnx_int8_dynamic"
    assert stored["artifacts"][2]["timings"]["32"]["speed_up"].keys() == {"ratio", "low", "high"}


@pytest.mark.parametrize(
    ("features", "scored"),
    [({"avx2"}, ["fp32"]), ({"avx512_bf16"}, ["fp32", "bf16"])],
    ids=["without bf16", "with bf16"],
)
def test_the_best_of_the_scored_forms_is_chosen_when_the_time_is_over(
    mood: tuple[Executor, Candidate], tmp_path: Path, features: set[str], scored: list[str]
) -> None:
    made = tmp_path / "artifacts" / "onnx_fp32"
    found = deployed(
        *mood,
        tmp_path,
        *("onnx_fp32", "bf16"),
        device=replace(CPU, cpu_features=frozenset(features)),
        ends=lambda: "it is late" * made.exists(),
    )
    assert [row.artifact for row in found.artifacts] == scored
    assert found.left_out["onnx_fp32"] == "not scored, because it is late."
    assert found.best.timings.keys() == {1, 32}
    assert found.test is not None


def test_few_equal_rows_do_not_make_a_form_as_good(
    mood: tuple[Executor, Candidate], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = deployed(*mood, tmp_path, "onnx_fp32", max_drop=1.0)
    assert (found.artifacts[1].judged.verdict, found.best.artifact) == ("not_shown", "fp32")
    limit = (
        "With 40 labelled rows of validation, losses under 8.81 points cannot be excluded. A margin of 1 "
        "needs 368 such rows."
    )
    assert found.artifacts[1].judged.reason.endswith(limit)
    assert found.notes[0] == f"No form can be shown to be as good. {limit}"
    assert caplog.messages[0] == found.notes[0], "before the first form is made"


def test_the_fastest_as_good_on_validation_is_confirmed_on_test(
    mood: tuple[Executor, Candidate], ruined: Candidate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faster_and_faster(predict: Mapping[str, Any], *_: Any) -> dict[str, list[list[float]]]:
        return {name: [[1 / (1 + NAMES.index(name))] * 2] for name in predict}

    monkeypatch.setattr("hpo.deploy.deployment.time_in_turn", faster_and_faster)
    executor, sound = mood
    found = deployed(executor, sound, tmp_path / "sound", "onnx_fp32", "onnx_int8_static")
    assert found.best.artifact == "onnx_int8_static", "the fastest"
    assert (found.test.judged.verdict, found.test.judged.drop.value) == ("as_good", 0.0)
    assert found.test.num_examples == 320
    # The ruined model knows one of two classes. Validation has two rows of the other, so test shows it.
    splits = executor.dataset.splits
    chosen = []
    for number, word in enumerate((" good ", " bad ")):
        rows = sorted(splits["validation"], key=lambda one: word not in one.text)[:22]
        data = replace(executor.dataset, splits={**splits, "validation": rows}, fingerprint=f"class {number}")
        place = Place(CPU, tmp_path / str(number), tmp_path / "tokens")
        request = DeploymentRequest(("onnx_int8_static",), 30.0, effort=QUICK)
        of_class = deploy(executor.study, data, ruined, request, place)
        assert of_class.best.artifact == "fp32"
        assert of_class.test.judged.drop.value == 0
        chosen += [note for note in of_class.notes if "was chosen" in note]
    assert chosen == ["onnx_int8_static was chosen, but it is worse on test, so fp32 is deployed."]
    untested = deployed(executor, sound, tmp_path / "untested", "onnx_fp32", has_test=False)
    assert (untested.best.artifact, untested.test) == ("onnx_fp32", None)
    assert untested.notes[-1].startswith("No test split has labels")


def test_a_loaded_form_predicts_the_scored_labels(
    mood: tuple[Executor, Candidate], ruined: Candidate, tmp_path: Path
) -> None:
    executor = mood[0]
    names = ("onnx_fp32", "onnx_int8_dynamic", "onnx_int8_static")
    found = deployed(executor, ruined, tmp_path, *names, max_drop=90.0)
    examples: list[Example] = executor.dataset.splits["validation"]
    truth = [example.labels["mood"] for example in examples]
    scores = set()
    for row in found.artifacts:
        model = hpo.load(tmp_path / "artifacts" / row.artifact, device="cpu")
        said = [model.predict([example.text])[0]["mood"].label for example in examples]
        right = [label == true for label, true in zip(said, truth, strict=True)]
        assert sum(right) / len(right) == row.judged.score.value, row.artifact
        scores.add(row.judged.score.value)
    assert len(scores) > 1, "some of them have other labels than fp32"


def test_a_model_trained_with_flash_attention_is_deployed_on_a_cpu(
    mood: tuple[Executor, Candidate], tmp_path: Path
) -> None:
    executor, candidate = mood
    trial, source = candidate.exported.with_name("trial"), TrialSource(0, {"attention": "flash"}, {})
    exported = export_checkpoint(executor, trial, tmp_path / "export", source)
    assert json.loads((exported / "hpo.json").read_text())["attention"] == "flash"
    workshop = Workshop(exported, tmp_path / "artifacts", (), "cpu", trusted=False)
    (prediction,) = workshop.load(REFERENCE).predict(["a good day"])
    assert prediction["mood"].label == "good"
    assert json.loads((workshop.make(REFERENCE) / "hpo.json").read_text())["attention"] == "sdpa"


def test_an_impossible_form_is_left_out_with_the_reason(
    mood: tuple[Executor, Candidate], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, candidate = mood

    def fail(*_: object, **__: object) -> Path:
        raise RunError("no such operator.")

    with monkeypatch.context() as patched:
        patched.setattr("hpo.deploy.onnx_export.export_onnx", fail)
        found = deployed(executor, candidate, tmp_path / "made", "onnx_fp32", "onnx_int8_dynamic")
    assert [row.artifact for row in found.artifacts] == ["fp32"]
    assert found.left_out == {"onnx_fp32": "no such operator.", "onnx_int8_dynamic": "no such operator."}
    predict = TrainedModel.predict

    def failing(model: TrainedModel, rows: Any, **of: Any) -> Any:
        if model.precision == "int8" and len(rows) > 1:
            raise RunError("too many texts.")
        return predict(model, rows, **of)

    monkeypatch.setattr(TrainedModel, "predict", failing)
    found = deployed(executor, candidate, tmp_path, "onnx_fp32", "onnx_int8_static")
    assert [row.artifact for row in found.artifacts] == ["fp32", "onnx_fp32"]
    assert found.left_out == {"onnx_int8_static": "it failed while it was timed: too many texts."}
    assert found.best in found.artifacts


def test_a_model_with_nonfinite_logits_in_fp32_ends_it(
    mood: tuple[Executor, Candidate], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpo.deploy.deployment.split_statistics", lambda *_, **__: None)
    with pytest.raises(RunError, match="trial 0 are not finite in fp32"):
        deployed(*mood, tmp_path)
