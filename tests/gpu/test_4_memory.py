"""Float8 in a large model, the memory of adapters, and the resume after kill -9."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import SUPPORT, finish, start_hpo
from support.gpu_studies import largest_relative, run_trial, write_gpu_study

from hpo.config.resolved_study import resolve_study
from hpo.config.study_config import load_study
from hpo.device import DeviceInfo
from hpo.memory import peak_memory_bytes, reset_peak_memory
from hpo.outcome import TrialResult
from hpo.trial.executor import Executor

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own


def large_trial(folder: Path, device: DeviceInfo, name: str) -> TrialResult:
    folder.mkdir()
    on_gpu = device.type == "cuda"
    training: dict[str, Any] = {"max_steps": 8, "batch_size": 64, "max_length": 512, "fp_precision": name}
    if on_gpu:
        training |= {"compile": "default", "compile_scope": "layers"}  # one block is compiled, not 24
    else:
        training |= {"max_steps": 2, "batch_size": 4, "max_length": 32}
    path = write_gpu_study(
        folder,
        device,
        "large" if on_gpu else "tiny",
        texts=(256, (60, 80)) if on_gpu else (8, (2, 4)),
        training=training,
        compat={"enabled": False},
        search_space={},
    )
    result = Executor(resolve_study(load_study(str(path)), device), folder / "runs").run({}, None, "")
    assert result.outcome == "complete", f"{result.reason}\n{result.traceback}"
    return result


def test_float8_of_a_large_encoder_against_bf16(
    device: DeviceInfo, tmp_path: Path, figure: Callable[[str], None]
) -> None:
    if device.type == "cuda" and not device.has_torchao:
        pytest.skip("torchao is not installed")
    other = "fp8" if device.type == "cuda" else "fp32"
    results = [large_trial(tmp_path / name, device, name) for name in ("bf16", other)]
    bf16, low = (result.telemetry for result in results)
    rates = [each["throughput"]["train_tokens_per_second"] for each in (bf16, low)]
    memory = [each["peak_memory_bytes"] for each in (bf16, low)]
    observed = low["precision"]["observed"]
    figure(
        f"{other}: {observed['float8_linears']} of {observed['num_linears']} layers are float8; "
        f"{rates[1]:.0f} tokens/s, {rates[1] / rates[0]:.2f} of bf16's; {memory[1] / 2**20:.0f} MiB, "
        f"{memory[1] / memory[0]:.2f} of bf16's; compile {low.get('compile_seconds', 0):.0f} s"
    )
    if other == "fp8":
        assert observed["float8_linears"] > 0


LORA = {"adapter": "lora", "fp_precision": "bf16", "lora_learning_rate": 1e-3}


def sized(device: DeviceInfo, **training: Any) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    return {
        "size": "base" if on_gpu else "tiny",
        "texts": (128, (6, 12)) if on_gpu else (32, (2, 4)),
        "training": {"batch_size": 32 if on_gpu else 8, "max_length": 128 if on_gpu else 32, **training},
        "compat": {"enabled": False},
        "search_space": {},
    }


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The peak of allocated memory before each reset by the trial."""
    noted: list[int] = []

    def note_and_reset(of: DeviceInfo) -> None:
        noted.append(peak_memory_bytes(of))
        reset_peak_memory(of)

    for module in ("executor", "base_run"):
        monkeypatch.setattr(f"hpo.trial.{module}.reset_peak_memory", note_and_reset)
    return noted


@pytest.mark.parametrize("base", ["fp32", "bf16", "int8", "nf4"])
def test_memory_of_lora_over_a_stored_base(
    device: DeviceInfo, base: str, peaks: list[int], tmp_path: Path, figure: Callable[[str], None]
) -> None:
    pytest.importorskip("peft")
    training = {"max_steps": 6, "base_precision": base, **LORA}
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0  # workspaces of earlier trials
    path = write_gpu_study(tmp_path, device, **sized(device, **training))
    result = Executor(resolve_study(load_study(str(path)), device), tmp_path / "runs").run({}, None, "")
    assert result.outcome == "complete", f"{result.reason}\n{result.traceback}"
    telemetry = result.telemetry
    (loading,) = peaks[1:]
    highest = max(loading, telemetry["peak_memory_bytes"])
    reserved = torch.cuda.max_memory_reserved(device.index) if device.type == "cuda" else 0
    frozen = telemetry["base_precision"]
    figure(
        f"{base}: recorded {telemetry['peak_memory_bytes'] / 2**20:.0f} MiB, highest of the whole trial "
        f"{highest / 2**20:.0f} MiB, reserved {reserved / 2**20:.0f} MiB; {frozen['observed']}"
    )
    assert frozen["effective"] == base
    if device.type == "cuda":  # a quarter of these weights in fp32, for the libraries
        added = loading - before
        assert added < frozen["observed"]["weights_bytes"] + 100 * 2**20, "no fp32 weights while loading"


def check_resumes(
    folder: Path, device: DeviceInfo, figure: Callable[[str], None], tolerance: float, **training: Any
) -> None:
    """Kill a trial with -9 after 7 of 12 steps, resume it, and compare it with a whole one."""
    path = write_gpu_study(
        folder,
        device,
        **sized(device, max_steps=12, **training),
        evaluation={"per_trial": 3},
        checkpoint={"every_seconds": 0.001},
    )
    program = str(SUPPORT / "gpu_studies.py")
    killed = finish(start_hpo(folder, str(path), str(folder / "killed"), "7", program=(program,)), 240)
    assert killed.exit_code == -signal.SIGKILL, killed.err
    _, whole = run_trial(path, folder / "whole")
    resumed, losses = run_trial(path, folder / "killed")
    assert resumed.outcome == "complete", f"{resumed.reason}\n{resumed.traceback}"
    step = resumed.telemetry["resumed_from_step"]
    difference = largest_relative(losses, whole[-len(losses) :])
    figure(f"resumed from step {step} of 12; losses {difference:.1e} from those of a whole trial")
    assert 4 <= step <= 7
    assert difference <= tolerance


def test_lora_over_int8_resumes_after_kill_9(
    device: DeviceInfo, tmp_path: Path, figure: Callable[[str], None]
) -> None:
    pytest.importorskip("peft")
    check_resumes(tmp_path, device, figure, 1e-3, base_precision="int8", **LORA)


def test_cuda_graphs_resume_after_kill_9(
    device: DeviceInfo, tmp_path: Path, figure: Callable[[str], None]
) -> None:
    """On a CPU without the compiler, whose kernels take minutes there."""
    graphs = {"compile": "reduce-overhead", "compile_scope": "layers"} if device.type == "cuda" else {}
    check_resumes(tmp_path, device, figure, 1e-2, fp_precision="bf16", **graphs)
