"""The random number generators of PyTorch, NumPy and Python."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def manual_seed(seed: int) -> None:
    """Seed the generators of the CPU and of the GPUs, as `torch.manual_seed` does.

    That one also keeps a formatted stack for each kind of device that is not there, in case it comes: 1 ms a
    call, of a training step or of one of the hundreds of products that the compatibility check looks at.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def generator_states() -> list[Tensor]:
    """Return the states of the generators of the CPU and of the GPUs, for `set_generator_states`."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]


def set_generator_states(states: list[Tensor]) -> None:
    """Set the generators to the states of `generator_states`, which may be those of more GPUs."""
    cpu, *gpus = states
    torch.set_rng_state(cpu)
    for index, state in enumerate(gpus[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, index)


def seed_all(seed: int) -> None:
    """Seed PyTorch, NumPy's global generator and Python's `random`, for code that draws from any of them."""
    manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Restore the generators of `seed_all` after the block."""
    states = all_states()
    try:
        yield
    finally:
        set_all_states(states)


def all_states() -> dict[str, Any]:
    """Return the states of the generators of `seed_all` in plain containers and tensors."""
    name, keys, *rest = np.random.get_state(legacy=True)
    numpy_state = [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest]
    return {"torch": generator_states(), "numpy": numpy_state, "python": random.getstate()}


def set_all_states(states: Mapping[str, Any]) -> None:
    """Set the generators to the states of `all_states`."""
    set_generator_states(states["torch"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    random.setstate(states["python"])
