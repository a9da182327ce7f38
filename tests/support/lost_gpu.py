"""A GPU that loses the context of its process, for the tests on a CPU."""

from collections.abc import Callable
from typing import Any

from hpo import lost_device
from hpo.precision.amp import MixedPrecision
from hpo.training import loop
from hpo.training.throughput import ThroughputMeter
from hpo.trial import best_model
from hpo.trial.measure import Side

MESSAGE = "CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA`."
WAIT_FOR_THE_DEVICE = {
    "step": (loop, "accumulate_gradients"),
    "compatibility check": (Side, "run"),
    "throughput": (ThroughputMeter, "summary"),
    "statistics": (MixedPrecision, "statistics"),
    "scores on test": (best_model, "predict_logits"),
}
"""Functions that fail on a lost context, by a name for the test."""


class LostGpu:
    """From call number `at` of the function `place`, all functions above fail, until a new process starts."""

    def __init__(self, replace: Callable[[Any, str, Any], None], place: str, at: int) -> None:
        self.is_lost = False
        self._left = at
        for name, (owner, function) in WAIT_FOR_THE_DEVICE.items():
            replace(owner, function, self._failing(getattr(owner, function), is_place=name == place))
        replace(lost_device, "is_lost", lambda _: self.is_lost)

    def start_new_process(self) -> None:
        self.is_lost = False

    def _failing(self, function: Callable[..., Any], *, is_place: bool) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self._left -= is_place
            self.is_lost = self.is_lost or (is_place and self._left == 0)
            if self.is_lost:
                raise RuntimeError(MESSAGE)
            return function(*args, **options)

        return call
