"""A model of an ONNX export in use: as that of PyTorch, and clear where it cannot be."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_onnx import TEXTS, random_batch

import hpo
from hpo.deploy.onnx_export import export_onnx
from hpo.device import DeviceInfo
from hpo.errors import InputError, ModelError, RunError
from hpo.inference import model as inference
from hpo.inference.model import TrainedModel
from hpo.inference.onnx_network import OnnxNetwork
from hpo.models.export import load_exported


@pytest.fixture
def folder(tiny_exports: Path) -> Path:
    """With the exports `torch` and `onnx` of one model."""
    return tiny_exports


@pytest.fixture
def model(folder: Path) -> TrainedModel:
    return hpo.load(folder / "torch", device="cpu")


@pytest.fixture
def graph(folder: Path) -> TrainedModel:
    return hpo.load(folder / "onnx", device="cpu")


def network(graph: TrainedModel) -> OnnxNetwork:
    assert isinstance(graph.network, OnnxNetwork)
    return graph.network


def copied(folder: Path, tmp_path: Path, **changes: Any) -> Path:
    """A copy of the ONNX export with other content of hpo.json."""
    out = Path(shutil.copytree(folder / "onnx", tmp_path / "copy"))
    content = json.loads((out / "hpo.json").read_text())
    (out / "hpo.json").write_text(json.dumps(content | changes))
    return out


def test_predictions_equal_pytorch(model: TrainedModel, graph: TrainedModel) -> None:
    assert graph.tasks == model.tasks
    assert graph.settings == model.settings
    assert graph.decisions == model.decisions
    texts = list(TEXTS) * 3
    for wanted, found in zip(model.predict(texts), graph.predict(texts), strict=True):
        for name, one in wanted.items():
            assert found[name].scores == pytest.approx(one.scores, abs=1e-5)
            assert found[name].spans == one.spans
            if name == "number":
                assert found[name].label == pytest.approx(one.label, abs=1e-4)
            else:
                assert found[name].label == one.label


def test_forward_equals_pytorch(model: TrainedModel, graph: TrainedModel) -> None:
    batch = graph.tokenizer(list(TEXTS[:2]), padding=True, return_tensors="pt")
    output = graph(**batch)
    assert isinstance(output, inference.MultitaskOutput)
    without = graph(batch["input_ids"][1:]).logits
    wanted = model(batch["input_ids"][1:]).logits
    for name, logits in output.logits.items():
        assert logits.dtype == torch.float32
        torch.testing.assert_close(without[name], wanted[name], atol=1e-4, rtol=0)
        torch.testing.assert_close(logits[1:], wanted[name], atol=1e-4, rtol=0)


def test_device_and_precision(graph: TrainedModel, folder: Path, tmp_path: Path) -> None:
    assert (graph.device, graph.precision) == (torch.device("cpu"), "fp32")
    assert graph.use("cpu").use("auto", "fp32").to("cpu") is graph
    message = "is an ONNX export in fp32: its precision must be that, but got 'bf16'"
    for refused in (lambda: graph.use("cpu", "bf16"), lambda: hpo.load(folder / "onnx", precision="bf16")):
        with pytest.raises(ModelError, match=message):
            refused()
    with pytest.raises(InputError, match="device must be auto, cpu, cuda or cuda:N"):
        graph.use("tpu")
    with pytest.raises(ModelError, match="an ONNX export, whose weights cannot be cast"):
        graph.half()
    assert (graph.precision, graph(*random_batch((3,))).logits["single"].dtype) == ("fp32", torch.float32)
    with pytest.raises(ModelError, match="an ONNX export, whose attention is fixed"):
        hpo.load(folder / "onnx", attention="eager")
    # The trial's precision says nothing of the graph's.
    assert hpo.load(copied(folder, tmp_path, precision="bf16")).precision == "fp32"


def test_without_the_provider_of_cuda(graph: TrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    monkeypatch.setattr(OnnxNetwork, "device", torch.device("cuda:0"))
    with pytest.raises(ModelError, match="needs onnxruntime's CUDAExecutionProvider, but this onnxruntime"):
        OnnxNetwork(network(graph).file, graph.tasks, network(graph).settings)


def test_auto_is_the_cpu_without_the_provider_of_cuda(
    model: TrainedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    gpu = DeviceInfo("cuda", "a GPU", compute_capability=(8, 0))
    probe = inference.probe_device
    monkeypatch.setattr(inference, "probe_device", lambda kind: probe("cpu") if kind == "cpu" else gpu)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    loaded = hpo.load(folder / "onnx")
    assert loaded.device == torch.device("cpu")
    assert (
        loaded.predict(["late again"])[0]["single"].label == model.predict(["late again"])[0]["single"].label
    )
    moved: list[str] = []
    monkeypatch.setattr(TrainedModel, "to", lambda _, device: moved.append(device))
    loaded.use("cuda")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    loaded.use("auto")
    assert moved == ["cuda:0", "cuda:0"]


def test_it_has_as_many_threads_as_pytorch(graph: TrainedModel) -> None:
    before = torch.get_num_threads()
    try:
        for wanted in (1, 2):
            torch.set_num_threads(wanted)
            graph(*random_batch((3,)))
            assert network(graph)._session.get_session_options().intra_op_num_threads == wanted
    finally:
        torch.set_num_threads(before)


def test_ids_beyond_the_vocabulary(graph: TrainedModel) -> None:
    with pytest.raises(RunError, match=r"onnxruntime could not run .*model\.onnx: "):
        graph(torch.tensor([[10**6]]))


def test_without_onnxruntime(folder: Path, model: TrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ModelError, match=r"needs onnxruntime, .*make install EXTRAS=onnx`"):
        hpo.load(folder / "onnx")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ModelError, match=r"needs onnxscript, .*make install EXTRAS=onnx`"):
        export_onnx(model, folder / "other")


@pytest.mark.parametrize("name", ["model.onnx", "hpo.json", "tokenizer.json"])
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_torn_or_missing_file(folder: Path, tmp_path: Path, name: str, is_gone: bool) -> None:
    file = copied(folder, tmp_path) / name
    content = file.read_bytes()
    file.unlink()
    if not is_gone:
        file.write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError) as refused:
        hpo.load(file.parent)
    assert str(file.parent) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, r"must have the format .* but it has 2 \(onnx\)"),
        ({"runtime": "tvm"}, r"must have the format .* \(tvm\)"),
        ({"onnx": {"precision": "fp32", "colour": "red"}}, "must be a whole folder written by"),
        ({"onnx": None}, "must be a whole folder written by"),
        ({"tasks": 3}, "must be a whole folder written by"),
    ],
)
def test_an_export_of_another_version(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        hpo.load(copied(folder, tmp_path, **changes))


def test_it_is_not_taken_for_an_export_of_pytorch(folder: Path) -> None:
    with pytest.raises(ModelError, match="must hold torch's weights, but it is an ONNX export"):
        load_exported(folder / "onnx")
