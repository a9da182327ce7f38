"""Memory of this process and its device: the peak, what the allocator keeps, what is out of memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
from collections.abc import Iterator
from pathlib import Path

from hpo.device import DeviceInfo

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # glibc's malloc.h


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Import large packages, or read a study, without Python's garbage collector.

    Hardly any of these objects is garbage, and the collector goes through all of them again and again: it
    takes 0.7 s of the 4.4 s of CPU of the imports of a trial.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def disable_malloc_trim() -> None:
    """Let glibc keep the memory of freed tensors for the next ones (mallopt(3)); elsewhere do nothing.

    By default it gives large tensors back to the kernel at once, which clears the pages of the next one
    again: about a fifth of a training step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def reset_peak_memory(device: DeviceInfo) -> None:
    """Let `peak_memory_bytes` count from now on, where the system allows that."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device.index)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes(device: DeviceInfo) -> int:
    """The peak of the memory held since `reset_peak_memory`.

    CUDA: the allocator's peak on this device. CPU: the process's peak resident set (`VmHWM`), with the
    interpreter and the libraries; since the process began where Linux does not allow the reset.
    """
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device.index))
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


_OUT_OF_MEMORY = (
    "can't allocate memory",  # PyTorch on a CPU: c10/core/impl/alloc_cpu.cpp
    "out of memory",  # CUDA itself, and Triton and NCCL, which ask it past PyTorch's allocator
    "BLAS_STATUS_ALLOC_FAILED",  # cuBLAS, and hipBLAS on AMD GPUs
    "CUDNN_STATUS_ALLOC_FAILED",
)
_NO_HANDLE = "BLAS_STATUS_NOT_INITIALIZED"
"""A handle and its workspace are made at the first product: no memory is left for them, or the GPU failed."""
_HANDLE_BYTES = 2**28
"""More than a handle and its workspace take."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is an allocator's refusal, on a GPU or a CPU."""
    if isinstance(error, MemoryError):
        return True
    if not isinstance(error, RuntimeError):  # `torch.OutOfMemoryError` is one, too
        return False
    text = str(error)
    return any(words in text for words in _OUT_OF_MEMORY) or (_NO_HANDLE in text and _gpu_is_full())


def _gpu_is_full() -> bool:
    """Whether the current GPU has no memory for a handle; one that failed does not answer."""
    import torch

    try:
        free, _ = torch.cuda.mem_get_info()
    except RuntimeError:
        return False
    return free < _HANDLE_BYTES


def release_free_memory(device: DeviceInfo) -> None:
    """Give freed memory back, so that the next peak shows what is used and not what was kept."""
    gc.collect()
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
        return
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL("libc.so.6").malloc_trim(0)
