"""Probing: the record, peak memory as the kernel tells it, and what counts as out of memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from hpo.device import (
    DeviceInfo,
    Utilization,
    available_cores,
    cuda_devices,
    device_uuid,
    limit_threads,
    memory_limit,
    memory_share,
    probe_device,
    visible_devices,
)
from hpo.errors import InputError
from hpo.memory import (
    disable_malloc_trim,
    is_out_of_memory,
    peak_memory_bytes,
    release_free_memory,
    reset_peak_memory,
)


def test_the_cpu_is_described() -> None:
    device = probe_device("cpu")
    assert device.torch_device == device.device_id == "cpu"
    assert device.num_cores == available_cores() >= 1
    assert device.total_memory_bytes > 2**28
    assert device.torch_version == torch.__version__
    assert device.name in device.describe()


def machine(root: Path, own_cgroups: str, **limits: str) -> Path:
    """A machine whose `/proc` and `/sys` say this; the names of `limits` are paths below /sys/fs/cgroup."""
    for path, content in {
        "proc/self/cgroup": own_cgroups,
        "proc/cpuinfo": "model name : Example CPU\nflags : fpu avx2 amx_bf16\n\nmodel name : other\n",
        **{f"sys/fs/cgroup/{path}": content for path, content in limits.items()},
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    return root


@pytest.mark.parametrize(
    ("own_cgroups", "limits", "cores", "memory"),
    [
        ("0::/slurm/job", {"slurm/job/cpu.max": "300000 100000", "slurm/job/memory.max": "1000"}, 3, 1000),
        ("0::/slurm/job", {"slurm/cpu.max": "250000 100000", "slurm/job/cpu.max": "max 100000"}, 2, None),
        ("0::/pod", {"memory.max": "max", "pod/memory.max": "2000", "pod/cpu.max": "50000 100000"}, 1, 2000),
        ("0::/docker/5ef", {"cpu.max": "200000 100000", "memory.max": "3000"}, 2, 3000),  # seen from within
        ("0::/", {"cpu.max": "max 100000", "memory.max": "max"}, 8, None),
        ("0::/job", {"other/cpu.max": "100000 100000", "other/memory.max": "1"}, 8, None),
        ("", {}, 8, None),
    ],
)
def test_cgroups_limit_cores_and_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own_cgroups: str,
    limits: dict[str, str],
    cores: int,
    memory: int | None,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    device = probe_device("cpu", machine(tmp_path, own_cgroups, **limits))
    assert (device.num_cores, device.name) == (cores, "Example CPU")
    assert device.cpu_features == {"avx2", "amx_bf16"}
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert device.total_memory_bytes == (memory or whole)


def test_threads_are_no_more_than_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    limit_threads(DeviceInfo(type="cpu", name="CPU", num_cores=3))
    limit_threads(DeviceInfo(type="cpu", name="CPU", num_cores=16))
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    limit_threads(DeviceInfo(type="cpu", name="CPU", num_cores=3))
    assert asked == [3]


@pytest.mark.parametrize("probe", [probe_device, cuda_devices])
def test_a_missing_kind_is_refused(probe: Callable[[str], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InputError, match="PyTorch sees no CUDA device here"):
        probe("cuda")
    with pytest.raises(InputError, match="auto, cpu or cuda, but got 'tpu'"):
        probe("tpu")


@pytest.mark.parametrize(
    ("visible", "num_devices", "expected"),
    [
        (None, 0, ()),
        (None, 3, ("0", "1", "2")),
        ("2, 0", 2, ("2", "0")),
        ("GPU-5ef, GPU-771", 2, ("GPU-5ef", "GPU-771")),
        ("0,1,-1,2", 2, ("0", "1")),  # CUDA stops at the first that it does not know
        ("MIG-a,MIG-b", 1, ("MIG-a", "MIG-b")),  # of which one process sees one
    ],
)
def test_devices_are_named_as_the_user_named_them(
    visible: str | None, num_devices: int, expected: tuple[str, ...]
) -> None:
    assert visible_devices(visible, num_devices) == expected


@pytest.mark.parametrize(
    ("kind", "num_devices", "expected"), [("cpu", 2, ()), ("auto", 0, ()), ("auto", 2, ("5", "6"))]
)
def test_the_gpus_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, kind: str, num_devices: int, expected: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    assert cuda_devices(kind) == expected


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, "GPU-5ef"),
        ("0", "GPU-5ef"),
        ("MIG-a", "MIG-a"),
        ("MIG-a,MIG-b", "GPU-5ef"),  # which of them is not known
    ],
)
def test_identity_of_a_device(visible: str | None, expected: str) -> None:
    assert device_uuid(visible, "GPU-5ef") == expected


def test_a_gpu_is_named_with_its_index_and_known_by_its_uuid() -> None:
    device = DeviceInfo(type="cuda", name="GPU", index=3, compute_capability=(9, 0))
    assert device.torch_device == device.device_id == "cuda:3"
    assert "compute capability 9.0" in device.describe()
    assert replace(device, uuid="GPU-5ef").device_id == "GPU-5ef"


def test_memory_for_each_of_several_workers() -> None:
    gpu = DeviceInfo(type="cuda", name="Example GPU", total_memory_bytes=16 * 2**30)
    for num_workers in (1, 2, 8):
        share = memory_share(gpu, num_workers)
        assert num_workers * (share * 16 + 1) == pytest.approx(16)
    with pytest.raises(InputError, match=r"16 workers need 16 GiB .* but this Example GPU has 16 GiB"):
        memory_share(gpu, 16)


def test_memory_limit_of_a_process() -> None:
    gpu = DeviceInfo(type="cuda", name="Example GPU", total_memory_bytes=16 * 2**30)
    assert memory_limit(gpu, 0.25) == 4 * 2**30
    assert memory_limit(gpu, None) == 16 * 2**30
    cpu = DeviceInfo(type="cpu", name="Example CPU", total_memory_bytes=2**30)
    assert memory_limit(cpu, 0.25) == 2**30, "the fraction is of a GPU's memory"
    assert memory_limit(DeviceInfo(type="cpu", name="Example CPU"), None) is None


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK),
    reason="Linux resets the peak only where /proc/self/clear_refs is writable",
)
@pytest.mark.parametrize("freed_is_kept", [False, True])
def test_peak_memory_remembers_freed_memory_and_can_be_reset(freed_is_kept: bool) -> None:
    if freed_is_kept:
        disable_malloc_trim()
    device = probe_device("cpu")
    release_free_memory(device)
    reset_peak_memory(device)
    before = peak_memory_bytes(device)
    held = bytearray(os.urandom(1)) * 200_000_000
    del held
    assert peak_memory_bytes(device) - before > 150_000_000
    release_free_memory(device)
    reset_peak_memory(device)
    assert peak_memory_bytes(device) - before < 100_000_000


def test_utilization_of_a_busy_and_an_idle_process() -> None:
    device = probe_device("cpu")
    busy, idle = Utilization(device, num_threads=1), Utilization(device, num_threads=1)
    sum(i * i for i in range(300_000))
    share = busy.read()
    threading.Event().wait(timeout=0.2)
    assert 0 < idle.read() < share <= 1


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("NCCL error: unhandled cuda error. Cuda failure 2 'out of memory'"), True),
        (RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_out_of_memory(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"return_value": (2**20, 2**35)}, True),
        ({"return_value": (2**34, 2**35)}, False),
        ({"side_effect": RuntimeError("CUDA error: device-side assert triggered")}, False),
    ],
    ids=["full", "not full", "failed"],
)
def test_no_handle_of_cublas_is_out_of_memory_where_the_gpu_is_full(
    answer: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", Mock(**answer))
    error = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
    assert is_out_of_memory(error) == expected


def test_the_real_allocator_of_the_cpu_is_recognised() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)
