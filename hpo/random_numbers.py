"""PyTorch's random number generators."""

from __future__ import annotations

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
    """Set the generators to the states of `generator_states`."""
    cpu, *gpus = states
    torch.set_rng_state(cpu)
    torch.cuda.set_rng_state_all(gpus)
