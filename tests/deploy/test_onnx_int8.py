import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from support.tiny_onnx import probabilities, random_batch
from torch import nn

import hpo
from hpo.deploy.onnx_int8 import quantize


@pytest.fixture(scope="module")
def source(tiny_exports: Path) -> Path:
    return tiny_exports / "onnx"


@pytest.fixture(scope="module")
def quantised(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize(source, tmp_path_factory.mktemp("int8") / "model")


def test_int8_is_near_fp32_and_small(source: Path, quantised: Path) -> None:
    batch, exact, int8 = random_batch((32, 12, 5)), hpo.load(source), hpo.load(quantised, device="cpu")
    logits = int8(*batch).logits
    for name, values in exact(*batch).logits.items():
        error = float((logits[name] - values).square().mean().sqrt() / values.std())
        assert 0 < error < 0.15, name
    assert int8.precision == "int8"
    assert np.abs(probabilities(int8) - probabilities(exact)).max() < 0.05
    assert (quantised / "model.onnx").stat().st_size < (source / "model.onnx").stat().st_size / 3
    assert {file.name for file in quantised.iterdir()} == {file.name for file in source.iterdir()}
    content, expected = (json.loads((one / "hpo.json").read_text()) for one in (quantised, source))
    assert (content.pop("onnx")["precision"], expected.pop("onnx")["precision"]) == ("int8", "fp32")
    assert content.pop("checksums") != expected.pop("checksums")
    assert content == expected


def test_linear_weights_have_seven_bits_and_a_scale_per_output(source: Path, quantised: Path) -> None:
    network = hpo.load(source.parent / "torch", device="cpu").network
    layers = [one for name, one in network.named_modules() if ".pooler." not in name]  # no head reads it
    linear = sorted(tuple(one.weight.T.shape) for one in layers if isinstance(one, nn.Linear))
    embeddings = sorted(tuple(one.weight.shape) for one in layers if isinstance(one, nn.Embedding))
    graph = onnx.load(quantised / "model.onnx").graph
    arrays = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    matrices = [array for array in arrays.values() if array.ndim == 2 and array.size > 1]
    signed = [array for array in matrices if array.dtype == np.int8]
    assert sorted(array.shape for array in signed) == linear
    assert sorted(array.shape for array in matrices if array.dtype == np.uint8) == embeddings
    assert {int(np.abs(array.astype(int)).max()) for array in signed} <= {63, 64}
    scales = [one for name, one in arrays.items() if name.endswith("_scale") and one.ndim == 1]
    assert sorted(one.size for one in scales) == sorted(shape[1] for shape in linear)
