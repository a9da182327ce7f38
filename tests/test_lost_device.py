"""Finding out whether a GPU is lost."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.device_reads import META_GPU
from support.tiny import CPU

from hpo import lost_device
from hpo.errors import DeviceLostError
from hpo.lost_device import is_lost, lost_device_raised

LOST = RuntimeError("CUDA error: unspecified launch failure\nCompile with `TORCH_USE_CUDA_DSA`.")
FULL = torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize(
    ("errors", "lost"),
    [([LOST, LOST], True), ([None], False), ([LOST, None], False), ([FULL], False), ([LOST, FULL], False)],
)
def test_a_gpu_is_lost_if_it_fails_twice(monkeypatch: Any, errors: list[Any], lost: bool) -> None:
    monkeypatch.setattr(lost_device, "synchronize", Mock(side_effect=errors))
    assert is_lost(META_GPU) == lost


def test_errors_on_working_and_lost_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_device, "synchronize", Mock(side_effect=[None, LOST, LOST]))
    for device in (CPU, META_GPU):
        with pytest.raises(ZeroDivisionError), lost_device_raised(device):
            raise ZeroDivisionError
    said = "cannot use the no GPU any more after RuntimeError: CUDA error: uns"
    with pytest.raises(DeviceLostError, match=said), lost_device_raised(META_GPU):
        raise LOST
