"""Compilation of models, before the first step.

`torch.compile` compiles for each new kind of shape (the last, smaller batch of an epoch), and a backward pass
at its first run. Expected shapes are compiled before the first step. Others compile in a step or an
evaluation, and do not count as training.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hpo.data.batches import Batch
from hpo.device import DeviceInfo, synchronize
from hpo.memory import release_free_memory
from hpo.models.encoder import encoder_layers
from hpo.models.multitask import MultitaskModel
from hpo.precision.amp import MixedPrecision
from hpo.training.budget import TrainState
from hpo.training.losses import MultitaskLoss
from hpo.training.micro_batches import within_memory

WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
"""{mode: the same mode without CUDA graphs of PyTorch}."""

RECOMPILE_LIMIT = 32
"""Most graphs of one function; dynamo runs the rest uncompiled. Blocks share one function: with and without
gradients, in several shapes, with autocast on and off, and in fp32."""

_limit_before: list[int] = []
"""The limit of the process, first, before `apply_compile` raised it."""


def apply_compile(model: MultitaskModel, mode: str, scope: str = "model") -> MultitaskModel:
    """Compile the whole forward (`model`) or each transformer block (`layers`) in place.

    Compilation happens at the first call of each shape. Blocks share one kernel, so `layers` compiles in the
    time of one block. The training loop records CUDA graphs itself (`hpo.training.step_graphs`).
    """
    mode = WITHOUT_GRAPHS.get(mode, mode)
    # The graphs of earlier models would count towards the limit.
    torch._dynamo.reset()
    _limit_before.append(torch._dynamo.config.recompile_limit)
    torch._dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, _limit_before[0])
    for module in [model] if scope == "model" else encoder_layers(model.encoder):
        module.compile(mode=mode)
    return model


def drop_compiled(device: DeviceInfo) -> None:
    """Drop compiled code, and restore the limit of `apply_compile`."""
    torch._dynamo.reset()
    if _limit_before:
        torch._dynamo.config.recompile_limit = _limit_before[0]
        _limit_before.clear()
    release_free_memory(device)


def compile_shapes(
    model: MultitaskModel,
    loss_fn: MultitaskLoss,
    batch: Callable[[int, int], Batch],
    mixed_precision: MixedPrecision,
    state: TrainState,
) -> None:
    """Compile before the first step by micro-batches with and without gradients.

    `batch` returns a number of the shortest and of the longest rows. The micro-batch is halved as in a step.
    """

    def run() -> None:
        model.zero_grad(set_to_none=True)  # from an attempt without enough memory
        # Two lengths show the compiler the dynamic dimensions.
        for part in (batch(0, state.micro_batch_size), batch(state.micro_batch_size, 0)):
            run_both_modes(model, loss_fn, part, mixed_precision)

    within_memory(run, state, batch(0, state.micro_batch_size))
    synchronize(mixed_precision.device)


def run_both_modes(
    model: MultitaskModel, loss_fn: MultitaskLoss, batch: Batch, mixed_precision: MixedPrecision
) -> tuple[list[Tensor], list[Tensor]]:
    """Return loss and gradients of a batch in training mode, and its logits in evaluation mode."""
    num_items, batch = loss_fn.count(batch), batch.to(mixed_precision.device.torch_device)
    with mixed_precision.evaluation():
        evaluated = [value.clone() for value in model.eval()(*batch.inputs).values()]
    with mixed_precision.autocast():
        loss = loss_fn(model.train()(*batch.inputs), batch, num_items)
    mixed_precision.scaler.scale(loss).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return [loss.detach().clone(), *gradients], evaluated
