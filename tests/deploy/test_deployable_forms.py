from __future__ import annotations

from dataclasses import replace

import pytest
from support.tiny import CPU

from hpo.deploy.artifacts import NAMES, artifacts_of, parse_names
from hpo.device import DeviceInfo
from hpo.errors import InputError
from hpo.versions import install_hint

INT8 = tuple(name for name in NAMES if "int8" in name)


@pytest.mark.parametrize(
    ("features", "precisions"),
    [
        ({"avx2"}, ()),
        ({"avx512_bf16"}, ("bf16",)),
        ({"amx_bf16", "amx_fp16"}, ("bf16", "fp16")),
    ],
)
def test_reduced_precisions_only_where_they_are_native(
    features: set[str], precisions: tuple[str, ...]
) -> None:
    found, left_out = artifacts_of(replace(CPU, cpu_features=frozenset(features)))
    assert tuple(artifact.name for artifact in found) == ("fp32", *precisions, "onnx_fp32", *INT8)
    assert set(left_out) == {"bf16", "fp16"} - set(precisions)
    assert all("needs a CPU with" in reason for reason in left_out.values())


def test_onnx_only_on_a_cpu_and_with_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = DeviceInfo("cuda", "a GPU", compute_capability=(9, 0))
    found, left_out = artifacts_of(gpu, ("onnx_fp32", "bf16"))
    assert [artifact.name for artifact in found] == ["fp32", "bf16"]
    assert left_out == {"onnx_fp32": "onnxruntime is measured on a CPU alone: --device cpu."}
    monkeypatch.setattr("hpo.inference.onnx_network.find_spec", lambda _: None)
    found, left_out = artifacts_of(CPU, INT8)
    assert [artifact.name for artifact in found] == ["fp32"]
    assert left_out["onnx_int8_static"].endswith(install_hint("onnx"))


def test_names() -> None:
    assert parse_names("bf16, onnx_fp32,bf16") == ("bf16", "onnx_fp32")
    with pytest.raises(InputError, match="must name some of fp32"):
        parse_names(" ,")
