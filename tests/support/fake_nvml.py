"""A module in the place of `pynvml`, with the errors that NVML documents for each call.

NVML API reference: nvmlInit_v2, nvmlDeviceGetHandleByUUID, nvmlDeviceGetTotalEnergyConsumption (millijoules
since the driver was loaded, as an unsigned integer, on Volta and later).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType


class NVMLError(Exception):
    pass


NVMLError_NotSupported = type("NVMLError_NotSupported", (NVMLError,), {})
NVMLError_NotFound = type("NVMLError_NotFound", (NVMLError,), {})
NVMLError_GpuIsLost = type("NVMLError_GpuIsLost", (NVMLError,), {})
NVMLError_Uninitialized = type("NVMLError_Uninitialized", (NVMLError,), {})


class FakeNvml(ModuleType):
    """GPUs by their UUIDs, each with a function that returns its counter or raises."""

    NVMLError = NVMLError

    def __init__(
        self, counters: Mapping[str, Callable[[], int]], init_error: NVMLError | None = None
    ) -> None:
        super().__init__("pynvml")
        self._counters = counters
        self._init_error = init_error
        self._is_initialized = False

    def nvmlInit(self) -> None:
        if self._init_error is not None:
            raise self._init_error
        self._is_initialized = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object:
        if not self._is_initialized:
            raise NVMLError_Uninitialized("Uninitialized")
        if uuid not in self._counters:
            raise NVMLError_NotFound("Not Found")
        return (uuid,)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: tuple[str]) -> int:
        return self._counters[handle[0]]()
