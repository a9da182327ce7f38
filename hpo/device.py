"""The hardware of this machine. Only this file probes it.

`probe_device` returns a plain record, so a test can describe any GPU. The record has native support only:
PyTorch also runs bf16 on a CPU without bf16 instructions, some 20 times slower than fp32.

PyTorch for ROCm calls an AMD GPU `cuda`, and its compute capability has another meaning than NVIDIA's. So the
record of an AMD GPU has an architecture instead.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from hpo.errors import InputError
from hpo.versions import install_hint

CUDA_CONTEXT_BYTES = 2**30
"""Reserve for each process's CUDA context, kernels and handles. No allocator counts them."""

# /proc/cpuinfo's flags (x86: "flags", Arm: "Features") and the names used here.
_CPU_FEATURES = {
    "avx2": "avx2",
    "avx512f": "avx512",
    "avx512_bf16": "avx512_bf16",
    "avx512_fp16": "avx512_fp16",
    "amx_bf16": "amx_bf16",
    "amx_fp16": "amx_fp16",
    "bf16": "arm_bf16",
    "asimdhp": "arm_fp16",
}


@dataclass(frozen=True)
class DeviceInfo:
    """One device for trials. Memory in bytes."""

    type: str
    """`cpu` or `cuda`."""
    name: str
    index: int = 0
    compute_capability: tuple[int, int] | None = None
    """NVIDIA only."""
    cuda_bf16: bool | None = None
    """NVIDIA only: `torch.cuda.is_bf16_supported(including_emulation=False)`."""
    gcn_arch: str = ""
    """AMD GPUs only: ROCm's name of the architecture, such as `gfx90a:sramecc+:xnack-`."""
    cpu_features: frozenset[str] = field(default_factory=frozenset)
    """CPU only: avx2, avx512, avx512_bf16, avx512_fp16, amx_bf16, amx_fp16, arm_bf16, arm_fp16."""
    total_memory_bytes: int = 0
    num_cores: int = 1
    has_torchao: bool = True
    """torchao is installed, for fp8."""
    has_bitsandbytes: bool = True
    """bitsandbytes is installed, for `base_precision: nf4`."""
    torch_version: str = ""
    cuda_version: str | None = None
    rocm_version: str | None = None
    host: str = ""
    uuid: str = ""
    """GPUs only: identity of the GPU, or of its part, in every process."""

    @property
    def device_id(self) -> str:
        """Identity on this machine: `cpu`, or the GPU's UUID."""
        return self.uuid or self.torch_device

    @property
    def is_part(self) -> bool:
        """True for a part of an NVIDIA GPU (MIG), slower than the whole GPU."""
        return self.uuid.startswith("MIG-") or " MIG " in self.name

    @property
    def kind(self) -> str:
        """Name and instructions. Devices of one kind give equal results."""
        facts = [*sorted(self.cpu_features), *filter(None, [self.gpu_architecture])]
        return f"{self.name} ({', '.join(facts)})" if facts else self.name

    @property
    def gcn_name(self) -> str:
        """Name of an AMD GPU's architecture without its settings: `gfx90a`."""
        return self.gcn_arch.partition(":")[0]

    @property
    def gpu_architecture(self) -> str:
        """Instructions of a GPU for people: `compute capability 9.0` or `gfx90a`. Empty: not known."""
        if self.gcn_arch or self.compute_capability is None:
            return self.gcn_name
        return "compute capability {}.{}".format(*self.compute_capability)

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> DeviceInfo:
        """Return the device from a trial's telemetry, without its memory and versions."""
        capability = facts.get("compute_capability")
        major, _, minor = (capability or "0.0").partition(".")
        return cls(
            type=facts.get("type") or "",
            name=facts["name"],
            compute_capability=(int(major), int(minor)) if capability else None,
            cpu_features=frozenset(facts.get("cpu_features") or ()),
            gcn_arch=facts.get("gcn_arch") or "",
        )

    @property
    def torch_device(self) -> str:
        return self.type if self.type == "cpu" else f"{self.type}:{self.index}"

    def describe(self) -> str:
        gib = self.total_memory_bytes / 2**30
        if self.type != "cpu":
            return f"{self.name} ({self.gpu_architecture or 'architecture not known'}, {gib:.0f} GiB)"
        features = ", ".join(sorted(self.cpu_features)) or "no vector extensions known"
        return f"{self.name} ({self.num_cores} cores, {gib:.0f} GiB; {features})"


def probe_device(kind: str = "auto", root: Path = Path("/")) -> DeviceInfo:
    """Describe the device for trials. `auto` is CUDA if there is one.

    `root` is the folder of `/proc` and `/sys`. Raises InputError for a missing `cuda`.
    """
    if _uses_cuda(kind, torch.cuda.is_available()):
        if "LOCAL_RANK" in os.environ:  # torchrun's
            torch.cuda.set_device(_local_rank(torch.cuda.device_count()))
        index = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(index)
        is_amd = torch.version.hip is not None
        return DeviceInfo(
            type="cuda",
            name=properties.name,
            index=index,
            compute_capability=None if is_amd else (properties.major, properties.minor),
            cuda_bf16=None if is_amd else torch.cuda.is_bf16_supported(including_emulation=False),
            gcn_arch=(properties.gcnArchName or "unknown") if is_amd else "",
            total_memory_bytes=properties.total_memory,
            has_torchao=find_spec("torchao") is not None,
            cuda_version=torch.version.cuda,
            rocm_version=torch.version.hip,
            uuid=device_uuid(os.environ.get("CUDA_VISIBLE_DEVICES"), str(properties.uuid)),
            **_common_facts(root),
        )
    cpuinfo = _cpuinfo(root)
    flags = (cpuinfo.get("flags") or cpuinfo.get("Features", "")).split()
    return DeviceInfo(
        type="cpu",
        name=cpuinfo.get("model name", platform.machine()),
        cpu_features=frozenset(_CPU_FEATURES[flag] for flag in flags if flag in _CPU_FEATURES),
        total_memory_bytes=available_memory_bytes(root),
        **_common_facts(root),
    )


def _common_facts(root: Path) -> dict[str, Any]:
    return {
        "num_cores": available_cores(root),
        "has_bitsandbytes": find_spec("bitsandbytes") is not None,
        "torch_version": torch.__version__,
        "host": socket.gethostname(),
    }


def _local_rank(num_devices: int) -> int:
    """Return the index of this torchrun process's own GPU."""
    rank = int(os.environ["LOCAL_RANK"])
    if rank >= num_devices:
        raise InputError(
            f"each process of torchrun must have its own GPU, but process {rank} (counted from 0) has none: "
            f"{num_devices} are here. Lower --nproc-per-node, or use device: cpu."
        )
    return rank


def _uses_cuda(kind: str, has_cuda: bool) -> bool:
    if kind not in ("auto", "cpu", "cuda"):
        raise InputError(f"device must be auto, cpu or cuda, but got {kind!r}.")
    if kind == "cuda" and not has_cuda:
        raise InputError("device is cuda, but PyTorch sees no CUDA device here. Use device: auto or cpu.")
    return has_cuda and kind != "cpu"


def device_uuid(visible: str | None, reported: str) -> str:
    """Return the UUID of this process's GPU or MIG part. CUDA may report the whole GPU's."""
    return visible if visible and visible.startswith("MIG-") and "," not in visible else reported


def cuda_devices(kind: str = "auto") -> tuple[str, ...]:
    """Return the GPUs of this machine by their names in CUDA_VISIBLE_DEVICES; empty for a CPU.

    Raises InputError like `probe_device`, and for several AMD GPUs with HIP_VISIBLE_DEVICES: HIP then ignores
    CUDA_VISIBLE_DEVICES, and all workers would get the first GPU.
    """
    if kind == "cpu":
        return ()
    num_devices = torch.cuda.device_count()  # makes no CUDA context
    if not _uses_cuda(kind, num_devices > 0):
        return ()
    if torch.version.hip is not None and num_devices > 1 and "HIP_VISIBLE_DEVICES" in os.environ:
        raise InputError(
            "HIP_VISIBLE_DEVICES must not be set for workers on several AMD GPUs, but is "
            f"{os.environ['HIP_VISIBLE_DEVICES']!r}. Use ROCR_VISIBLE_DEVICES."
        )
    return visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"), num_devices)


def visible_devices(visible: str | None, num_devices: int) -> tuple[str, ...]:
    """Return the entries of CUDA_VISIBLE_DEVICES (None: not set). CUDA sees `num_devices` of them.

    A process sees only the first of several MIG parts. All parts are returned, one for each process.
    """
    if visible is None:
        return tuple(str(index) for index in range(num_devices))
    entries = [entry.strip() for entry in visible.split(",")]
    parts = [entry for entry in entries if entry.startswith("MIG-")]
    return tuple(dict.fromkeys(parts)) if parts else tuple(entries[:num_devices])


def memory_share(device: DeviceInfo, num_workers: int) -> float:
    """Return the share of a GPU's memory for the tensors of each of `num_workers` processes.

    Raises InputError if their CUDA contexts leave nothing.
    """
    total = device.total_memory_bytes
    share = (total - num_workers * CUDA_CONTEXT_BYTES) / (num_workers * total)
    if share <= 0:
        raise InputError(
            f"{num_workers} workers need {num_workers * CUDA_CONTEXT_BYTES / 2**30:.0f} GiB for their CUDA "
            f"contexts alone, but this {device.name} has {total / 2**30:.0f} GiB. Run fewer on one device."
        )
    return share


def memory_limit(device: DeviceInfo, fraction: float | None) -> int | None:
    """Return the bytes of one process: `fraction` of a GPU's memory, or all of it. None: not known."""
    share = fraction if device.type == "cuda" and fraction is not None else 1.0
    return int(share * device.total_memory_bytes) or None


def available_cores(root: Path = Path("/")) -> int:
    """Return the number of cores of this process, by its affinity and the CPU quotas of its cgroups.

    A quota counts in whole cores. With one more thread, the kernel stops all threads again and again.
    """
    cores = len(os.sched_getaffinity(0))
    quotas = [limit.split() for limit in limits_of_cgroups(root, "cpu.max")]
    shares = [int(quota) / int(period) for quota, period in quotas if quota != "max"]
    return max(1, int(min([cores, *shares])))


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Return the memory of the machine, or the lowest limit of this process's cgroups."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(int(limit) for limit in limits_of_cgroups(root, "memory.max") if limit != "max")])


def limit_threads(device: DeviceInfo) -> None:
    """Limit PyTorch's threads to the cores of the process, unless OMP_NUM_THREADS is set.

    PyTorch ignores the quotas of cgroups.
    """
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > device.num_cores:
        torch.set_num_threads(device.num_cores)


def limits_of_cgroups(root: Path, name: str) -> list[str]:
    """Return the contents of this file in the process's cgroup (v2) and all above it.

    A container has its limits at the top: https://docs.kernel.org/admin-guide/cgroup-v2.html
    """
    groups = root / "proc/self/cgroup"
    lines = groups.read_text().splitlines() if groups.exists() else []
    parts = next((line[3:].strip("/").split("/") for line in lines if line.startswith("0::")), [])
    files = [root.joinpath("sys/fs/cgroup", *parts[:depth], name) for depth in range(len(parts) + 1)]
    return [file.read_text().strip() for file in files if file.exists()]


def _cpuinfo(root: Path) -> dict[str, str]:
    first_processor = (root / "proc/cpuinfo").read_text().split("\n\n", 1)[0]
    pairs = (line.split(":", 1) for line in first_processor.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


class Utilization:
    """Mean utilisation of the device, between 0 and 1, since the start.

    CPU: this process's CPU time over wall time and threads. NVIDIA: NVML's utilisation, sampled by `sample`;
    None without nvidia-ml-py. It is the share of time with a running kernel of any process, so a high value
    does not mean a GPU in full use. AMD: None, because ROCm has another definition.
    """

    def __init__(self, device: DeviceInfo, num_threads: int) -> None:
        self._device = device
        self._num_threads = num_threads
        self._samples: list[float] = []
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def sample(self) -> None:
        if self._device.type != "cuda" or self._device.gcn_arch:
            return
        # NVML is missing or does not support a part of a GPU, with its own class of errors. `read` is then
        # None.
        with contextlib.suppress(Exception):
            self._samples.append(torch.cuda.utilization(self._device.index) / 100)

    def read(self) -> float | None:
        if self._device.type == "cuda":
            return sum(self._samples) / len(self._samples) if self._samples else None
        wall, cpu = time.perf_counter(), time.process_time()
        elapsed = wall - self._wall
        if elapsed <= 0:
            return None
        return min(1.0, (cpu - self._cpu) / elapsed / self._num_threads)


class EnergyCounter:
    """NVML's energy counter of an NVIDIA GPU (Volta and later), of the whole board.

    The GPU is identified by its UUID, because CUDA_VISIBLE_DEVICES changes its index.
    """

    def __init__(self, device: DeviceInfo, *, shared: bool = False, num_ranks: int = 1) -> None:
        self._name = device.name
        self._nvml: Any = None
        self._handle: Any = None
        self.missing = ""
        """Reason for missing energy, as the end of a sentence; empty: there is a counter."""
        if device.type != "cuda" or device.gcn_arch:
            self.missing = f"this is not an NVIDIA GPU but {device.name}."
        elif device.is_part:
            self.missing = "this is a part of a GPU (MIG), and NVML counts the whole GPU."
        elif shared:
            self.missing = "other workers share this GPU. Run one worker on each GPU."
        elif num_ranks > 1:
            self.missing = f"{num_ranks} processes train together, and hpo does not add up their GPUs."
        else:
            self._open(device.uuid if device.uuid.startswith("GPU-") else f"GPU-{device.uuid}")

    def _open(self, uuid: str) -> None:
        try:
            import pynvml
        except ImportError:
            self.missing = f"the package nvidia-ml-py is not installed. {install_hint('nvml')}"
            return
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError as error:
            self._note(error)
            return
        self.read_joules()

    def read_joules(self) -> float | None:
        """Return the counted joules; None for the reason in `missing`."""
        if self.missing:
            return None
        try:
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000
        except self._nvml.NVMLError as error:
            self._note(error)
            return None

    def _note(self, error: Exception) -> None:
        self.missing = f"NVML does not report the energy of this {self._name} ({error})."


def synchronize(device: DeviceInfo) -> None:
    """Wait for all work on the device; a CPU needs no wait."""
    if device.type == "cuda":
        torch.cuda.synchronize(device.index)
