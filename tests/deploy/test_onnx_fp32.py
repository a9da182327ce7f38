import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
import torch
from support.tiny_encoders import BERT
from support.tiny_onnx import TEXTS, probabilities, random_batch, write_both

import hpo
from hpo.deploy import onnx_fp32
from hpo.deploy.onnx_fp32 import export_onnx
from hpo.errors import ModelError
from hpo.inference.model import TrainedModel
from hpo.models.encoder import load_encoder
from hpo.models.export import MLFLOW_FILES

LONGFORMER = {**BERT, "model_type": "longformer", "attention_window": [16, 16]}

FAMILIES: dict[str, dict[str, str]] = {  # with the heads of each
    "bert": {},  # that of `tiny_exports`
    "roberta": {"pooling": "max", "head_type": "mlp"},
    "modernbert": {"pooling": "attention"},
    "deberta-v2": {"pooling": "cls"},
}


@pytest.mark.parametrize(
    "family", ["bert", pytest.param("roberta", marks=pytest.mark.slow), "modernbert", "deberta-v2"]
)
def test_logits_and_probabilities_equal_pytorch(family: str, tiny_exports: Path, tmp_path: Path) -> None:
    if family == "bert":
        model, graph = (hpo.load(tiny_exports / name, device="cpu") for name in ("torch", "onnx"))
    else:
        model, graph = write_both(tmp_path, family, **FAMILIES[family])
    for lengths in ((12, 7), (5,), (1,), (32, 3, 1, 20), (17,) * 9):
        batch = random_batch(lengths)
        with torch.no_grad():
            expected, logits = model(*batch).logits, graph(*batch).logits
        assert list(logits) == [task.name for task in model.tasks]
        for name, values in logits.items():
            assert values.abs().max() > 0.05
            torch.testing.assert_close(values, expected[name], atol=1e-4, rtol=0)
    np.testing.assert_allclose(probabilities(graph), probabilities(model), atol=1e-5)
    np.testing.assert_allclose(probabilities(graph, TEXTS[1:2]), probabilities(model)[1:2], atol=1e-5)


def test_folder_is_complete(tiny_exports: Path) -> None:
    folder = tiny_exports / "onnx"
    names = {"model.onnx", "hpo.json", "config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in folder.iterdir()} == names | set(MLFLOW_FILES)
    content, other = (json.loads((tiny_exports / one / "hpo.json").read_text()) for one in ("onnx", "torch"))
    assert (content["format"], content["runtime"], other["format"]) == (3, "onnx", 2)
    assert all(content[key] == other[key] for key in other.keys() - {"format", "checksums"})
    assert (content["onnx"]["precision"], content["onnx"]["quantization"]) == ("fp32", None)
    assert content["onnx"]["versions"].keys() == {"torch", "onnx", "onnxscript", "onnxruntime"}
    assert b"site-packages" not in (folder / "model.onnx").read_bytes(), "paths of this machine"


def assert_refused(model: TrainedModel, folder: Path, message: str) -> None:
    before = sorted(folder.rglob("*"))
    with pytest.raises(ModelError, match=message):
        export_onnx(model, folder / "onnx")
    assert sorted(folder.rglob("*")) == before


def test_unfit_models_are_refused(tiny_exports: Path, tmp_path: Path, monkeypatch: Any) -> None:
    model, graph = (hpo.load(tiny_exports / name, device="cpu") for name in ("torch", "onnx"))
    assert_refused(graph, tmp_path, "this model is ONNX already")
    config = model.network.encoder.config
    failing = Mock(side_effect=RuntimeError("no decomposition\nof aten.new_op"))
    cannot = r"BertModel cannot be exported to ONNX \(RuntimeError: no decomposition"
    for owner, name, value, message in (
        (config, "_attn_implementation_internal", "flash_attention_2", "ONNX has no flash_attention_2"),
        (onnx_fp32, "LARGEST_BYTES", 10_000, r"at most 2 GB \(protobuf's limit\), but the model has 0\.0 GB"),
        (torch.onnx, "export", failing, cannot),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, value)
            assert_refused(model, tmp_path, message)
    assert_refused(model.use("cpu", "bf16-true"), tmp_path, "this one is in bf16-true")


def test_failed_export_prints_no_graph(tiny_exports: Path, tmp_path: Path, capfd: Any) -> None:
    model = hpo.load(tiny_exports / "torch", device="cpu")
    model.network.encoder = load_encoder(LONGFORMER, attention="eager")
    assert_refused(model, tmp_path, "LongformerModel cannot be exported to ONNX")
    assert capfd.readouterr() == ("", "")


def test_graph_with_other_logits_is_refused(tiny_exports: Path, tmp_path: Path, monkeypatch: Any) -> None:
    model = hpo.load(tiny_exports / "torch", device="cpu")
    proto = onnx.load(tiny_exports / "onnx" / "model.onnx")
    (bias,) = [one for one in proto.graph.initializer if one.name.endswith("heads.2.1.bias")]
    bias.raw_data = np.float32([7.0]).tobytes()
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: SimpleNamespace(model_proto=proto))
    assert_refused(model, tmp_path, "must give PyTorch's logits, but those of `number` differ by")
