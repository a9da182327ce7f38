from dataclasses import replace

import pytest
from support.tiny import CPU

from hpo.deploy.artifacts import ONNX_FORMS, ONNX_INT8, parse_names, possible_forms
from hpo.device import DeviceInfo
from hpo.errors import InputError
from hpo.versions import install_hint


@pytest.mark.parametrize(
    ("features", "precisions"),
    [({"avx2"}, ()), ({"avx512_bf16"}, ("bf16",)), ({"amx_bf16", "amx_fp16"}, ("bf16", "fp16"))],
)
def test_cpu_gets_its_native_precisions(features: set[str], precisions: tuple[str, ...]) -> None:
    forms, left_out = possible_forms(replace(CPU, cpu_features=frozenset(features)))
    assert forms == ("fp32", *precisions, *ONNX_FORMS)
    assert set(left_out) == {"bf16", "fp16"} - set(precisions)
    assert all("needs a CPU with" in reason for reason in left_out.values())


def test_onnx_needs_a_cpu_and_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = DeviceInfo("cuda", "a GPU", compute_capability=(9, 0))
    forms, left_out = possible_forms(gpu, ("onnx_fp32", "bf16"))
    assert forms == ("fp32", "bf16")
    assert left_out == {"onnx_fp32": "ONNX forms run on a CPU alone: --device cpu."}
    monkeypatch.setattr("hpo.inference.onnx_network.find_spec", lambda _: None)
    forms, left_out = possible_forms(CPU, (ONNX_INT8,))
    assert forms == ("fp32",)
    assert left_out[ONNX_INT8].endswith(install_hint("onnx"))


def test_parse_names() -> None:
    assert parse_names("bf16, onnx_fp32,bf16") == ("bf16", "onnx_fp32")
    with pytest.raises(InputError, match="must name some of fp32"):
        parse_names(" ,")
    with pytest.raises(InputError, match=r"no 'onnx_int8_static'\. Did you mean `onnx_int8_dynamic`"):
        parse_names("onnx_int8_static")
