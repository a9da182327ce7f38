"""Observation of the real calls of a model in a training loop, forward and backward.

Hooks of the model see its calls, and a hook of PyTorch's optimisers the end of a step. Observed are the first
step and the first evaluation, and the first of each under another autocast. Other calls cost microseconds. A
compiled model is not observed, because it would run uncompiled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hpo.precision.effective import compiled_modules, observe
from hpo.precision.observation import Observation


class ObservedLoop:
    """Observes a model in a loop and tells `on_seen` the mode: whether it was a training step.

    All products go into `seen`. `close` must be called at the end of the loop.
    """

    def __init__(self, model: nn.Module, seen: Observation, on_seen: Callable[[bool], object]) -> None:
        self.model, self.seen, self._on_seen = model, seen, on_seen
        self.called_in_training = False
        """True if the model was called in training since the caller last set it to False."""
        self._device_type = next((one.device.type for one in model.parameters()), "cpu")
        self._kinds: set[object] = set()
        """The kinds of calls that were observed."""
        self._block: contextlib.ExitStack | None = None
        self._is_step = False
        self._is_paused = False
        self._hooks = contextlib.ExitStack()
        for handle in (
            model.register_forward_pre_hook(self._before),
            model.register_forward_hook(self._after, always_call=True),
            register_optimizer_step_pre_hook(lambda *_: self.end_step()),
        ):
            self._hooks.callback(handle.remove)

    def begin_step(self, kind: object) -> None:
        """Begin the observation of a training step, if none of its kind was observed."""
        if kind not in self._kinds:
            self._kinds.add(kind)
            self._begin(is_step=True)

    def end_step(self) -> None:
        """End the observation of a step, if there is one."""
        if self._block and self._is_step:
            self._end()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Observe nothing inside the block, such as a repetition in fp32. It ends an observation."""
        self._abandon()
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def close(self) -> None:
        self._abandon()
        self._hooks.close()

    def _before(self, model: nn.Module, _: Any) -> None:
        if self._is_paused or torch.compiler.is_compiling():
            return
        device = self._device_type
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        kind = (model.training, torch.is_grad_enabled() and model.training, autocast)
        self.called_in_training |= model.training
        if kind not in self._kinds:
            self._kinds.add(kind)
            if self._block is None:
                self._begin(is_step=model.training, in_call=True)

    def _after(self, *_: Any) -> None:
        if self._block and not self._is_step:
            self._end()

    def _begin(self, *, is_step: bool, in_call: bool = False) -> None:
        if compiled_modules(self.model):
            return
        block = contextlib.ExitStack()
        block.enter_context(observe(self.model, self.seen, in_call=in_call))
        self._block, self._is_step = block, is_step

    def _end(self) -> None:
        block, self._block = self._block, None
        if block:
            block.close()
            self._on_seen(self._is_step)

    def _abandon(self) -> None:
        """End an observation without a result, as of a step that is not finished."""
        block, self._block = self._block, None
        if block:
            with contextlib.suppress(InterruptedError), block:
                raise InterruptedError
