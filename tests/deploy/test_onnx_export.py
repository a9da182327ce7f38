from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from support.tiny_encoders import KIND_TASKS
from support.tiny_onnx import TEXTS, probabilities, random_batch, write_both

import hpo
from hpo.deploy import onnx_export
from hpo.deploy.onnx_export import export_onnx
from hpo.errors import ModelError
from hpo.inference.model import TrainedModel

EXPORTED: dict[str, dict[str, str]] = {
    "bert": {},  # that of `tiny_exports`
    "roberta": {"pooling": "max", "head_type": "mlp"},
    "modernbert": {"pooling": "attention"},
    "deberta-v2": {"pooling": "cls"},
}
"""Families of encoders whose graphs differ, with a pooling and a kind of heads of their own."""


@pytest.fixture
def model(tiny_exports: Path) -> TrainedModel:
    return hpo.load(tiny_exports / "torch", device="cpu")


@pytest.mark.parametrize(
    "family", ["bert", pytest.param("roberta", marks=pytest.mark.slow), "modernbert", "deberta-v2"]
)
def test_logits_and_probabilities_are_those_of_pytorch(
    family: str, tiny_exports: Path, tmp_path: Path
) -> None:
    if family == "bert":
        model, graph = (hpo.load(tiny_exports / name, device="cpu") for name in ("torch", "onnx"))
    else:
        model, graph = write_both(tmp_path, family, **EXPORTED[family])
    for lengths in ((12, 7), (5,), (1,), (32, 3, 1, 20), (17,) * 9):
        batch = random_batch(lengths)
        with torch.no_grad():
            wanted, found = model(*batch).logits, graph(*batch).logits
        assert list(found) == [task.name for task in KIND_TASKS]
        for name, logits in found.items():
            assert logits.abs().max() > 0.05
            torch.testing.assert_close(logits, wanted[name], atol=1e-4, rtol=0, msg=f"{name} of {lengths}")
    np.testing.assert_allclose(probabilities(graph), probabilities(model), atol=1e-5)
    np.testing.assert_allclose(probabilities(graph, TEXTS[1:2]), probabilities(model)[1:2], atol=1e-5)


def test_a_row_of_padding_leaves_the_others_as_they_are(tiny_exports: Path) -> None:
    graph = hpo.load(tiny_exports / "onnx", device="cpu")
    with_padding, alone = graph(*random_batch((12, 0, 7))).logits, {}
    for row, length in ((0, 12), (2, 7)):
        batch = [one[row : row + 1, :length] for one in random_batch((12, 0, 7))]
        alone[row, length] = graph(*batch).logits
    for name, logits in with_padding.items():
        assert logits.isfinite().all()
        for (row, length), of_row in alone.items():
            found = logits[row, :length] if logits.ndim == 3 else logits[row]
            torch.testing.assert_close(found, of_row[name][0], atol=1e-5, rtol=0)


def test_the_folder_stands_alone(tiny_exports: Path) -> None:
    names = {file.name for file in (tiny_exports / "onnx").iterdir()}
    assert names == {
        *("model.onnx", "hpo.json"),
        *("tokenizer.json", "tokenizer_config.json", "config.json"),
    }
    assert [file.name for file in tiny_exports.iterdir()] in (["torch", "onnx"], ["onnx", "torch"])
    content = json.loads((tiny_exports / "onnx" / "hpo.json").read_text())
    of_torch = json.loads((tiny_exports / "torch" / "hpo.json").read_text())
    assert (content["format"], content["runtime"]) == (3, "onnx")
    assert of_torch["format"] == 2
    for key in of_torch.keys() - {"format", "checksums"}:
        assert content[key] == of_torch[key], key
    assert content["onnx"]["precision"] == "fp32"
    assert content["onnx"]["quantization"] is None
    assert content["onnx"]["versions"].keys() == {"torch", "onnx", "onnxscript", "onnxruntime"}
    graph = (tiny_exports / "onnx" / "model.onnx").read_bytes()
    assert b"site-packages" not in graph, "the exporter's notes have paths of this machine"


def test_the_terminal_shows_nothing_of_the_exporter(
    model: TrainedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    root = logging.getLogger()
    handlers, levels = list(root.handlers), logging.getLogger("torch.onnx").level
    capfd.readouterr()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    export_onnx(model, tmp_path / "onnx")
    assert not any(Path().iterdir())
    assert capfd.readouterr() == ("", "")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert (list(root.handlers), logging.getLogger("torch.onnx").level) == (handlers, levels)
    assert model(*random_batch((3,))).logits["single"].requires_grad, "the model is as it was"


def refused(model: TrainedModel, folder: Path, message: str) -> None:
    before = sorted(folder.rglob("*"))
    with pytest.raises(ModelError, match=message) as raised:
        export_onnx(model, folder / "onnx")
    assert "\n" not in str(raised.value)
    assert sorted(folder.rglob("*")) == before


def test_models_that_are_refused(
    tiny_exports: Path, model: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(hpo.load(tiny_exports / "onnx", device="cpu"), tmp_path, "but this model is ONNX already")
    config = model.network.encoder.config
    monkeypatch.setattr(config, "_attn_implementation_internal", "flash_attention_2")
    refused(model, tmp_path, 'ONNX has no flash_attention_2. Load the model with attention="sdpa"')
    monkeypatch.undo()
    monkeypatch.setattr(onnx_export, "LARGEST_BYTES", 10_000)
    refused(model, tmp_path, r"at most 2 GB \(protobuf's limit\), but the model has 0\.0 GB")
    monkeypatch.undo()
    refused(
        model.use("cpu", "bf16-true"), tmp_path, 'this one is in bf16-true. Load it with precision="fp32"'
    )


def test_what_the_exporter_or_the_disk_refuse(
    model: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no decomposition\nof aten.new_op")

    monkeypatch.setattr(torch.onnx, "export", fails)
    refused(model, tmp_path, r"BertModel cannot be exported to ONNX \(RuntimeError: no decomposition of aten")
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "notes.txt").write_text("mine")
    refused(model, tmp_path, "an export needs a new or empty folder, but: this one holds other files")


def test_a_graph_with_other_logits_is_refused(
    model: TrainedModel, tiny_exports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proto = onnx.load(tiny_exports / "onnx" / "model.onnx")
    (bias,) = [one for one in proto.graph.initializer if one.name.endswith("heads.2.1.bias")]
    bias.raw_data = np.float32([7.0]).tobytes()
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: SimpleNamespace(model_proto=proto))
    refused(model, tmp_path, "must give PyTorch's logits, but those of `number` differ by")
