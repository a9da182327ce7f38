"""Finds out whether this process has lost its GPU.

After an illegal memory access, a failed assertion in a kernel or a hardware error, the CUDA context of the
process is lost: every later call fails, whatever trial makes it. Only a new process gets a new context. So
such an error says little about the trial that met it, and nothing about the trials after it.
https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html (cudaErrorIllegalAddress)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hpo.device import DeviceInfo, synchronize
from hpo.errors import DeviceLostError, shorten
from hpo.memory import is_out_of_memory


@contextmanager
def lost_device_raised(device: DeviceInfo) -> Iterator[None]:
    """Raise DeviceLostError in place of any error of the block after which the device is lost."""
    try:
        yield
    except DeviceLostError:
        raise
    except Exception as error:
        raise_if_lost(device, error)
        raise


def raise_if_lost(device: DeviceInfo, error: Exception | None = None) -> None:
    """Raise DeviceLostError if the device is lost. `error` is the one that may be its consequence."""
    if is_lost(device):
        first_line = shorten(str(error).partition("\n")[0], 200)
        told = f" after {type(error).__name__}: {first_line}" if error else ""
        raise DeviceLostError(
            f"this process cannot use the {device.name} any more{told}. Start a new process (in a notebook: "
            "restart the kernel). A trial of a study goes on there from its last checkpoint."
        ) from error


def is_lost(device: DeviceInfo) -> bool:
    """Return whether this process can no longer compute on the device.

    A library may leave an error behind that the next call reports once, so the device is tried twice.
    """
    return device.type == "cuda" and _fails(device) and _fails(device)


def _fails(device: DeviceInfo) -> bool:
    """Return whether a small operation fails on the device. Full memory does not count."""
    import torch

    try:
        torch.ones(1, device=device.torch_device).add_(1)
        synchronize(device)
    except RuntimeError as error:
        return not is_out_of_memory(error)
    return False
