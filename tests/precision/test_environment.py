"""Variables that change a precision behind PyTorch's flags, each set in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import ROOT
from tiny import write_study

from hpo.errors import InputError
from hpo.precision.environment import WATCHED, environment_overrides, refuse_overrides
from hpo.precision.table import PRECISION_NAMES, AmpConfig

REFUSED = {
    # variable and value: kind of device, the precisions that it makes untrue
    "ONEDNN_DEFAULT_FPMATH_MODE=BF16": ("cpu", {"fp32"}),
    "ONEDNN_DEFAULT_FPMATH_MODE=any": ("cpu", {"fp32"}),
    "DNNL_DEFAULT_FPMATH_MODE=F16": ("cpu", {"fp32"}),
    "DNNL_DEFAULT_FPMATH_MODE=TF32": ("cpu", {"fp32"}),
    "ONEDNN_DEFAULT_FPMATH_MODE=STRICT": ("cpu", set()),
    "ONEDNN_MAX_CPU_ISA=AVX2": ("cpu", {"bf16", "bf16-true", "fp16"}),
    "DNNL_MAX_CPU_ISA=AVX512_CORE_BF16": ("cpu", {"fp16"}),
    "ONEDNN_MAX_CPU_ISA=ALL": ("cpu", set()),
    "NVIDIA_TF32_OVERRIDE=0": ("cuda", {"tf32"}),
    "NVIDIA_TF32_OVERRIDE=1": ("cuda", {"fp32"}),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1": ("cuda", {"fp32"}),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=0": ("cuda", set()),
    "CUBLAS_EMULATE_SINGLE_PRECISION=1": ("cuda", set()),
    "TRITON_F32_DEFAULT=tf32": ("cuda", set()),
}

PROGRAM = """
import json, sys
from hpo.errors import InputError
from hpo.precision.environment import environment_overrides, refuse_overrides
from hpo.precision.table import PRECISION_NAMES, AmpConfig

said = {}
for name in PRECISION_NAMES:
    try:
        refuse_overrides([name], AmpConfig(), sys.argv[1])
    except InputError as error:
        said[name] = str(error)
print(json.dumps({"set": environment_overrides(), "said": said}))
"""


def without_overrides() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in WATCHED}


@pytest.mark.parametrize("setting", REFUSED)
def test_a_variable_is_recorded_and_refused_where_it_makes_a_precision_untrue(setting: str) -> None:
    variable, _, value = setting.partition("=")
    device_type, untrue = REFUSED[setting]
    environment = without_overrides() | {variable: value, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM, device_type]
    found = json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    assert found["set"] == {variable: value}
    assert found["said"].keys() == untrue
    for name, message in found["said"].items():
        assert message.startswith(f"{variable} must not be set to {value} for fp_precision {name}: ")
        assert message.endswith(f"Unset it, or take {name} out of the study.")


def test_what_is_of_another_device_refuses_nothing() -> None:
    for setting, (device_type, _) in REFUSED.items():
        variable, _, value = setting.partition("=")
        other = "cuda" if device_type == "cpu" else "cpu"
        refuse_overrides(PRECISION_NAMES, AmpConfig(), other, {variable: value})


def test_a_study_that_allows_emulation_may_have_it() -> None:
    few = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    refuse_overrides(["bf16"], AmpConfig(allow_emulated=True), "cpu", few)
    with pytest.raises(InputError, match="ONEDNN_MAX_CPU_ISA"):
        refuse_overrides(["fp32", "bf16"], AmpConfig(), "cpu", few)


def test_what_is_empty_is_not_set() -> None:
    assert environment_overrides({"NVIDIA_TF32_OVERRIDE": "", "HOME": "/"}) == {}


@pytest.mark.parametrize(
    ("precision", "exit_code"), [("fp32", 2), ("bf16", 0)], ids=["untrue", "true all the same"]
)
def test_a_trial_is_refused_or_says_what_was_set(tmp_path: Path, precision: str, exit_code: int) -> None:
    training = {"max_steps": 1, "batch_size": 4, "max_length": 32, "fp_precision": precision}
    write_study(tmp_path, device="cpu", training=training)
    environment = without_overrides() | {
        "PYTHONPATH": str(ROOT),
        "ONEDNN_DEFAULT_FPMATH_MODE": "BF16",
        "TRITON_F32_DEFAULT": "tf32",
    }
    command = [sys.executable, "-m", "hpo", "train", "tiny.yaml", "--json"]
    ended = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == exit_code, ended.stderr
    if exit_code:
        assert (
            "Error: ONEDNN_DEFAULT_FPMATH_MODE must not be set to BF16 for fp_precision fp32" in ended.stderr
        )
        assert "Traceback" not in ended.stderr
        assert ended.stdout == ""
    else:
        environment = json.loads(ended.stdout)["telemetry"]["environment"]
        assert environment == {"ONEDNN_DEFAULT_FPMATH_MODE": "BF16", "TRITON_F32_DEFAULT": "tf32"}
