"""The device that the checks run on, and how each check shows its figure.

Each test has two forms. The form `cuda` carries the marker `gpu` and is skipped without a CUDA device. The
form `cpu` runs the same function with small sizes, so that no line runs for the first time on a GPU.
"""

import os
import time
from collections.abc import Callable

import pytest
import torch

from hpo.device import DeviceInfo, probe_device

BEGAN = time.monotonic()
GPU_SECONDS = float(os.environ.get("HPO_GPU_SECONDS", "170"))
"""No check begins on a GPU after this time, so that the run ends and shows what it has."""

# A warning of a library on CUDA, which nobody has seen yet, does not end the only run on a GPU.
ON_CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.filterwarnings("default")])


@pytest.fixture(params=[ON_CUDA, "cpu"])
def device(request: pytest.FixtureRequest) -> DeviceInfo:
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        if time.monotonic() - BEGAN > GPU_SECONDS:
            pytest.skip(f"the {GPU_SECONDS:g} seconds of HPO_GPU_SECONDS are over")
    return probe_device(request.param)


@pytest.fixture
def figure(capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Print a line at once, so that an interrupted run has shown it."""

    def show(text: str) -> None:
        with capsys.disabled():
            print(f"\n  {request.node.originalname}: {text}", flush=True)  # noqa: T201

    return show
