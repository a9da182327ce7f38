import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.every_kind import every_kind_executor
from support.tiny import CPU
from support.tiny_encoders import copy_export
from support.tiny_loop import config_of

import hpo
from hpo.errors import DataError, ModelError, RunError
from hpo.inference import model as inference
from hpo.inference.model import Prediction, TrainedModel
from hpo.tasks.example import Example
from hpo.training.metrics import score
from hpo.trial.best_model import export_checkpoint, split_predictions
from hpo.trial.executor import Executor
from hpo.trial.telemetry import StoredTrial

KINDS = ["windows", "pairs"]


@dataclass(frozen=True)
class Exported:
    """Export of a trial, its executor and its metrics on test."""

    folder: Path
    executor: Executor
    metrics: dict[str, dict[str, float]]

    @property
    def examples(self) -> Sequence[Example]:
        return self.executor.dataset.splits["test"]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [{"text": example.text, "segments": dict(example.segments)} for example in self.examples]


def make_export(folder: Path, *, pairs: bool) -> Exported:
    executor, params = every_kind_executor(folder, pairs=pairs), {"learning_rate": 5e-3}
    result = executor.run(params, folder / "trial", "test")
    assert result.outcome == "complete", result.traceback
    source = StoredTrial(0, params, result.telemetry)
    out = export_checkpoint(executor, folder / "trial", folder / "model", source)
    return Exported(out, executor, split_predictions(executor, folder / "trial", params, "test").metrics())


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    return {kind: make_export(tmp_path_factory.mktemp(kind), pairs=kind == "pairs") for kind in KINDS}


@pytest.fixture
def exported(exports: dict[str, Exported], request: pytest.FixtureRequest) -> Exported:
    return exports[getattr(request, "param", "windows")]


@pytest.fixture
def model(exported: Exported) -> TrainedModel:
    return hpo.load(exported.folder, device="cpu")


def decoded(model: TrainedModel, predictions: Sequence[Prediction], task: str) -> list[Any]:
    """Return the predictions for a task as `hpo.training.metrics` takes them."""
    kind = next(one.kind for one in model.tasks if one.name == task)
    if kind in ("single_label", "multi_label", "regression"):
        return [prediction[task].label for prediction in predictions]
    return [[(s.name, s.start, s.end) for s in prediction[task].spans] for prediction in predictions]


def test_forward_equals_a_batch_of_transformers(model: TrainedModel) -> None:
    batch = model.tokenizer(["Late again!", "Ann paid too much"], padding=True, return_tensors="pt")
    output = model(**batch)
    assert isinstance(output, inference.MultitaskOutput)
    assert output["logits"] is output.logits is output[0]
    shapes = {name: tuple(logits.shape) for name, logits in output.logits.items()}
    assert shapes["topic"] == (2, 3)
    assert shapes["places"] == (2, batch["input_ids"].shape[1], 6)
    alone = model(batch["input_ids"][1:]).logits
    torch.testing.assert_close(alone["topic"], output.logits["topic"][1:])
    output.logits["topic"].sum().backward()
    assert model.network.heads[0][-1].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("exported", KINDS, indirect=True)
def test_predictions_score_like_the_trial(exported: Exported, model: TrainedModel) -> None:
    """In any order and in batches of any size."""
    predictions = model.predict(exported.rows[::-1], max_tokens=1)[::-1]
    config, loader = config_of(exported.executor), exported.executor.loader
    assert model.settings.windowing == loader.windowing(config)
    num_windows = loader.tokens("test", config).num_windows
    assert num_windows > len(exported.examples), "some texts have several windows"
    assert {task.name for task in model.tasks} == exported.metrics.keys()
    for task in model.tasks:
        likely = np.array([[*one[task.name].scores.values()] for one in predictions])
        given = decoded(model, predictions, task.name), exported.examples, likely if likely.size else None
        metrics = score(task, *given)
        assert metrics == pytest.approx(exported.metrics[task.name], abs=1e-6), task.name
        for row, prediction in zip(exported.rows, predictions, strict=True):
            for span in prediction[task.name].spans:
                assert span.text == row["text"][span.start : span.end] != ""


def test_native_precision(exported: Exported, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    """It is the trial's, where the device has it."""
    with_bf16 = replace(CPU, cpu_features=frozenset({"avx512_bf16"}))
    monkeypatch.setattr(inference, "probe_device", lambda _kind: with_bf16)
    folder = copy_export(exported.folder, tmp_path, precision="bf16")
    reduced, exact = hpo.load(folder), hpo.load(folder, precision="32-true")
    assert (reduced.precision, exact.precision) == ("bf16", "fp32")
    # Under a reduced precision the batches are those of the study's evaluations, since they change results.
    sized = {"max_tokens": reduced.settings.batch_tokens}
    first, again, in_fp32 = (
        np.array([list(one["topic"].scores.values()) for one in model.predict(exported.rows, **size)])
        for model, size in ((reduced, {}), (reduced, sized), (exact, {}))
    )
    assert 1e-6 < np.abs(first - in_fp32).max() < 0.05
    assert (first == again).all()
    assert exact.use("cpu", "bf16-true").network.heads[0][-1].weight.dtype == torch.bfloat16
    with pytest.raises(ModelError, match="a model in bf16-true cannot change its precision: load it again"):
        exact.use("cpu", "fp32")  # its weights have been rounded
    rounded = hpo.load(copy_export(exported.folder, tmp_path / "rounded", precision="bf16-true"))
    assert rounded.use("cpu", "fp32").network.heads[0][-1].weight.dtype == torch.float32

    monkeypatch.setattr(inference, "probe_device", lambda _kind: CPU)
    with caplog.at_level(logging.WARNING, "hpo.inference"):
        assert hpo.load(folder).precision == "fp32"
    assert "The model runs in fp32 here." in caplog.text
    assert hpo.load(folder, precision="bf16").precision == "bf16", "emulated on request"


def test_unreadable_texts(model: TrainedModel, exports: dict[str, Exported], caplog: Any) -> None:
    texts: list[Any] = ["late", "", " \n", 3, "late"]
    with pytest.raises(DataError, match=r"texts\[1\]: `text` is empty\..*skip_bad_rows=True"):
        model.predict(texts)
    (late,) = model.predict(["late"])
    assert model.predict(texts, skip_bad_rows=True) == [late, {}, {}, {}, late]
    assert "3 of 5 texts cannot be read and have no prediction" in caplog.text
    assert "texts[3]: a row must be a JSON object, but got 3" in caplog.text
    with pytest.raises(DataError, match=r"predict takes a list of texts, but got one text"):
        model.predict("late")
    with pytest.raises(DataError, match=r"texts\[0\]: `segments` must have `question`"):
        hpo.load(exports["pairs"].folder, device="cpu").predict(["late"])


def test_truncated_text_is_reported(exported: Exported, tmp_path: Path, caplog: Any) -> None:
    windowing = {"max_length": 24, "long_text": "truncate", "stride": 0, "pair_segments": None}
    model = hpo.load(copy_export(exported.folder, tmp_path, windowing=windowing), device="cpu")
    assert model.predict([]) == list(model.predict_examples([])) == []
    with caplog.at_level(logging.WARNING, "hpo.inference"):
        long, start = (model.predict(["late again " * num])[0] for num in (90_000, 20))
    assert "1 of 1 texts are longer than 24 tokens and lose their end" in caplog.text
    assert long["topic"].scores == pytest.approx(start["topic"].scores, abs=1e-6)


def test_nonfinite_logits_raise(model: TrainedModel) -> None:
    with torch.no_grad():
        model.network.heads[0][-1].bias.fill_(float("nan"))
    with pytest.raises(RunError, match=r"not finite in fp32\. Tasks: topic\."):
        model.predict(["late"])
