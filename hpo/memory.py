"""Memory of this process and its device: the peak, what the allocator keeps, what is out of memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from hpo.device import DeviceInfo

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # glibc's malloc.h


def disable_malloc_trim() -> None:
    """Let glibc keep the memory of freed tensors for the next ones (mallopt(3)); elsewhere do nothing.

    By default it gives every tensor of some megabytes back to the kernel at once, which clears the pages of
    the next one again: about a fifth of a training step. The process then holds on to its peak.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


@contextlib.contextmanager
def gc_frozen_imports() -> Iterator[None]:
    """Keep the garbage collector from all objects that exist at the end of the block; import libraries in it.

    torch and transformers make a million objects and no garbage. A full collection of them takes a third of
    a second, and there would be several before the first training step.
    """
    was_enabled = gc.isenabled()
    gc.collect()  # what is garbage now would stay for good
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def gc_collect(*, freeze: bool) -> None:
    """Free reference cycles, such as the model of a trial that failed.

    `freeze` exempts the objects that remain from later collections, as `gc_frozen_imports` does.
    """
    gc.collect()
    if freeze:
        gc.freeze()


class PeakMemory:
    """The peak of the memory held since `reset`, in bytes.

    CUDA: the allocator's peak on this device. CPU: the process's peak resident set (`VmHWM`), which
    Linux lets a process reset (proc(5), clear_refs); it includes the interpreter and the libraries.
    Where the reset is not allowed, it is the peak since the process began.
    """

    def __init__(self, device: DeviceInfo) -> None:
        self._device = device

    def reset(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(self._device.index)
            return
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> int:
        if self._device.type == "cuda":
            import torch

            return int(torch.cuda.max_memory_allocated(self._device.index))
        status = Path("/proc/self/status")
        if status.exists():
            for line in status.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is an allocator's refusal, on a GPU or a CPU."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # The CPU allocator raises a plain RuntimeError: c10/core/impl/alloc_cpu.cpp.
    messages = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(message in str(error) for message in messages)


def release_free_memory(device: DeviceInfo) -> None:
    """Give freed memory back, so that the next peak shows what is used and not what was kept."""
    gc.collect()
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
        return
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL("libc.so.6").malloc_trim(0)
