"""Several workers on one device, ranks under torchrun, and attention in fp32."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from support.command_line import finish, ok, start_hpo, start_python, stored
from support.gpu_studies import write_gpu_study

from hpo.device import CUDA_CONTEXT_BYTES, DeviceInfo, EnergyCounter, synchronize
from hpo.precision.amp import backend_flags
from hpo.precision.table import PRECISIONS, AmpConfig


def write(folder: Path, device: DeviceInfo, num_trials: int) -> None:
    on_gpu = device.type == "cuda"
    rates = [1e-4 * (number + 1) for number in range(num_trials)]
    training: dict[str, Any] = {"max_steps": 40 if on_gpu else 3, "fp_precision": "bf16"}
    write_gpu_study(
        folder,
        device,
        "base" if on_gpu else "tiny",
        texts=(256, (4, 8)) if on_gpu else (32, (2, 4)),
        training=training | {"max_length": 128},
        compat={"enabled": False},
        sampler={"name": "grid"},
        n_trials=num_trials,
        search_space={"learning_rate": {"type": "categorical", "choices": rates}},
    )


def test_workers_on_one_device_stay_within_their_share(
    device: DeviceInfo, tmp_path: Path, figure: Callable[[str], None]
) -> None:
    num_workers = 4 if device.type == "cuda" else 2
    write(tmp_path, device, 2 * num_workers)
    ok(finish(start_hpo(tmp_path, "run", "tiny.yaml", "--workers-per-device", str(num_workers)), 240))
    trials = stored(tmp_path).trials
    used = [trial.telemetry["peak_memory_bytes"] for trial in trials]
    limits = [trial.telemetry["device"]["memory_limit_bytes"] for trial in trials]
    rates = [trial.telemetry["throughput"]["train_examples_per_second"] for trial in trials]
    figure(
        f"{num_workers} workers: at most {max(used) / 2**20:.0f} of {min(limits) / 2**20:.0f} MiB each, "
        f"{min(rates):.0f} to {max(rates):.0f} examples/s each"
    )
    assert [trial.outcome for trial in trials] == ["complete"] * len(trials)
    assert all(trial.telemetry["device"]["shared"] for trial in trials)
    assert all(peak <= limit for peak, limit in zip(used, limits, strict=True))
    if device.type == "cuda":  # the shares and the contexts of all workers fit into the GPU
        assert num_workers * (max(limits) + CUDA_CONTEXT_BYTES) <= device.total_memory_bytes


def test_attention_in_fp32_is_not_rounded(device: DeviceInfo, figure: Callable[[str], None]) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 4, 8, 256, 64, device=device.torch_device)
    with backend_flags(PRECISIONS["fp32"], AmpConfig()):
        found = F.scaled_dot_product_attention(query, key, value).double()
    expected = F.scaled_dot_product_attention(query.double(), key.double(), value.double())
    error = float((found - expected).norm() / expected.norm())
    figure(f"relative error against fp64 {error:.1e}")
    assert error < 1e-6


def test_one_rank_under_torchrun(device: DeviceInfo, tmp_path: Path, figure: Callable[[str], None]) -> None:
    write(tmp_path, device, 1)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    log = tmp_path / "nccl.log"
    environment = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(log)}
    process = start_python(tmp_path, *torchrun, "-m", "hpo", "run", "tiny.yaml", "--json", **environment)
    finished = ok(finish(process, 240))
    assert log.exists() == (device.type == "cuda"), "NCCL connects the ranks of GPUs alone"
    (trial,) = stored(tmp_path).trials
    figure(f"{trial.outcome}, {trial.telemetry['num_ranks']} rank")
    assert json.loads(finished.out)["outcomes"] == {"complete": 1}


def test_the_energy_of_products_is_counted(device: DeviceInfo, figure: Callable[[str], None]) -> None:
    counter = EnergyCounter(device)
    if device.type == "cpu":
        assert counter.missing.startswith("this is not an NVIDIA GPU")
    if counter.missing:
        figure(f"no energy: {counter.missing}")
        return
    values = torch.randn(8192, 8192, device=device.torch_device, dtype=torch.bfloat16)
    began, before = time.monotonic(), counter.read_joules()
    while time.monotonic() - began < 2.0:
        values @ values
        synchronize(device)
    seconds, after = time.monotonic() - began, counter.read_joules()
    assert before is not None
    assert after is not None
    figure(f"{after - before:.0f} J in {seconds:.1f} s of bf16 products: {(after - before) / seconds:.0f} W")
    assert after > before
