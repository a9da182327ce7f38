"""A module in the place of `pynvml`, with the errors that the NVML API reference documents for each call."""

from collections.abc import Callable, Mapping
from types import ModuleType


class NVMLError(Exception):
    pass


class FakeNvml(ModuleType):
    """GPUs by their UUIDs, each with a function that returns its counter in millijoules or raises."""

    NVMLError = NVMLError

    def __init__(
        self, counters: Mapping[str, Callable[[], int]], init_error: NVMLError | None = None
    ) -> None:
        super().__init__("pynvml")
        self._counters, self._init_error = counters, init_error
        self._is_initialized = False

    def nvmlInit(self) -> None:
        if self._init_error is not None:
            raise self._init_error
        self._is_initialized = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Callable[[], int]:
        if not self._is_initialized or uuid not in self._counters:
            raise NVMLError("Not Found" if self._is_initialized else "Uninitialized")
        return self._counters[uuid]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Callable[[], int]) -> int:
        return handle()
