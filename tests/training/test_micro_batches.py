"""A global batch in micro-batches: gradients, norm and clipping."""

from dataclasses import replace

import pytest
import torch
from support.tiny import CPU, TASKS, amp_of, tiny_model, tiny_objective
from support.tiny_loop import accumulate, parameter_group
from torch import Tensor, nn

from hpo.training.loop import apply_gradients
from hpo.training.optim import build_optimizer, gradient_norm


def gradients_of(micro_batch_size: int, is_uncertain: bool) -> tuple[float, dict[str, Tensor]]:
    model, loss_fn = tiny_model(), tiny_objective()
    if is_uncertain:
        loss_fn.log_variance = {task.name: nn.Parameter(torch.tensor(0.3)) for task in TASKS}
    loss = accumulate(model, amp_of("fp32"), micro_batch_size, loss_fn)
    return float(loss), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("is_uncertain", [False, True])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 5])
def test_micro_batches_equal_the_whole_batch(micro_batch_size: int, is_uncertain: bool) -> None:
    loss, gradients = gradients_of(6, is_uncertain)
    micro_loss, micro_gradients = gradients_of(micro_batch_size, is_uncertain)
    assert micro_loss == pytest.approx(loss, rel=1e-6)
    assert gradients.keys() == micro_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(micro_gradients[name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize(
    "dtypes", [(torch.float32,), (torch.bfloat16,), (torch.bfloat16, torch.float32)], ids=str
)
def test_gradient_norm_equals_fp64(device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    shapes = [(300, 400), (7,), (), (1, 50)]
    for scale in (1e-3, 1e4):
        gradients = [torch.randn(shape).to(dtype) * scale for shape in shapes for dtype in dtypes]
        gradients.append(torch.randn(20, 30).to(dtypes[0]).t())
        expected = torch.cat([gradient.double().flatten() for gradient in gradients]).norm()
        norm = gradient_norm(gradients, device)
        assert norm.dtype == torch.float32
        assert float(norm) == pytest.approx(float(expected), rel=5e-6)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_clipping_of_bf16_gradients(device_type: str) -> None:
    torch.manual_seed(0)
    model = nn.ParameterList(nn.Parameter(torch.zeros(n, 401, dtype=torch.bfloat16)) for n in (3, 57, 300))
    for number, weight in enumerate(model):
        weight.grad = (1e4 * torch.randn_like(weight) + 10.0**number).to(torch.bfloat16)
    exact = torch.cat([weight.grad.double().flatten() for weight in model])
    amp = amp_of("bf16-true")
    amp.device = replace(CPU, type=device_type)
    optimizer = build_optimizer("sgd", [parameter_group(*model)], betas=(0.0, 0.0))
    apply_gradients(model, optimizer, torch.tensor(1.0), amp, max_grad_norm=1.0)
    clipped = torch.cat([weight.grad.double().flatten() for weight in model])
    expected = (exact / exact.norm()).to(torch.bfloat16).double()
    # A product that lies between two bf16 numbers may be rounded to either.
    assert bool(((clipped - expected).abs() <= 2**-7 * expected.abs()).all())
    assert float(clipped.norm()) == pytest.approx(float(expected.norm()), rel=1e-4)
