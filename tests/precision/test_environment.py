"""Variables with an effect on precision are recorded or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny import tiny_executor

from hpo.errors import InputError
from hpo.precision.environment import environment_overrides, refuse_overrides

SETTINGS = {
    # variable and value: type of device, True if refused
    "ONEDNN_DEFAULT_FPMATH_MODE=BF16": ("cpu", True),
    "DNNL_DEFAULT_FPMATH_MODE=any": ("cpu", True),
    "ONEDNN_DEFAULT_FPMATH_MODE=strict": ("cpu", False),
    "ONEDNN_MAX_CPU_ISA=AVX2": ("cpu", True),
    "DNNL_MAX_CPU_ISA=AVX512_CORE_BF16": ("cpu", True),
    "ONEDNN_MAX_CPU_ISA=ALL": ("cpu", False),
    "NVIDIA_TF32_OVERRIDE=0": ("cuda", True),
    "NVIDIA_TF32_OVERRIDE=1": ("cuda", True),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1": ("cuda", True),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=0": ("cuda", False),
    "CUBLAS_EMULATE_SINGLE_PRECISION=1": ("cuda", False),
    "TRITON_F32_DEFAULT=tf32": ("cuda", False),
}


def test_trial_records_variables_or_refuses_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32")
    training = {"max_steps": 1, "batch_size": 4, "max_length": 32}
    result = tiny_executor(tmp_path, training=training).run({"fp_precision": "fp32"}, None, "")
    assert result.telemetry["environment"]["TRITON_F32_DEFAULT"] == "tf32"
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    with pytest.raises(InputError, match="ONEDNN_DEFAULT_FPMATH_MODE must not be set to BF16"):
        tiny_executor(tmp_path)


@pytest.mark.parametrize("setting", SETTINGS)
def test_variables_with_an_effect_on_precision(setting: str) -> None:
    variable, _, value = setting.partition("=")
    device_type, is_refused = SETTINGS[setting]
    environment = {variable: value}
    assert environment_overrides(environment) == environment
    assert environment_overrides({variable: "", "HOME": "/"}) == {}
    if is_refused:
        with pytest.raises(InputError, match=f"^{variable} must not be set to {value}: .*\\. Unset it\\.$"):
            refuse_overrides(device_type, environment)
    else:
        refuse_overrides(device_type, environment)
    refuse_overrides("cuda" if device_type == "cpu" else "cpu", environment)
