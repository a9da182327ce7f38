"""How long PyTorch's compiler works in the middle of training.

`torch.compile` compiles for each new kind of shape (the last, smaller batch of an epoch), compiles a backward
pass when it is first run, and records CUDA graphs. The shapes that are foreseen are compiled before the first
step; the rest compiles in a step or an evaluation, and does not count as training.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from torch import Tensor, nn

from hpo.data.batches import Batch
from hpo.device import synchronize
from hpo.models.encoder import encoder_layers
from hpo.models.multitask import MultitaskModel
from hpo.precision.amp import MixedPrecision
from hpo.training.losses import MultitaskLoss

RECOMPILE_LIMIT = 32
"""Graphs of one function that dynamo may make before it runs the rest uncompiled. Blocks share one: with and
without gradients, in several shapes, with autocast on and off, plain and in fp32."""


class CompileClock:
    """Seconds that the compiler has worked in this process, or recorded CUDA graphs, since `start`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def start(self) -> None:
        """Begin to count, until the next `torch._dynamo.reset()`."""
        from torch._dynamo.callback import on_compile_end, on_compile_start

        # Called for the outermost of nested compilations alone.
        on_compile_start(self._begin)
        on_compile_end(self._end)

    def _begin(self, _: object) -> None:
        self._began = time.perf_counter()

    def _end(self, _: object) -> None:
        self.seconds += time.perf_counter() - self._began


def apply_compile(
    model: MultitaskModel, mode: str, scope: str = "model", dynamic: bool | None = None
) -> MultitaskModel:
    """Let `torch.compile` take the whole forward (`model`) or each transformer block (`layers`).

    Works in place, so parameter names and checkpoints stay as they are. Compilation itself happens at the
    first call of each shape (`dynamic` as torch.compile's). Blocks share one kernel, so `layers` compiles in
    the time of one block.
    """
    for module in [model] if scope == "model" else encoder_layers(model.encoder):
        module.compile(mode=mode, dynamic=dynamic)
    return model


def compiled_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules that run compiled; "" is the model itself, [] means none."""
    return [name for name, module in model.named_modules() if module._compiled_call_impl is not None]


def run_compiled_shapes(
    model: MultitaskModel, loss_fn: MultitaskLoss, batches: Iterable[Batch], mixed_precision: MixedPrecision
) -> None:
    """Compile before the first step: run the batches, with and without gradients, and drop the gradients."""
    for batch in batches:
        run_both_modes(model, loss_fn, batch, mixed_precision)
    synchronize(mixed_precision.device)


def run_both_modes(
    model: MultitaskModel, loss_fn: MultitaskLoss, batch: Batch, mixed_precision: MixedPrecision
) -> tuple[list[Tensor], list[Tensor]]:
    """Loss and gradients of a batch in training mode, and its logits in evaluation mode."""
    items, batch = loss_fn.count(batch), batch.to(mixed_precision.device.torch_device)
    with mixed_precision.evaluation():
        logits = model.eval()(batch.input_ids_BL, batch.attention_mask_BL, batch.type_ids_BL)
        evaluated = [value.clone() for value in logits.values()]
    with mixed_precision.autocast():
        loss = loss_fn(model.train(), batch, items, items)
    mixed_precision.scaler.scale(loss).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return [loss.detach().clone(), *gradients], evaluated
