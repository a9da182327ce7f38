"""Variables that change a precision behind PyTorch's flags: what they make untrue is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command_line import hpo_command
from support.tiny import tiny_executor, write_study

from hpo.errors import InputError
from hpo.precision.environment import environment_overrides, refuse_overrides

SETTINGS = {
    # variable and value: kind of device, and whether it is refused there
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


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_variable_is_recorded_and_refused_if_it_changes_a_precision(setting: str) -> None:
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


TRAINING = {"max_steps": 1, "batch_size": 4, "max_length": 32}


def test_a_study_in_bf16_is_refused_where_fp32_is_untrue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_study(tmp_path, device="cpu", training=TRAINING | {"fp_precision": "bf16"})
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    ended = hpo_command(tmp_path, "train", "tiny.yaml", "--json")
    assert (ended.exit_code, ended.out) == (2, "")
    message = "Error: ONEDNN_DEFAULT_FPMATH_MODE must not be set to BF16: oneDNN may then"
    assert message in " ".join(ended.err.split())


def test_a_trial_says_what_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32")
    result = tiny_executor(tmp_path, training=TRAINING).run({"fp_precision": "fp32"}, None, "")
    assert result.telemetry["environment"]["TRITON_F32_DEFAULT"] == "tf32"
