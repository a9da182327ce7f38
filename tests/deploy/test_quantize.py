from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from support.tiny_onnx import TEXTS, probabilities, random_batch
from torch import nn

import hpo
from hpo.deploy.artifacts import Quantization
from hpo.deploy.quantize import CALIBRATION_TEXTS, quantize
from hpo.errors import ModelError
from hpo.tasks.example import Example

MODES: tuple[Quantization, ...] = get_args(Quantization)
CALIBRATION = [
    Example(str(number), " ".join(TEXTS[0:2])[number % 40 :] + TEXTS[2][: number % 300], {}, {})
    for number in range(CALIBRATION_TEXTS + 50)
]


@pytest.fixture(scope="module")
def source(tiny_exports: Path) -> Path:
    return tiny_exports / "onnx"


@pytest.fixture(scope="module")
def quantised(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Quantization, Path]:
    folder = tmp_path_factory.mktemp("int8")
    return {mode: quantize(source, folder / mode, mode, CALIBRATION) for mode in MODES}


def logits(folder: Path, lengths: tuple[int, ...] = (32, 12, 5)) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = hpo.load(folder, device="cpu")(*random_batch(lengths)).logits
    return found


def quantization(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "hpo.json").read_text())["onnx"]["quantization"])


def weights(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    graph = onnx.load(folder / "model.onnx").graph
    return {one.name: numpy_helper.to_array(one) for one in graph.initializer}


@pytest.mark.parametrize("mode", MODES)
def test_int8_is_near_fp32_and_small(
    source: Path, quantised: dict[Quantization, Path], mode: Quantization
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
    assert (told["static"], told["per_channel"]) == (mode == "static", True)
    assert told["num_calibration_texts"] == (CALIBRATION_TEXTS if mode == "static" else 0)
    assert hpo.load(folder, device="cpu").precision == "int8"


def test_weights_of_all_layers_are_bytes_those_of_linear_ones_of_seven_bits(
    source: Path, quantised: dict[Quantization, Path]
) -> None:
    network = hpo.load(source.parent / "torch", device="cpu").network
    layers = [(name, one) for name, one in network.named_modules() if ".pooler." not in name]  # none reads it
    linear = sorted(tuple(one.weight.T.shape) for _, one in layers if isinstance(one, nn.Linear))
    embeddings = sorted(tuple(one.weight.shape) for _, one in layers if isinstance(one, nn.Embedding))
    for mode, folder in quantised.items():
        matrices = [array for array in weights(folder).values() if array.ndim == 2 and array.size > 1]
        assert sorted(array.shape for array in matrices if array.dtype == np.int8) == linear, mode
        assert sorted(array.shape for array in matrices if array.dtype == np.uint8) == embeddings, mode
        most = {int(np.abs(array.astype(int)).max()) for array in matrices if array.dtype == np.int8}
        assert most <= {63, 64}, mode


def test_every_output_of_a_layer_has_a_scale(quantised: dict[Quantization, Path]) -> None:
    for folder in quantised.values():
        arrays = weights(folder)
        outputs = sorted(one.shape[1] for one in arrays.values() if one.dtype == np.int8 and one.ndim == 2)
        scales = [one for name, one in arrays.items() if name.endswith("_scale") and one.ndim == 1]
        assert sorted(one.size for one in scales) == outputs


def test_static_ranges_hold_whatever_the_batch(quantised: dict[Quantization, Path]) -> None:
    for mode, folder in quantised.items():
        together = logits(folder, (32, 12, 5))["single"]
        batch = [one[2:, :5] for one in random_batch((32, 12, 5))]
        difference = (hpo.load(folder, device="cpu")(*batch).logits["single"] - together[2:]).abs().max()
        assert (difference < 1e-5) == (mode == "static")


def test_the_terminal_shows_nothing_of_onnxruntime(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    quantize(source, tmp_path / "int8", "static", CALIBRATION[:8])
    assert not any(Path().iterdir())
    assert root.handlers == []
    assert root.filters == []
    assert capfd.readouterr() == ("", "")


def test_the_folder_has_the_same_form(source: Path, quantised: dict[Quantization, Path]) -> None:
    for folder in quantised.values():
        assert {file.name for file in folder.iterdir()} == {file.name for file in source.iterdir()}
        content, of_source = (json.loads((one / "hpo.json").read_text()) for one in (folder, source))
        assert content.keys() == of_source.keys()
        for key in content.keys() - {"onnx", "checksums"}:
            assert content[key] == of_source[key], key


def test_what_is_refused(source: Path, quantised: dict[Quantization, Path], tmp_path: Path) -> None:
    torn = tmp_path / "torn"
    torn.mkdir()
    for file in source.iterdir():
        (torn / file.name).write_bytes(file.read_bytes())
    (torn / "model.onnx").write_bytes((source / "model.onnx").read_bytes()[:-50_000])
    cases: list[tuple[Path, Quantization, str]] = [
        (source, "static", "needs texts of the training split to calibrate, but got none"),
        (quantised["dynamic"], "dynamic", "must be an ONNX export in fp32, but it is quantised already"),
        (source.parent / "torch", "dynamic", "must be an ONNX export, but it is one of torch"),
        (tmp_path / "nowhere", "dynamic", "must be a whole folder written by"),
        (torn, "dynamic", "must be a whole folder written by"),
    ]
    for folder, mode, message in cases:
        with pytest.raises(ModelError, match=message) as raised:
            quantize(folder, tmp_path / "out", mode)
        assert "\n" not in str(raised.value)
    with pytest.raises(ModelError, match="this one holds other files"):
        quantize(source, source.parent, "dynamic")
    assert [file.name for file in tmp_path.iterdir()] == ["torn"]
