"""Micro-batches that fit into memory: halved where it runs out, at the same global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from hpo.data.batches import Batch
from hpo.errors import OutOfMemory
from hpo.memory import is_out_of_memory
from hpo.training.budget import TrainState
from hpo.training.distributed import NO_HALVING, memory_agreed

_T = TypeVar("_T")


def within_memory(
    attempt: Callable[[], _T],
    state: TrainState,
    batch: Batch,
    release: Callable[[], bool] = lambda: False,
) -> _T:
    """`attempt()`, again with half the micro-batch for as long as memory runs out.

    It runs `batch` in micro-batches of `state.micro_batch_size`. `release` gives up memory that the attempt
    can do without; if it gave up any, the micro-batch is not halved. Several ranks do not halve. Raises
    OutOfMemory where not even one example fits.
    """
    num_rows, length = batch.input_ids_BL.shape
    while True:
        try:
            with memory_agreed(NO_HALVING):
                return attempt()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            is_released = release()
            if state.micro_batch_size == 1 and not is_released:
                raise OutOfMemory(f"one example of {length} tokens does not fit into memory.") from error
        # Here, after the error and the activations that it holds are gone.
        if not is_released:
            state.micro_batch_size = -(-min(state.micro_batch_size, num_rows) // 2)
            state.oom_halvings += 1
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
