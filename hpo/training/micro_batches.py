"""Smaller micro-batches if memory runs out, at the same global batch."""

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
    """Return `attempt()`. While memory runs out, halve the micro-batch and repeat it.

    If `release` frees unneeded memory, the micro-batch is not halved. Several ranks do not halve. Raises
    OutOfMemory if one example does not fit.
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
        # Only now are the error and its activations gone.
        if not is_released:
            state.micro_batch_size = -(-min(state.micro_batch_size, num_rows) // 2)
            state.oom_halvings += 1
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
