import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_encoders import copy_export
from support.tiny_onnx import random_batch

import hpo
from hpo.deploy.onnx_fp32 import export_onnx
from hpo.errors import ModelError


@pytest.fixture
def folder(tiny_exports: Path) -> Path:
    """Folder with the exports `torch` and `onnx` of one model."""
    return tiny_exports


def test_precision_attention_and_device_are_fixed(folder: Path, tmp_path: Path) -> None:
    graph = hpo.load(folder / "onnx")
    assert (graph.device, graph.precision) == (torch.device("cpu"), "fp32")
    assert graph.use("cpu").use("auto", "fp32").to("cpu").float() is graph
    with pytest.raises(ModelError, match="in fp32: its precision must be that, but got 'bf16'"):
        hpo.load(folder / "onnx", precision="bf16")
    for refused in (graph.half, lambda: graph.to("meta")):
        with pytest.raises(ModelError, match=r"it cannot be cast, and runs on the CPU\. Use device cpu"):
            refused()
    with pytest.raises(ModelError, match="an ONNX export, whose attention is fixed"):
        hpo.load(folder / "onnx", attention="eager")
    # The trial's precision says nothing about the graph's.
    assert hpo.load(copy_export(folder / "onnx", tmp_path, precision="bf16")).precision == "fp32"


def test_tokenizer_beside_another_type_of_encoder(folder: Path, tmp_path: Path) -> None:
    copy = copy_export(folder / "onnx", tmp_path, checksums={})
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "qwen2", "vocab_size": 31_000}))
    tokenizers = [hpo.load(each).tokenizer for each in (copy, folder / "onnx")]
    assert tokenizers[0]("can't sleep") == tokenizers[1]("can't sleep")


def test_threads_follow_pytorch(folder: Path) -> None:
    graph, before = hpo.load(folder / "onnx"), torch.get_num_threads()
    network: Any = graph.network
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            graph(*random_batch((3,)))
            assert network._session.get_session_options().intra_op_num_threads == num_threads
    finally:
        torch.set_num_threads(before)


def test_missing_packages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ModelError, match=r"needs onnxruntime, .*make install EXTRAS=onnx`"):
        hpo.load(folder / "onnx")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ModelError, match=r"needs onnxscript, .*make install EXTRAS=onnx`"):
        export_onnx(hpo.load(folder / "torch", device="cpu"), folder / "other")


@pytest.mark.parametrize("name", ["model.onnx", "hpo.json", "tokenizer.json"])
def test_torn_file_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    file = copy_export(folder / "onnx", tmp_path, checksums={}) / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ModelError, match=str(file.parent)):
        hpo.load(file.parent)
