"""The device that the checks run on, and how each check shows its figure.

Each test has two forms. The form `cuda` carries the marker `gpu` and is skipped without a CUDA device. The
form `cpu` runs the same function with small sizes, so that no line runs for the first time on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hpo.device import DeviceInfo, probe_device


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def device(request: pytest.FixtureRequest) -> DeviceInfo:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return probe_device(request.param)


@pytest.fixture
def figure(capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Print a line at once, so that an interrupted run has shown it."""

    def show(text: str) -> None:
        with capsys.disabled():
            print(f"\n  {request.node.originalname}: {text}", flush=True)  # noqa: T201

    return show
