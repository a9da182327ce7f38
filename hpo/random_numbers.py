"""PyTorch's random number generators."""

from __future__ import annotations

import torch


def manual_seed(seed: int) -> None:
    """Seed the generators of the CPU and of the GPUs, as `torch.manual_seed` does.

    That one also keeps a formatted stack for each kind of device that is not there, in case it comes: 1 ms a
    call, of a training step or of one of the hundreds of products that the compatibility check looks at.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
