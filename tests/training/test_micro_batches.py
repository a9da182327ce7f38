"""A global batch in micro-batches: its gradients, running out of memory, and the update that follows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny import TASKS, tiny_model, tiny_objective
from tiny_loop import accumulate, amp_of
from torch import Tensor, nn

from hpo.training.optim import gradient_norm


def gradients_of(micro_batch_size: int) -> tuple[float, dict[str, Tensor]]:
    model = tiny_model()
    loss = accumulate(model, amp_of("fp32"), micro_batch_size)
    return float(loss), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 5])
def test_micro_batches_give_the_whole_batch_with_missing_labels(micro_batch_size: int) -> None:
    loss, gradients = gradients_of(6)
    micro_loss, micro_gradients = gradients_of(micro_batch_size)
    assert micro_loss == pytest.approx(loss, rel=1e-6)
    assert gradients.keys() == micro_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(micro_gradients[name], gradient, rtol=1e-5, atol=1e-6)


def test_gradients_outlive_the_next_run_of_a_cuda_graph() -> None:
    """A compiled model's first gradients lie in its graphs' memory, which the next forward overwrites."""
    model = tiny_model()
    pool: dict[Tensor, Any] = {}

    def keep(weight: Tensor) -> None:
        pool.setdefault(weight, weight.grad)

    def run_graph(*inputs: Any) -> Any:
        for gradient in pool.values():
            gradient.fill_(torch.nan)
        return model._call_impl(*inputs)

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(keep)
    model._compiled_call_impl = run_graph
    accumulate(model, amp_of("fp32"), 2)
    assert pool
    expected = gradients_of(6)[1]
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, expected.get(name), rtol=1e-5, atol=1e-6)


def test_uncertainty_weighting_adds_its_terms_once_however_the_batch_is_cut() -> None:
    def total(micro_batch_size: int) -> float:
        loss_fn = tiny_objective()
        loss_fn.log_variance = {task.name: nn.Parameter(torch.tensor(0.3)) for task in TASKS}
        return float(accumulate(tiny_model(), amp_of("fp32"), micro_batch_size, loss_fn))

    plain = gradients_of(6)[0]
    assert total(6) == pytest.approx(np.exp(-0.3) * plain + 4 * 0.3, rel=1e-5)
    assert total(2) == pytest.approx(total(6), rel=1e-6)


@pytest.mark.parametrize(
    ("device", "dtypes"),
    [
        ("cuda", (torch.float32,)),
        ("cpu", (torch.float32,)),
        ("cpu", (torch.bfloat16,)),
        ("cpu", (torch.bfloat16, torch.float32)),
    ],
)
def test_the_norm_of_gradients_is_that_in_fp64(device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    shapes = [(300, 400), (7,), (), (1, 50)]
    gradients = [torch.randn(shape).to(dtype) * 1e-3 for shape in shapes for dtype in dtypes]
    gradients.append(torch.randn(20, 30).to(dtypes[0]).t())
    expected = torch.cat([gradient.double().flatten() for gradient in gradients]).norm()
    norm = gradient_norm(gradients, device)
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(float(expected), rel=1e-6)
