"""A trained model in use: its predictions are those of an evaluation, whatever the kind of task."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.every_kind import write_every_kind
from support.readme import README
from support.tiny import CPU
from torch import Tensor

import hpo
from hpo.config.resolved_study import resolve_study
from hpo.config.study_config import load_study
from hpo.errors import DataError, InputError, ModelError, RunError
from hpo.inference import model as inference
from hpo.inference.model import Prediction, TrainedModel
from hpo.models.export import load_exported
from hpo.tasks.example import Example
from hpo.training.metrics import score
from hpo.trial.best_model import TrialSource, export_checkpoint, split_predictions
from hpo.trial.executor import Executor

KINDS = ["windows", "pairs"]


@dataclass(frozen=True)
class Exported:
    """A trial's export, and what the trial was made and scored with."""

    folder: Path
    executor: Executor
    metrics: dict[str, dict[str, float]]
    """On test, by `split_predictions`."""

    @property
    def examples(self) -> Sequence[Example]:
        return self.executor.dataset.splits["test"]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [{"text": example.text, "segments": dict(example.segments)} for example in self.examples]


def make_export(folder: Path, *, pairs: bool) -> Exported:
    executor = Executor(
        resolve_study(load_study(write_every_kind(folder, pairs=pairs)), CPU), folder / "runs"
    )
    params = {"learning_rate": 5e-3}
    result = executor.run(params, folder / "trial", "test")
    assert result.outcome == "complete", result.traceback
    source = TrialSource(0, params, result.telemetry)
    out = export_checkpoint(executor, folder / "trial", folder / "model", source)
    return Exported(out, executor, split_predictions(executor, folder / "trial", params, "test").metrics())


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    return {kind: make_export(tmp_path_factory.mktemp(kind), pairs=kind == "pairs") for kind in KINDS}


@pytest.fixture
def exported(exports: dict[str, Exported], request: pytest.FixtureRequest) -> Exported:
    return exports[getattr(request, "param", "windows")]


def load(exported: Exported, **options: Any) -> TrainedModel:
    return hpo.load(exported.folder, **{"device": "cpu", **options})


def as_decoded(model: TrainedModel, predictions: Sequence[Prediction], task: str) -> list[Any]:
    """What `hpo.training.metrics` takes of the predictions for a task."""
    kind = next(one.kind for one in model.tasks if one.name == task)
    if kind in ("single_label", "multi_label", "regression"):
        return [prediction[task].label for prediction in predictions]
    return [[(s.name, s.start, s.end) for s in prediction[task].spans] for prediction in predictions]


@pytest.mark.parametrize("exported", KINDS, indirect=True)
def test_predictions_score_as_the_trial_does(exported: Exported) -> None:
    model = load(exported)
    predictions = model.predict(exported.rows)
    split = exported.executor.loader.tokens("test", _config(exported))
    assert split.num_windows > len(exported.examples), "some texts have several windows"
    assert {task.name for task in model.tasks} == exported.metrics.keys()
    for task in model.tasks:
        found = score(task, as_decoded(model, predictions, task.name), exported.examples)
        assert found == pytest.approx(exported.metrics[task.name], abs=1e-6), task.name
        for row, prediction in zip(exported.rows, predictions, strict=True):
            for span in prediction[task.name].spans:
                assert span.text == row["text"][span.start : span.end] != ""


def _config(exported: Exported) -> Any:
    from hpo.config.trial_config import build_trial_config

    return build_trial_config(exported.executor.study, {}, "fp32", exported.executor.amp)


def test_a_plain_script_gives_the_same_probabilities(exported: Exported) -> None:
    """Windows by the tokenizer of transformers, `forward`, and the joining of windows written out."""
    model = load(exported)
    windowing = model.settings.windowing
    texts = [row["text"] for row in exported.rows]
    for text, prediction in zip(texts, model.predict(texts), strict=True):
        batch = model.tokenizer(
            text,
            truncation=True,
            max_length=windowing.max_length,
            stride=windowing.stride,
            return_overflowing_tokens=True,
            padding=True,
            return_tensors="pt",
        )
        with torch.no_grad():
            logits = model(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                token_type_ids=batch["token_type_ids"],
            ).logits
        topic = logits["topic"].double().log_softmax(-1).mean(dim=0).softmax(-1)
        tags = logits["tags"].double().sigmoid().amax(dim=0)
        assert list(prediction["topic"].scores.values()) == pytest.approx(topic.tolist(), abs=1e-6)
        assert list(prediction["tags"].scores.values()) == pytest.approx(tags.tolist(), abs=1e-6)
        of_label = max(prediction["topic"].scores, key=prediction["topic"].scores.__getitem__)
        assert prediction["topic"].label == of_label
        threshold = model.decisions["tags"].threshold
        above = [name for name, value in prediction["tags"].scores.items() if value > threshold]
        assert prediction["tags"].label == above
        urgency = next(task for task in model.tasks if task.name == "urgency")
        value = logits["urgency"].double().mean() * urgency.target_std + urgency.target_mean
        assert prediction["urgency"].label == pytest.approx(float(value), abs=1e-5)


def test_the_script_of_the_readme(
    exported: Exported, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    section = README.read_text().split("## Using the model", 1)[1].split("\n## ", 1)[0]
    (script,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    monkeypatch.chdir(exported.folder.parent)
    names: dict[str, Any] = {}
    exec(compile(script, "README.md", "exec"), names)
    shown = capsys.readouterr().out.splitlines()
    tasks = [task.name for task in names["model"].tasks]
    assert [line.split()[0] for line in shown] == tasks * 2
    topics = [line for line in shown if line.startswith("topic ")]
    assert topics[0] != topics[1]  # each text has predictions of its own


def test_the_order_and_the_batches_change_nothing(exported: Exported) -> None:
    model = load(exported)
    texts = [row["text"] for row in exported.rows]
    together = model.predict(texts)
    backwards = model.predict(texts[::-1], max_tokens=1)[::-1]
    for one, other in zip(together, backwards, strict=True):
        for name, found in one.items():
            assert other[name].scores == pytest.approx(found.scores, abs=1e-6)
            assert other[name].spans == found.spans


def test_forward_is_that_of_transformers(exported: Exported) -> None:
    model = load(exported)
    batch = model.tokenizer(["Late again!", "Ann paid too much"], padding=True, return_tensors="pt")
    output = model(**batch)
    assert isinstance(output, inference.MultitaskOutput)
    assert output["logits"] is output.logits is output[0]
    assert output.logits is not None
    shapes = {name: tuple(logits.shape) for name, logits in output.logits.items()}
    num_tokens = batch["input_ids"].shape[1]
    assert shapes["topic"] == (2, 3)
    assert shapes["places"] == (2, num_tokens, 6)
    whole: dict[str, Tensor] = model(batch["input_ids"][1:]).logits
    torch.testing.assert_close(whole["topic"], output.logits["topic"][1:])
    output.logits["topic"].sum().backward()
    assert model.network.heads[0][-1].weight.grad is not None


def test_the_export_tells_how_it_was_made(exported: Exported) -> None:
    _, _, settings = load_exported(exported.folder)
    assert settings.windowing == exported.executor.loader.windowing(_config(exported))
    provenance = settings.provenance
    assert (provenance["study"], provenance["trial"]) == ("tiny", 0)
    assert provenance["scores"].keys() == {"validation"}
    assert provenance["precision"]["requested"] == provenance["precision"]["effective"] == "fp32"
    assert provenance["precision"]["observed"]["linear_products"].keys() == {"float32"}
    assert provenance["data"]["fingerprint"] == exported.executor.dataset.fingerprint
    assert provenance["versions"].keys() >= {"hpo", "torch", "transformers", "safetensors"}
    assert not [name for name in exported.folder.iterdir() if name.suffix in (".bin", ".pt", ".pkl", ".py")]


def test_the_precision_is_that_of_the_trial_where_the_device_has_it(
    exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_bf16 = replace(CPU, cpu_features=frozenset({"avx512_bf16"}))
    monkeypatch.setattr(inference, "probe_device", lambda _kind: with_bf16)
    folder = copied(exported, tmp_path, precision="bf16")
    reduced, exact = hpo.load(folder), hpo.load(folder, precision="32-true")
    assert (reduced.precision, exact.precision) == ("bf16", "fp32")
    texts = [row["text"] for row in exported.rows]
    topics = [
        np.array([list(one["topic"].scores.values()) for one in model.predict(texts)])
        for model in (reduced, exact)
    ]
    assert 1e-6 < np.abs(topics[0] - topics[1]).max() < 0.05
    batch = reduced.tokenizer(texts[:2], padding=True, truncation=True, max_length=24, return_tensors="pt")
    assert reduced(**batch).logits["topic"].dtype == torch.bfloat16
    # Under a reduced precision the batches are those of the study's evaluations, for they change results.
    again = reduced.predict(texts, max_tokens=reduced.settings.batch_tokens)
    assert [one["topic"].scores for one in again] == [one["topic"].scores for one in reduced.predict(texts)]
    assert exact.use("cpu", "bf16-true").network.heads[0][-1].weight.dtype == torch.bfloat16
    assert exact.use("cpu", "fp32").network.heads[0][-1].weight.dtype == torch.float32

    monkeypatch.setattr(inference, "probe_device", lambda _kind: CPU)
    with caplog.at_level(logging.WARNING, "hpo.inference"):
        assert hpo.load(folder).precision == "fp32"
    assert "The model runs in fp32 here." in caplog.text
    assert hpo.load(folder, precision="bf16").precision == "bf16", "emulated, where it is asked for"


def copied(exported: Exported, folder: Path, **changes: Any) -> Path:
    """A copy of the export with other content of hpo.json."""
    out = folder / "copy"
    out.mkdir()
    for file in exported.folder.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    content = json.loads((out / "hpo.json").read_text())
    (out / "hpo.json").write_text(json.dumps(content | changes))
    return out


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"precision": "fp64"}, InputError, "there is no 'fp64'. Did you mean `fp16`"),
        ({"precision": "fp8"}, ModelError, "`fp8` needs CUDA"),
        ({"device": "tpu"}, InputError, "device must be auto, cpu, cuda or cuda:N, but got 'tpu'"),
        ({"device": "cuda:99"}, InputError, "there is no device 'cuda:99' here"),
    ],
)
def test_what_the_machine_has_not(
    exported: Exported, options: dict[str, str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load(exported, **options)


def test_texts_of_no_and_of_a_million_characters(
    exported: Exported, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    windowing = {"max_length": 24, "long_text": "truncate", "stride": 0, "pair_segments": None}
    model = hpo.load(copied(exported, tmp_path, windowing=windowing), device="cpu")
    assert model.predict([]) == []
    million = "late again " * 90_910
    with caplog.at_level(logging.WARNING, "hpo.inference"):
        (prediction,) = model.predict([million[:1_000_000]])
    assert "1 of 1 texts are longer than 24 tokens and lose their end" in caplog.text
    (beginning,) = model.predict([million[:200]])
    assert prediction["topic"].scores == pytest.approx(beginning["topic"].scores, abs=1e-6)


def test_texts_that_cannot_be_read(exported: Exported, caplog: pytest.LogCaptureFixture) -> None:
    model = load(exported)
    texts: list[Any] = ["late", "", " \n", 3, "late"]
    with pytest.raises(DataError, match=r"texts\[1\]: `text` is empty\..*skip_bad_rows=True"):
        model.predict(texts)
    (late,) = model.predict(["late"])
    assert model.predict(texts, skip_bad_rows=True) == [late, {}, {}, {}, late]
    assert "3 of 5 texts cannot be read and have no prediction" in caplog.text
    assert "texts[3]: a row must be a JSON object, but got 3" in caplog.text
    assert model.predict([""], skip_bad_rows=True) == [{}]


def test_what_is_no_list_of_texts(exported: Exported, exports: dict[str, Exported]) -> None:
    model = load(exported)
    with pytest.raises(DataError, match=r"predict takes a list of texts, but got one text"):
        model.predict("late")
    with pytest.raises(DataError, match=r"texts\[0\]: `segments` must have `question`"):
        load(exports["pairs"]).predict(["late"])
    with pytest.raises(InputError, match="max_tokens must be at least 1, but got 0"):
        model.predict(["late"], max_tokens=0)


def test_logits_that_are_not_finite(exported: Exported) -> None:
    model = load(exported)
    with torch.no_grad():
        model.network.heads[0][-1].bias.fill_(float("nan"))
    with pytest.raises(RunError, match=r"not finite in fp32\. Tasks: topic\."):
        model.predict(["late"])


@pytest.mark.parametrize("name", ["model.safetensors", "heads.safetensors", "tokenizer.json"])
def test_random_bytes_inside_a_file(exported: Exported, tmp_path: Path, name: str) -> None:
    """Of the same length, so that weights would be read, and predict nonsense."""
    folder = copied(exported, tmp_path)
    content = (folder / name).read_bytes()
    half = len(content) // 2
    (folder / name).write_bytes(content[:half] + np.random.default_rng(0).bytes(len(content) - half))
    with pytest.raises(ModelError, match=rf"{folder} must be .*: {name} has changed since: its checksum"):
        hpo.load(folder)


def test_no_pickle_is_read_in_place_of_the_weights(exported: Exported, tmp_path: Path) -> None:
    folder = copied(exported, tmp_path)
    model, _, _ = load_exported(folder)
    torch.save(model.encoder.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"there is no model\.safetensors"):
        hpo.load(folder)
