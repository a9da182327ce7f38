"""Models that `torch.compile` takes, and the shapes that are compiled before the first step.

`torch.compile` compiles for each new kind of shape (the last, smaller batch of an epoch), and a backward pass
when it is first run. The shapes that are foreseen are compiled before the first step; the rest compiles in a
step or an evaluation, and does not count as training.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

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
"""The mode that compiles the same, without CUDA graphs of PyTorch."""

RECOMPILE_LIMIT = 32
"""Graphs of one function that dynamo may make before it runs the rest uncompiled. Blocks share one: with and
without gradients, in several shapes, with autocast on and off, plain and in fp32."""


def apply_compile(model: MultitaskModel, mode: str, scope: str = "model") -> MultitaskModel:
    """Let `torch.compile` take the whole forward (`model`) or each transformer block (`layers`).

    Works in place, so parameter names and checkpoints stay as they are. Compilation itself happens at the
    first call of each shape. Blocks share one kernel, so `layers` compiles in the time of one block. The
    training loop records CUDA graphs itself (`hpo.training.step_graphs`), so PyTorch's are off.
    """
    mode = WITHOUT_GRAPHS.get(mode, mode)
    # The graphs of earlier models would count towards the limit.
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    for module in [model] if scope == "model" else encoder_layers(model.encoder):
        module.compile(mode=mode)
    return model


def drop_compiled(device: DeviceInfo) -> None:
    """Drop all compiled code, and give back free memory."""
    torch._dynamo.reset()
    release_free_memory(device)


def compiled_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules that run compiled; "" is the model itself, [] means none."""
    return [
        name
        for name, module in model.named_modules()
        if module._compiled_call_impl is not None
        or "_orig_mod" in module._modules  # as `torch.compile` wraps it
    ]


def compile_shapes(
    model: MultitaskModel,
    loss_fn: MultitaskLoss,
    batch: Callable[[int, int], Batch],
    mixed_precision: MixedPrecision,
    state: TrainState,
) -> None:
    """Compile before the first step: run micro-batches, with and without gradients, and drop the gradients.

    `batch` gives so many of the shortest and of the longest rows. The micro-batch is halved as in a step.
    """

    def run() -> None:
        model.zero_grad(set_to_none=True)  # of a run that memory ended
        # Two lengths, so that the compiler finds out which dimensions are dynamic.
        for part in (batch(0, state.micro_batch_size), batch(state.micro_batch_size, 0)):
            run_both_modes(model, loss_fn, part, mixed_precision)

    within_memory(run, state, batch(0, state.micro_batch_size))
    synchronize(mixed_precision.device)


def run_both_modes(
    model: MultitaskModel, loss_fn: MultitaskLoss, batch: Batch, mixed_precision: MixedPrecision
) -> tuple[list[Tensor], list[Tensor]]:
    """Loss and gradients of a batch in training mode, and its logits in evaluation mode."""
    num_items, batch = loss_fn.count(batch), batch.to(mixed_precision.device.torch_device)
    with mixed_precision.evaluation():
        evaluated = [value.clone() for value in model.eval()(*batch.inputs).values()]
    with mixed_precision.autocast():
        loss = loss_fn(model.train()(*batch.inputs), batch, num_items)
    mixed_precision.scaler.scale(loss).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return [loss.detach().clone(), *gradients], evaluated
