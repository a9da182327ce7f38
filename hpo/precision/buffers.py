"""Buffers that training changes, such as the running statistics of a batch norm.

A forward pass that is not finite leaves NaN in them, and no later pass removes it: evaluation fails for a
step that was skipped, also in fp32. So a skipped or repeated step leaves the buffers as they were before it.
"""

import torch
from torch import Tensor, nn

Values = list[tuple[nn.Module, str, Tensor]]
"""Modules, names of their buffers, and copies of these."""


class StepBuffers:
    """The buffers of `model` that its steps change."""

    def __init__(self, model: nn.Module) -> None:
        self._owners = [module for module in model.modules() if module._buffers]
        self._changing: set[nn.Module] | None = None
        """Modules with such buffers; None before the first step."""
        self._before: Values | None = None
        self._versions: dict[tuple[nn.Module, str], int] = {}

    def begin_step(self) -> None:
        """Copy the buffers, or restore them if this step has begun already."""
        if self._before is not None:
            self.restore(self._before)
            return
        self._versions = {(module, name): each._version for module, name, each in self._all()}
        self._before = self.copy()

    def end_step(self, skipped: Tensor) -> None:
        """Restore the buffers if `skipped` is 1, without a wait for the device."""
        before, self._before = self._before, None
        if before is None:
            return
        written = {m for m, name, each in self._all() if self._versions.get((m, name)) != each._version}
        # The kernel of a batch norm writes, and counts no version.
        written |= {module for module, name, _ in before if name.startswith("running_")}
        self._changing = (self._changing or set()) | written
        self.restore([one for one in before if one[0] in self._changing], skipped)

    def copy(self) -> Values:
        known = self._changing
        return [(m, name, each.clone()) for m, name, each in self._all() if known is None or m in known]

    @torch.no_grad()
    def restore(self, values: Values, skipped: Tensor | None = None) -> None:
        for module, name, before in values:
            now = module._buffers.get(name)
            if now is not None and now.shape == before.shape:
                now.copy_(before if skipped is None else torch.where(skipped.bool(), before, now))

    def _all(self) -> Values:
        named = ((m, *item) for m in self._owners for item in m._buffers.items())
        return [(m, name, each) for m, name, each in named if each is not None and not each.is_inference()]
