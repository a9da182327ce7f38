"""How long PyTorch's compiler works in the middle of training.

`torch.compile` compiles when a shape comes that its code so far does not fit (the last, smaller batch of an
epoch), compiles a backward pass when it is first run, and records CUDA graphs as shapes come up. What is
foreseen is compiled before the first step; the rest happens in a step or an evaluation, and is no training.
"""

from __future__ import annotations

import time


class CompileClock:
    """Seconds that the compiler has worked in this process, or recorded CUDA graphs, since `start`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def start(self) -> None:
        """Begin to count, until the next `torch._dynamo.reset()`."""
        from torch._dynamo.callback import on_compile_end, on_compile_start

        # Called for the outermost of nested compilations alone.
        on_compile_start(self._begin)
        on_compile_end(self._end)

    def _begin(self, _: object) -> None:
        self._began = time.perf_counter()

    def _end(self, _: object) -> None:
        self.seconds += time.perf_counter() - self._began
