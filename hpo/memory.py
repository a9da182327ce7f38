"""Memory of this process and its device: peak, allocator, out of memory."""

import contextlib
import ctypes
import gc
import resource
from pathlib import Path

import torch

from hpo.device import DeviceInfo

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # glibc's malloc.h


def disable_malloc_trim() -> None:
    """Let glibc keep the memory of freed tensors (mallopt(3)).

    By default it returns large tensors to the kernel at once, and the kernel clears the pages of the next
    tensor: about a fifth of a training step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def reset_peak_memory(device: DeviceInfo) -> None:
    """Let `peak_memory_bytes` count from now on, if the system allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device.index)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes(device: DeviceInfo) -> int:
    """Return the peak of memory since `reset_peak_memory`.

    CUDA: the allocator's peak on this device. CPU: the process's peak resident set (`VmHWM`), with libraries.
    Without the reset, it counts from the start of the process.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device.index))
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


_OUT_OF_MEMORY = (
    "can't allocate memory",  # PyTorch on a CPU: c10/core/impl/alloc_cpu.cpp
    "out of memory",  # CUDA, Triton, NCCL
    "BLAS_STATUS_ALLOC_FAILED",  # cuBLAS, and hipBLAS on AMD GPUs
    "CUDNN_STATUS_ALLOC_FAILED",
)
_NO_HANDLE = "BLAS_STATUS_NOT_INITIALIZED"
"""The first product creates a handle and its workspace. Either there is no memory left, or the GPU failed."""
_HANDLE_BYTES = 2**28
"""Upper bound for a handle and its workspace."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` is a lack of memory, on a GPU or a CPU."""
    if isinstance(error, MemoryError):
        return True
    if not isinstance(error, RuntimeError):  # `torch.OutOfMemoryError` is one, too
        return False
    text = str(error)
    return any(words in text for words in _OUT_OF_MEMORY) or (_NO_HANDLE in text and _gpu_is_full())


def _gpu_is_full() -> bool:
    """Return whether the current GPU has no memory for a handle. A failed GPU raises."""
    try:
        free, _ = torch.cuda.mem_get_info()
    except RuntimeError:
        return False
    return free < _HANDLE_BYTES


def release_free_memory(device: DeviceInfo) -> None:
    """Release cached memory, so the next peak shows only used memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL("libc.so.6").malloc_trim(0)
