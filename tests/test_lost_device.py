"""Finding out whether a GPU is lost."""

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
