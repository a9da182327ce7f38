"""Variables with an effect on precision are recorded or refused."""

from contextlib import nullcontext
from pathlib import Path

import pytest
from support.tiny import tiny_executor

from hpo.errors import InputError
from hpo.precision.environment import environment_overrides, refuse_overrides

REFUSED = {  # variable and value: type of device
    "ONEDNN_DEFAULT_FPMATH_MODE=BF16": "cpu",
    "DNNL_DEFAULT_FPMATH_MODE=any": "cpu",
    "ONEDNN_MAX_CPU_ISA=AVX2": "cpu",
    "DNNL_MAX_CPU_ISA=AVX512_CORE_BF16": "cpu",
    "NVIDIA_TF32_OVERRIDE=0": "cuda",
    "NVIDIA_TF32_OVERRIDE=1": "cuda",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1": "cuda",
}
FINE = ("ONEDNN_DEFAULT_FPMATH_MODE=strict", "ONEDNN_MAX_CPU_ISA=ALL", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=0")
FINE += ("CUBLAS_EMULATE_SINGLE_PRECISION=1", "TRITON_F32_DEFAULT=tf32")


@pytest.mark.parametrize("setting", [*REFUSED, *FINE])
def test_variables_with_an_effect_on_precision(setting: str) -> None:
    variable, _, value = setting.partition("=")
    assert environment_overrides({variable: value}) == {variable: value}
    assert environment_overrides({variable: "", "HOME": "/"}) == {}
    said = rf"^{variable} must not be set to {value}: .*\. Unset it\.$"
    for device in ("cpu", "cuda"):
        is_refused = device == REFUSED.get(setting)
        with pytest.raises(InputError, match=said) if is_refused else nullcontext():
            refuse_overrides(device, {variable: value})


def test_study_is_refused_under_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    with pytest.raises(InputError, match="ONEDNN_DEFAULT_FPMATH_MODE must not be set to BF16"):
        tiny_executor(tmp_path)
