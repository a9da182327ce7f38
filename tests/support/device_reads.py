"""A GPU that is not there, on which a read of a value, and a copy that would wait, is an error.

PyTorch's meta device has shapes and no values. A loop that runs on it reads none of the device's values, so
on a GPU it never waits for one. What the meta device would let pass is refused here: tensors that are made
on the host and copied, which is no copy from pinned memory, other than by `Batch.to`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpo.data.batches import Batch
from hpo.device import DeviceInfo

READS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select"}
READS |= {"unique_consecutive", "_unique2", "unique_dim"}
"""ATen operators whose result, or its shape, the host must know: `.item()`, `if tensor`, and so on."""

INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
MASKS = (torch.bool, torch.uint8)
COPIES = {"_to_copy", "copy_", "_copy_from"}


class MetaGpu(DeviceInfo):
    """What the trial's code takes for a GPU, and PyTorch for the meta device."""

    @property
    def torch_device(self) -> str:
        return "meta"


META_GPU = MetaGpu(type="cuda", name="no GPU", compute_capability=(9, 0), cuda_bf16=True)


class WaitsForDevice(AssertionError):
    """The host asked for a value that the device has to compute first, or for a copy that it waits for."""


class _Watch(TorchDispatchMode):
    """Raises WaitsForDevice at reads and copies; `device` is that whose values must not be read."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.copies_allowed = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        places = {tensor.device.type for tensor in tensors}
        name = func.overloadpacket.__name__
        if self.device in places:
            indices = args[1] if name in INDEXING else ()
            if name in READS or any(index is not None and index.dtype in MASKS for index in indices):
                raise WaitsForDevice(str(func))
        if name in COPIES and not self.copies_allowed:
            places.add(torch.device(kwargs.get("device") or next(iter(places))).type)
            if self.device in places and len(places) > 1:
                raise WaitsForDevice(f"{func} between {' and '.join(sorted(places))}")
        return func(*args, **kwargs)


@contextmanager
def no_waiting(device: str = "meta") -> Iterator[None]:
    """Raise WaitsForDevice where the block reads a value of `device` or copies to it but by `Batch.to`.

    With `cpu` for the device the optimiser's real kernels can be watched. `.tolist()` and `.numpy()` of a
    CPU's tensor are no operators, so they are not seen there.
    """
    watch = _Watch(device)
    to, tensor = Batch.to, torch.tensor

    def allowed(batch: Batch, where: str | torch.device) -> Batch:
        watch.copies_allowed = True
        try:
            return to(batch, where)
        finally:
            watch.copies_allowed = False

    def made(*args: Any, **kwargs: Any) -> Any:
        if device != "cpu" and torch.device(kwargs.get("device") or "cpu").type == device:
            raise WaitsForDevice("torch.tensor from the host")
        return tensor(*args, **kwargs)

    make: Callable[..., Any] = made
    with mock.patch.object(Batch, "to", allowed), mock.patch.object(torch, "tensor", make), watch:
        yield
