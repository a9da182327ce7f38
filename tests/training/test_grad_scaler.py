"""Loss scaling, accumulation, clipping and the update, against plain arithmetic in fp64.

Faults of other libraries: unscaling twice (accelerate 113), clipping before the last micro-batch
(accelerate 641), updating the scale before unscaling (DeepSpeed 8588).
"""

from collections.abc import Mapping
from functools import partial

import pytest
import torch
from support.tiny import amp_of, tiny_batch
from support.tiny_loop import parameter_group
from torch import Tensor, nn

from hpo.data.batches import Batch
from hpo.training.budget import TrainState
from hpo.training.loop import Learner, accumulate_gradients, apply_gradients
from hpo.training.optim import build_optimizer

NUM_ROWS, NUM_WEIGHTS, STEPS = 7, 5, 9
MAX_NORM, LEARNING_RATE, DECAY, BETAS = 0.5, 0.05, 0.01, (0.9, 0.98)
OVERFLOWS = (2, 3, 6)
"""Steps whose scaled gradients leave the range of fp32."""
SCALER = {"init_scale": 2.0**16, "growth_factor": 4.0, "backoff_factor": 0.5, "growth_interval": 2}

ROWS = torch.randn(STEPS, NUM_ROWS, NUM_WEIGHTS, generator=torch.Generator().manual_seed(1))
TRUTH = torch.randn(STEPS, NUM_ROWS, generator=torch.Generator().manual_seed(2))


def factor(step: int) -> float:
    return 1e36 if step in OVERFLOWS else 1.0


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, NUM_WEIGHTS))

    def forward(self, *_: object) -> Tensor:
        return self.weight * 1


class Squares:
    """Half the mean squared error of the rows of a step, as a `MultitaskLoss` of no task."""

    def __init__(self) -> None:
        self.step = 0

    def count(self, batch: Batch) -> dict[str, int]:
        return {"rows": len(batch.windows_B)}

    def __call__(self, weight: Tensor, batch: Batch, num_items: Mapping[str, int], share: float) -> Tensor:
        assert share == len(batch.windows_B) / NUM_ROWS
        rows, truth = ROWS[self.step][batch.windows_B], TRUTH[self.step][batch.windows_B]
        errors = (rows * weight).sum(dim=1) - truth
        return factor(self.step) * errors.square().sum() / 2 / num_items["rows"]


PLAIN = {"sgd": partial(torch.optim.SGD, momentum=BETAS[0]), "adamw": partial(torch.optim.AdamW, betas=BETAS)}


def reference(optimizer: str) -> list[tuple[Tensor, float]]:
    """Weights and scale after each step, in fp64 and without loss scaling."""
    weight = nn.Parameter(torch.linspace(-1, 1, NUM_WEIGHTS).double())
    plain = PLAIN[optimizer]([weight], lr=LEARNING_RATE, weight_decay=DECAY)
    scale, good, found = SCALER["init_scale"], 0, []
    for step in range(STEPS):
        rows, truth = ROWS[step].double(), TRUTH[step].double()
        gradient = factor(step) * rows.T @ (rows @ weight.detach() - truth) / NUM_ROWS
        if (gradient * scale).abs().max() > torch.finfo(torch.float32).max:
            scale, good = scale * SCALER["backoff_factor"], 0
        else:
            weight.grad = gradient * min(1.0, MAX_NORM / (float(gradient.norm()) + 1e-6))
            plain.step()
            good += 1
        if good == SCALER["growth_interval"]:
            scale, good = scale * SCALER["growth_factor"], 0
        found.append((weight.detach().clone(), scale))
    return found


@pytest.mark.parametrize("micro_batch_size", [NUM_ROWS, 3, 1])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_steps_equal_plain_arithmetic(optimizer: str, micro_batch_size: int) -> None:
    model, loss_fn, amp = Linear(), Squares(), amp_of("fp16", **SCALER)
    group = parameter_group(model.weight, lr=LEARNING_RATE, weight_decay=DECAY)
    update = build_optimizer(optimizer, [group], betas=BETAS)
    state, learner = TrainState(micro_batch_size=micro_batch_size), Learner(model, loss_fn, amp)
    expected = reference(optimizer)
    assert len({scale for _, scale in expected}) > 3, "the scale falls and grows"
    for step, (weight, scale) in enumerate(expected):
        loss_fn.step = state.step = step
        loss = accumulate_gradients(learner, tiny_batch(NUM_ROWS), 0, state)
        apply_gradients(model.parameters(), update, loss, amp, MAX_NORM)
        torch.testing.assert_close(model.weight.detach().double(), weight, rtol=2e-5, atol=1e-6)
        assert amp.scaler.get_scale() == scale
    assert amp.statistics().skipped_steps == len(OVERFLOWS)
