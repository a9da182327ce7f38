"""The benchmark of weight roundings counts bytes and tells a step from its telemetry."""

from __future__ import annotations

from pathlib import Path

import pytest
import weight_rounding
from gpu import QUICK
from workload import write_workload

BYTES = {  # weight, gradient, Adam's moments, compensation
    "bf16 autocast": 4 + 4 + 8,
    "bf16-true, nearest": 2 + 2 + 8,
    "bf16-true, stochastic": 2 + 2 + 8,
    "bf16-true, compensated": 2 + 2 + 8 + 2,
}


@pytest.mark.parametrize("name", weight_rounding.CONTENDERS)
def test_held_bytes_are_those_of_weights_gradients_and_state(name: str, tmp_path: Path) -> None:
    write_workload(QUICK["tiny"], tmp_path)
    parts = weight_rounding.parts_of(QUICK["tiny"], tmp_path, name)
    seconds, measuring = next(weight_rounding.training_steps(parts))
    assert seconds > 0 < measuring
    weights = [weight for weight in parts.model.parameters() if weight.requires_grad]
    counts = 4 * len(weights)  # Adam's count of steps, in each of its states
    assert (
        weight_rounding.held_bytes(parts) == BYTES[name] * sum(weight.numel() for weight in weights) + counts
    )
