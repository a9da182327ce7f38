"""Exports in int8: near those in fp32, exact where layers are kept, and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from tiny_onnx import TEXTS, probabilities, random_batch
from torch import nn

import hpo
from hpo.data.examples import Example
from hpo.deploy.quantize import CALIBRATION_TEXTS, QuantizationMode, layers, quantize
from hpo.errors import ModelError

MODES = [QuantizationMode(static, per_channel) for static in (False, True) for per_channel in (False, True)]
CALIBRATION = [
    Example(str(number), " ".join(TEXTS[0:2])[number % 40 :] + TEXTS[2][: number % 300], {}, {})
    for number in range(CALIBRATION_TEXTS + 50)
]
EMBEDDINGS = ("word_embeddings", "position_embeddings", "token_type_embeddings")


@pytest.fixture(scope="module")
def source(tiny_exports: Path) -> Path:
    return tiny_exports / "onnx"


@pytest.fixture(scope="module")
def quantised(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[QuantizationMode, Path]:
    folder = tmp_path_factory.mktemp("int8")
    return {
        mode: quantize(source, folder / str(number), mode, calibration=CALIBRATION)
        for number, mode in enumerate(MODES)
    }


def logits(folder: Path, lengths: tuple[int, ...] = (32, 12, 5)) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = hpo.load(folder, device="cpu")(*random_batch(lengths)).logits
    return found


def quantization(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "hpo.json").read_text())["onnx"]["quantization"])


def weights(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    graph = onnx.load(folder / "model.onnx").graph
    return {one.name: numpy_helper.to_array(one) for one in graph.initializer}


def test_layers_are_those_of_pytorch(source: Path) -> None:
    network = hpo.load(source.parent / "torch", device="cpu").network
    wanted = {
        name: module.weight.numel()
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding) and ".pooler." not in name  # which no head reads
    }
    found = layers(source)
    assert {layer.name: layer.num_weights for layer in found} == wanted
    assert [layer.name for layer in found if layer.is_embedding] == [
        layer.name for layer in found if layer.name.endswith(EMBEDDINGS)
    ]
    stored = weights(source)
    nodes = {node.name: node for node in onnx.load(source / "model.onnx").graph.node}
    for layer in found:
        assert stored[layer.weight].size == layer.num_weights
        assert all(layer.weight in nodes[node].input for node in layer.nodes)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_int8_is_near_fp32_and_small(
    source: Path, quantised: dict[QuantizationMode, Path], mode: QuantizationMode
) -> None:
    folder = quantised[mode]
    exact, found = logits(source), logits(folder)
    for name, wanted in exact.items():
        error = float((found[name] - wanted).square().mean().sqrt() / wanted.std())
        assert 0 < error < 0.15, name
    assert (
        np.abs(probabilities(hpo.load(folder, device="cpu")) - probabilities(hpo.load(source))).max() < 0.05
    )
    sizes = [(one / "model.onnx").stat().st_size for one in (source, folder)]
    assert sizes[1] < sizes[0] / 3
    told = quantization(folder)
    assert (told["static"], told["per_channel"], told["kept_float"]) == (mode.static, mode.per_channel, [])
    assert told["num_calibration_texts"] == (CALIBRATION_TEXTS if mode.static else 0)
    assert hpo.load(folder, device="cpu").precision == "int8"


def test_weights_of_linear_layers_have_seven_bits(quantised: dict[QuantizationMode, Path]) -> None:
    for mode, folder in quantised.items():
        linear = [array for array in weights(folder).values() if array.dtype == np.int8 and array.ndim == 2]
        assert len(linear) == 12 + 7
        assert {int(np.abs(array.astype(int)).max()) for array in linear} <= {63, 64}, mode


def test_scales_per_channel(quantised: dict[QuantizationMode, Path]) -> None:
    for mode, folder in quantised.items():
        (scale,) = [
            array
            for name, array in weights(folder).items()
            if name.startswith("heads.3.1.") and "scale" in name
        ]
        assert scale.size == (5 if mode.per_channel else 1)


def test_static_ranges_hold_whatever_the_batch(quantised: dict[QuantizationMode, Path]) -> None:
    for mode, folder in quantised.items():
        together = logits(folder, (32, 12, 5))["single"]
        batch = [one[2:, :5] for one in random_batch((32, 12, 5))]
        difference = (hpo.load(folder, device="cpu")(*batch).logits["single"] - together[2:]).abs().max()
        assert (difference < 1e-5) == mode.static


def test_layers_that_stay_in_fp32(source: Path, tmp_path: Path) -> None:
    names = [layer.name for layer in layers(source)]
    kept = [name for name in names if name != "heads.2.1"]
    stored = weights(source)
    for mode in (QuantizationMode(), QuantizationMode(static=True)):
        folder = quantize(
            source, tmp_path / f"static-{mode.static}", mode, calibration=CALIBRATION[:20], keep_float=kept
        )
        assert quantization(folder)["kept_float"] == kept
        exact, found = logits(source), logits(folder)
        for name, wanted in exact.items():
            assert torch.allclose(found[name], wanted, atol=1e-6) == (name != "number")
        for layer in layers(source):
            if layer.name in kept:
                np.testing.assert_array_equal(weights(folder)[layer.weight], stored[layer.weight])


def test_the_terminal_shows_nothing_of_onnxruntime(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    quantize(source, tmp_path / "int8", QuantizationMode(static=True), calibration=CALIBRATION[:8])
    assert not any(Path().iterdir())
    assert root.handlers == []
    assert root.filters == []
    assert capfd.readouterr() == ("", "")


def test_the_folder_has_the_same_form(source: Path, quantised: dict[QuantizationMode, Path]) -> None:
    for folder in quantised.values():
        assert {file.name for file in folder.iterdir()} == {file.name for file in source.iterdir()}
        content, of_source = (json.loads((one / "hpo.json").read_text()) for one in (folder, source))
        assert content.keys() == of_source.keys()
        for key in content.keys() - {"onnx"}:
            assert content[key] == of_source[key], key
        assert "whose layers compute in int8" in (folder / "README.md").read_text()


def test_what_is_refused(source: Path, quantised: dict[QuantizationMode, Path], tmp_path: Path) -> None:
    static, dynamic = QuantizationMode(static=True), QuantizationMode()
    torn = tmp_path / "torn"
    torn.mkdir()
    for file in source.iterdir():
        (torn / file.name).write_bytes(file.read_bytes())
    (torn / "model.onnx").write_bytes((source / "model.onnx").read_bytes()[:-50_000])
    names = [layer.name for layer in layers(source)]
    cases: list[tuple[Path, QuantizationMode, dict[str, Any], str]] = [
        (source, static, {}, "needs texts of the training split to calibrate, but got none"),
        (source, dynamic, {"keep_float": ["heads.0.2"]}, "no layer `heads.0.2`. Did you mean `heads."),
        (source, dynamic, {"keep_float": names}, "keep_float must leave a layer to quantise"),
        (quantised[dynamic], dynamic, {}, "must be an ONNX export in fp32, but it is quantised already"),
        (source.parent / "torch", dynamic, {}, "must be an ONNX export, but it is one of torch"),
        (tmp_path / "nowhere", dynamic, {}, "must be a whole folder written by"),
        (torn, dynamic, {}, "must be a whole folder written by"),
    ]
    for folder, mode, options, message in cases:
        with pytest.raises(ModelError, match=message) as raised:
            quantize(folder, tmp_path / "out", mode, **options)
        assert "\n" not in str(raised.value)
    with pytest.raises(ModelError, match="must be a whole folder written by"):
        layers(torn)
    with pytest.raises(ModelError, match="this one holds other files"):
        quantize(source, source.parent, dynamic)
    assert [file.name for file in tmp_path.iterdir()] == ["torn"]
