"""Variables that change a precision behind PyTorch's flags: what they make untrue is refused."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from command_line import hpo_command
from tiny import tiny_executor, write_study

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


def refused(names: Iterable[str], device_type: str, **changes: Any) -> str:
    """What is said of these precisions in the environment of this process; empty: nothing."""
    try:
        refuse_overrides(names, AmpConfig(), device_type, **changes)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("setting", REFUSED)
def test_a_variable_is_recorded_and_refused_where_it_makes_a_precision_untrue(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable, _, value = setting.partition("=")
    device_type, untrue = REFUSED[setting]
    for name in WATCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    assert environment_overrides() == {variable: value}
    said = {name: refused([name], device_type) for name in PRECISION_NAMES}
    assert {name for name, message in said.items() if message} == (
        set(PRECISION_NAMES) if "fp32" in untrue else untrue
    )
    for name in untrue:
        assert said[name].startswith(f"{variable} must not be set to {value} for {name}: ")
        assert said[name].endswith(". Unset it.")


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


TRAINING = {"max_steps": 1, "batch_size": 4, "max_length": 32}


def test_a_study_in_bf16_is_refused_where_fp32_is_untrue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_study(tmp_path, device="cpu", training=TRAINING | {"fp_precision": "bf16"})
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    ended = hpo_command(tmp_path, "train", "tiny.yaml", "--json")
    assert (ended.exit_code, ended.out) == (2, "")
    message = "Error: ONEDNN_DEFAULT_FPMATH_MODE must not be set to BF16 for fp32: oneDNN may then"
    assert message in " ".join(ended.err.split())


def test_a_trial_says_what_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32")
    result = tiny_executor(tmp_path, training=TRAINING).run({"fp_precision": "fp32"}, None, "")
    assert result.telemetry["environment"]["TRITON_F32_DEFAULT"] == "tf32"
