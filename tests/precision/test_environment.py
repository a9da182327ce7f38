"""Variables that change a precision behind PyTorch's flags: what they make untrue is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from command_line import ROOT, hpo_command
from tiny import tiny_executor, write_study

from hpo.errors import InputError
from hpo.precision.environment import WATCHED, environment_overrides, refuse_overrides, uses_of_float32
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
    assert {name for name, message in said.items() if message} == untrue
    for name in untrue:
        assert said[name].startswith(f"{variable} must not be set to {value} for fp_precision {name}: ")
        assert said[name].endswith(". Unset it.")
    # Whatever the precision is, nothing may be compared with an fp32 that is none.
    message = refused(["bf16"], device_type, float32_for=["the check"])
    assert ("for the check, which needs fp32: " in message) == ("fp32" in untrue)


def test_what_needs_fp32_beside_the_precision() -> None:
    assert uses_of_float32(check=False, parts=False, fallback=False) == []
    assert uses_of_float32(check=True, parts=True, fallback=True) == [
        "the compatibility check (compat.enabled)",
        "precision_overrides",
        "amp.fallback_to_fp32",
    ]


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
UNCHECKED = {"enabled": False}


@pytest.mark.parametrize(
    ("precision", "changes", "needs"),
    [
        ("fp32", {"compat": UNCHECKED}, "fp_precision fp32"),
        ("bf16", {}, "the compatibility check (compat.enabled), which needs fp32"),
        (
            "bf16",
            {"compat": UNCHECKED, "training": {"precision_overrides.loss": "fp32"}},
            "precision_overrides, which needs fp32",
        ),
        (
            "bf16",
            {"compat": UNCHECKED, "amp": {"allow_emulated": True, "fallback_to_fp32": True}},
            "amp.fallback_to_fp32, which needs fp32",
        ),
    ],
    ids=["the precision", "the check", "a part", "the fallback"],
)
def test_a_study_that_needs_fp32_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, changes: dict[str, Any], needs: str
) -> None:
    training = {**TRAINING, "fp_precision": precision, **changes.get("training", {})}
    write_study(tmp_path, device="cpu", **changes | {"training": training})
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    ended = hpo_command(tmp_path, "train", "tiny.yaml", "--json")
    assert (ended.exit_code, ended.out) == (2, "")
    message = f"Error: ONEDNN_DEFAULT_FPMATH_MODE must not be set to BF16 for {needs}: oneDNN may then"
    assert message in " ".join(ended.err.split())


def test_a_part_that_one_trial_alone_has_in_fp32_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = tiny_executor(tmp_path, compat=UNCHECKED, training=TRAINING | {"fp_precision": "bf16"})
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    with pytest.raises(InputError, match="for precision_overrides, which needs fp32"):
        executor.run({"precision_overrides.loss": "fp32"}, None, "")


def test_a_trial_without_fp32_says_what_was_set(tmp_path: Path) -> None:
    """In a process of its own: libraries read the variables when they are loaded."""
    write_study(tmp_path, device="cpu", compat=UNCHECKED, training=TRAINING | {"fp_precision": "bf16"})
    overrides = {"ONEDNN_DEFAULT_FPMATH_MODE": "BF16", "TRITON_F32_DEFAULT": "tf32"}
    environment = {name: value for name, value in os.environ.items() if name not in WATCHED}
    ended = subprocess.run(
        [sys.executable, "-m", "hpo", "train", "tiny.yaml", "--json"],
        env=environment | overrides | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["telemetry"]["environment"] == overrides
