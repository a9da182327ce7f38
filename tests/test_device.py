"""The record of a device, memory, utilisation and energy."""

import os
import platform
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.described_cpu import CPUS, describe_cpu
from support.fake_nvml import FakeNvml, NVMLError
from support.tiny import CPU

from hpo.device import (
    DeviceInfo,
    EnergyCounter,
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
from hpo.trial.telemetry import device_facts

AMD = DeviceInfo(type="cuda", name="AMD GPU", gcn_arch="gfx90a:sramecc+:xnack-", rocm_version="7.1")
NVIDIA = DeviceInfo(type="cuda", name="H200", index=1, compute_capability=(9, 0), uuid="5ef", host="node1")
MEMORY_GPU = DeviceInfo(type="cuda", name="Example GPU", total_memory_bytes=16 * 2**30)


CPUINFO = "model name : Example CPU\nflags : fpu avx2 amx_bf16\n\nmodel name : other\n"


def machine(root: Path, cgroups: str = "", cpuinfo: str = CPUINFO, **limits: str) -> Path:
    """Write `/proc` and `/sys` of a machine. `limits` are paths below /sys/fs/cgroup."""
    files = {"proc/self/cgroup": cgroups, "proc/cpuinfo": cpuinfo}
    files |= {f"sys/fs/cgroup/{path}": content for path, content in limits.items()}
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    return root


FEATURES = {
    "avx2": {"avx2"},
    "avx512_bf16": {"avx2", "avx512", "avx512_bf16"},
    "avx512_fp16": {"avx2", "avx512", "avx512_fp16"},
    "amx": {"avx2", "avx512", "avx512_bf16", "avx512_fp16", "amx_bf16"},
    "arm": {"arm_bf16", "arm_fp16"},
}


@pytest.mark.parametrize("cpu", CPUS)
def test_instructions_of_each_described_cpu(tmp_path: Path, cpu: str) -> None:
    device = probe_device("cpu", machine(tmp_path, cpuinfo=describe_cpu(cpu, CPUINFO)))
    assert device.cpu_features == FEATURES[cpu]
    assert device.name == (platform.machine() if cpu == "arm" else "Example CPU")


@pytest.mark.parametrize(
    ("cgroups", "limits", "cores", "memory"),
    [
        ("0::/slurm/job", {"slurm/job/cpu.max": "300000 100000", "slurm/job/memory.max": "1000"}, 3, 1000),
        ("0::/slurm/job", {"slurm/cpu.max": "250000 100000", "slurm/job/cpu.max": "max 100000"}, 2, None),
        ("0::/pod", {"memory.max": "max", "pod/memory.max": "2000", "pod/cpu.max": "50000 100000"}, 1, 2000),
        ("0::/docker/5ef", {"cpu.max": "200000 100000", "memory.max": "3000"}, 2, 3000),  # in a container
        ("0::/job", {"other/cpu.max": "100000 100000", "other/memory.max": "1"}, 8, None),
        ("", {}, 8, None),
    ],
)
def test_limits(tmp_path: Path, monkeypatch: Any, cgroups: str, limits: Any, cores: int, memory: Any) -> None:
    """Cgroups limit cores and memory."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    device = probe_device("cpu", machine(tmp_path, cgroups, **limits))
    assert (device.num_cores, device.name, device.device_id) == (cores, "Example CPU", "cpu")
    assert device.cpu_features == {"avx2", "amx_bf16"}
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert device.total_memory_bytes == (memory or whole)
    assert device.describe().startswith(f"Example CPU ({cores} cores, ")


def test_threads_are_limited_to_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", limits.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for cores in (3, 16):
        limit_threads(replace(CPU, num_cores=cores))
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    limit_threads(replace(CPU, num_cores=3))
    assert limits == [3]


@pytest.mark.parametrize("probe", [probe_device, cuda_devices])
def test_missing_kind_of_device(probe: Callable[[str], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InputError, match="PyTorch sees no CUDA device here"):
        probe("cuda")
    with pytest.raises(InputError, match="auto, cpu or cuda, but got 'tpu'"):
        probe("tpu")


@pytest.mark.parametrize(
    ("visible", "num_devices", "expected"),
    [
        (None, 0, []),
        (None, 3, ["0", "1", "2"]),
        ("2, 0", 2, ["2", "0"]),
        ("0,1,-1,2", 2, ["0", "1"]),  # CUDA stops at the first unknown one
        ("MIG-a,MIG-b", 1, ["MIG-a", "MIG-b"]),  # one process sees one of them
    ],
)
def test_names_of_visible_devices(visible: str | None, num_devices: int, expected: list[str]) -> None:
    assert [*visible_devices(visible, num_devices)] == expected


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, "GPU-5ef"), ("0", "GPU-5ef"), ("MIG-a", "MIG-a"), ("MIG-a,MIG-b", "GPU-5ef")],
)
def test_uuid_of_a_device(visible: str | None, expected: str) -> None:
    assert device_uuid(visible, "GPU-5ef") == expected


@pytest.fixture
def probed_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., DeviceInfo]:
    """Probe a machine with one GPU of these properties."""

    def probe(*, hip: str | None = None, **properties: Any) -> DeviceInfo:
        facts = {"name": "Test GPU", "major": 9, "minor": 0, "total_memory": 2**36, "uuid": "5ef"}
        facts |= properties
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.version, "cuda", None if hip else "13.0")
        for name, value in (("is_available", True), ("current_device", 1)):
            monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: SimpleNamespace(**facts))
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
        return probe_device("auto")

    return probe


def test_probe_of_an_nvidia_gpu(probed_gpu: Callable[..., DeviceInfo]) -> None:
    device = probed_gpu(name="NVIDIA H200")
    assert (device.type, device.torch_device, device.device_id) == ("cuda", "cuda:1", "5ef")
    assert replace(device, uuid="").device_id == "cuda:1"
    assert (device.compute_capability, device.cuda_bf16, device.gcn_arch) == ((9, 0), False, "")
    assert (device.cuda_version, device.rocm_version) == ("13.0", None)
    assert device.kind == "NVIDIA H200 (compute capability 9.0)"
    assert device.describe() == "NVIDIA H200 (compute capability 9.0, 64 GiB)"
    assert probe_device("cpu").type == "cpu"


def test_probe_of_an_amd_gpu(probed_gpu: Callable[..., DeviceInfo]) -> None:
    # PyTorch reports the compute capability (9, 0) of an H100 for it.
    device = probed_gpu(name="AMD Instinct MI250X", hip="7.1", gcnArchName="gfx90a:sramecc+:xnack-")
    assert (device.compute_capability, device.cuda_bf16, device.cuda_version) == (None, None, None)
    assert (device.type, device.gcn_arch, device.rocm_version) == ("cuda", "gfx90a:sramecc+:xnack-", "7.1")
    assert device.describe() == "AMD Instinct MI250X (gfx90a, 64 GiB)"
    assert probed_gpu(hip="7.1", gcnArchName="").gcn_arch == "unknown"


def test_torchrun_needs_a_gpu_for_each_process(probed_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    probed_gpu()
    assert chosen == [1]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(InputError, match=r"process 2 \(counted from 0\) has none: 2 are here"):
        probed_gpu()


@pytest.mark.parametrize("device", [AMD, NVIDIA, replace(CPU, cpu_features=frozenset({"avx2", "amx_bf16"}))])
def test_device_from_the_facts_of_a_trial(device: DeviceInfo) -> None:
    read = DeviceInfo.from_facts(device_facts(device, shared=False, memory_fraction=None))
    assert (read.kind, read.type, read.gcn_arch) == (device.kind, device.type, device.gcn_arch)
    assert read.compute_capability == device.compute_capability


def test_gpus_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2,3")
    assert (cuda_devices("cpu"), cuda_devices()) == ((), ("5", "6"))
    monkeypatch.setattr(torch.version, "hip", "7.1")
    with pytest.raises(InputError, match=r"HIP_VISIBLE_DEVICES must not be set .* Use ROCR_VISIBLE_DEVICES"):
        cuda_devices()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert cuda_devices() == ("5",), "one GPU needs no choice"


def not_supported() -> int:
    raise NVMLError("Not Supported")


@pytest.mark.parametrize("uuid", ["5ef", "GPU-5ef"])  # PyTorch omits NVML's prefix
def test_energy_of_the_gpu_with_the_uuid(monkeypatch: pytest.MonkeyPatch, uuid: str) -> None:
    readings = iter([1_000, 4_500])
    nvml = FakeNvml({"GPU-0": not_supported, "GPU-5ef": lambda: next(readings)})
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    counter = EnergyCounter(replace(NVIDIA, uuid=uuid))
    assert (counter.missing, counter.read_joules()) == ("", 4.5), "the first reading is a test"


@pytest.mark.parametrize(
    ("device", "options", "reason"),
    [
        (AMD, {}, "this is not an NVIDIA GPU but AMD GPU."),
        (replace(NVIDIA, uuid="MIG-1"), {}, "this is a part of a GPU (MIG), and NVML counts the whole GPU."),
        (NVIDIA, {"shared": True}, "other workers share this GPU. Run one worker on each GPU."),
        (NVIDIA, {"num_ranks": 2}, "2 processes train together, and hpo does not add up their GPUs."),
        (replace(NVIDIA, uuid="old"), {}, "NVML does not report the energy of this H200 (Not Supported)."),
        (replace(NVIDIA, uuid="gone"), {}, "NVML does not report the energy of this H200 (Not Found)."),
    ],
)
def test_missing_energy(monkeypatch: Any, device: DeviceInfo, options: Any, reason: str) -> None:
    counters = {"GPU-5ef": lambda: 1, "MIG-1": lambda: 1, "GPU-old": not_supported}
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(counters))
    counter = EnergyCounter(device, **options)
    assert (counter.missing, counter.read_joules()) == (reason, None)


def test_energy_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert "make install EXTRAS=nvml" in EnergyCounter(NVIDIA).missing
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml({}, NVMLError("Driver Not Loaded")))
    assert "(Driver Not Loaded)" in EnergyCounter(NVIDIA).missing


def test_memory_of_a_process() -> None:
    for num_workers in (1, 2, 8):
        share = memory_share(MEMORY_GPU, num_workers)
        assert num_workers * (share * 16 + 1) == pytest.approx(16)
    with pytest.raises(InputError, match=r"16 workers need 16 GiB .* but this Example GPU has 16 GiB"):
        memory_share(MEMORY_GPU, 16)
    assert [memory_limit(MEMORY_GPU, fraction) for fraction in (0.25, None)] == [4 * 2**30, 16 * 2**30]
    assert memory_limit(replace(CPU, total_memory_bytes=2**30), 0.25) == 2**30, "the fraction is for GPUs"
    assert memory_limit(CPU, None) is None


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK),
    reason="Linux resets the peak only if /proc/self/clear_refs is writable",
)
@pytest.mark.parametrize("freed_is_kept", [False, True])
def test_peak_memory_includes_freed_memory_until_its_reset(freed_is_kept: bool) -> None:
    if freed_is_kept:
        disable_malloc_trim()
    device = probe_device("cpu")

    def reset_peak() -> int:
        release_free_memory(device)
        reset_peak_memory(device)
        return peak_memory_bytes(device)

    before = reset_peak()
    held = bytearray(os.urandom(1)) * 200_000_000
    del held
    assert peak_memory_bytes(device) - before > 150_000_000
    assert reset_peak() - before < 100_000_000


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("NCCL error: unhandled cuda error. Cuda failure 2 'out of memory'"), True),
        (RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_out_of_memory(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) == expected
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)
