"""A lost GPU.

After an illegal memory access, a failed assertion in a kernel or a hardware error, the CUDA context of the
process is lost: every later call fails in every trial. Only a new process gets a new context. So such an
error says little about its trial, and nothing about later ones.
https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html (cudaErrorIllegalAddress)
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hpo.device import DeviceInfo, synchronize
from hpo.errors import DeviceLostError, shorten
from hpo.memory import is_out_of_memory


@contextmanager
def lost_device_raised(device: DeviceInfo) -> Iterator[None]:
    """Raise DeviceLostError instead of an error in the block if the device is lost."""
    try:
        yield
    except DeviceLostError:
        raise
    except Exception as error:
        raise_if_lost(device, error)
        raise


def raise_if_lost(device: DeviceInfo, error: Exception | None = None) -> None:
    """Raise DeviceLostError if the device is lost. `error` may be a consequence."""
    if is_lost(device):
        first_line = shorten(str(error).partition("\n")[0], 200)
        after = f" after {type(error).__name__}: {first_line}" if error else ""
        raise DeviceLostError(
            f"this process cannot use the {device.name} any more{after}. Start a new process (in a notebook: "
            "restart the kernel). A study's trial resumes there from its last checkpoint."
        ) from error


def is_lost(device: DeviceInfo) -> bool:
    """Return whether this process can no longer compute on the device.

    The next call may report an old error of a library once, so the device is tried twice.
    """
    return device.type == "cuda" and _fails(device) and _fails(device)


def _fails(device: DeviceInfo) -> bool:
    """Return whether a small operation fails on the device. Full memory does not count."""
    try:
        torch.ones(1, device=device.torch_device).add_(1)
        synchronize(device)
    except RuntimeError as error:
        return not is_out_of_memory(error)
    return False
