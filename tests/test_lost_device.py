"""Finding out whether a GPU is lost."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from support.device_reads import META_GPU
from support.tiny import CPU

from hpo import lost_device
from hpo.errors import DeviceLostError
from hpo.lost_device import is_lost, lost_device_raised

LOST = RuntimeError("CUDA error: unspecified launch failure\nCompile with `TORCH_USE_CUDA_DSA`.")
FULL = torch.OutOfMemoryError("CUDA out of memory.")


def answer(monkeypatch: pytest.MonkeyPatch, *errors: Exception | None) -> None:
    """Let the waits for the device end with these errors in turn."""
    left = list(errors)

    def synchronize(_: Any) -> None:
        if error := left.pop(0):
            raise error

    monkeypatch.setattr(lost_device, "synchronize", synchronize)


@pytest.mark.parametrize(
    ("errors", "lost"),
    [([LOST, LOST], True), ([None], False), ([LOST, None], False), ([FULL], False), ([LOST, FULL], False)],
)
def test_a_gpu_is_lost_if_it_fails_twice(
    monkeypatch: pytest.MonkeyPatch, errors: list[Exception | None], lost: bool
) -> None:
    answer(monkeypatch, *errors)
    assert is_lost(META_GPU) == lost


def test_errors_on_working_and_lost_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, None, LOST, LOST)
    for device in (CPU, META_GPU):
        with pytest.raises(ZeroDivisionError), lost_device_raised(device):
            raise ZeroDivisionError
    with (
        pytest.raises(
            DeviceLostError, match="cannot use the no GPU any more after RuntimeError: CUDA error: uns"
        ),
        lost_device_raised(META_GPU),
    ):
        raise LOST


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_failed_assertion_in_a_kernel_of_a_real_gpu() -> None:
    program = (
        "import torch\nfrom hpo.device import probe_device\nfrom hpo.lost_device import *\n"
        "device = probe_device('cuda')\n"
        "assert not is_lost(device)\n"
        "with lost_device_raised(device):\n"
        "    torch._assert_async(torch.zeros((), device='cuda'))\n"
        "    torch.cuda.synchronize()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=False)
    assert "DeviceLostError: this process cannot use the" in ended.stderr
