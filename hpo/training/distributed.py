"""Several processes that train one model together (*ranks*), by DistributedDataParallel under torchrun.

torchrun starts a rank for each GPU, or several on a CPU. Rank 0 is the worker that the study sees; the others
follow it from trial to trial. As in `torch.distributed`, whether there are other ranks is a fact of the
process; where there are none, every function here does nothing.

Every rank collates the whole global batch and runs its own rows of it, in micro-batches. So each knows the
labelled items, examples and tokens of the batch without asking, losses are normalised over micro-batches and
ranks alike, and gradients are summed and not averaged: all ranks clip by one norm and skip the same steps.

A rank that runs out of memory in a backward pass that reduces would leave the others waiting. So the bare
model runs micro-batches, all ranks agree that nobody ran out of memory (`memory_agreed`), and then a backward
pass of 0 through DistributedDataParallel reduces what each weight has accumulated (`GradientSum`).

Rank 0 decides what the ranks must have in common and cannot compute alike (`decide`): its clock, whether to
stop, the pruner, the checkpoint to go on from. Memory that runs out on any rank ends the trial as `oom`.
Whatever else is raised on one rank ends its process, and torchrun ends the others: the trial goes on from its
checkpoint at the next start. A rank that keeps the others waiting in a step for `TIMEOUT` is taken to hang.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpo.data.batches import Batch
from hpo.errors import InputError, OutOfMemory, Preempted, RunError
from hpo.memory import is_out_of_memory

TIMEOUT = timedelta(minutes=15)
"""Longer than any rank keeps the others waiting in a step: a shape that one sees first may be compiled."""
NO_HALVING = "Where several ranks train, the micro-batch is not halved: lower `micro_batch_size`."
_T = TypeVar("_T")

_decisions: Any = None
"""The group in which the others wait for rank 0, for as long as it lives."""


def is_distributed() -> bool:
    """Whether this process trains together with others."""
    return _decisions is not None


def rank() -> int:
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    return dist.get_world_size() if is_distributed() else 1


@contextlib.contextmanager
def connected_ranks() -> Iterator[None]:
    """Connect the processes that one torchrun started; at the end of rank 0's block the others' tasks end."""
    global _decisions
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=TIMEOUT)
    _decisions = dist.new_group(backend="gloo", timeout=timedelta(days=365))
    is_lost = False
    try:
        yield
    except RunError:  # one of the others may hang, and would never take what is announced
        is_lost = True
        raise
    finally:
        if not is_lost:
            with contextlib.suppress(RuntimeError):  # the others may be gone
                announce(None)
        dist.destroy_process_group()
        _decisions = None


def decide(what: Callable[[], _T]) -> _T:
    """`what()` as rank 0 alone calls it; if it raises there, the others raise Preempted."""
    if not is_distributed():
        return what()
    value, error = None, None
    if rank() == 0:
        try:
            value = what()
        except Exception as raised:
            error = raised
    decision = [(value, error is not None)]
    dist.broadcast_object_list(decision, src=0, group=_decisions)
    if error is not None:
        raise error
    value, has_ended = decision[0]
    if has_ended:
        raise Preempted("rank 0 ended the trial.")
    return value  # type: ignore[return-value]


def announce(task: Any) -> None:
    """Give the other ranks, which wait for it in `next_task`, what rank 0 does next."""
    if rank() == 0:
        decide(lambda: task)


def next_task() -> Any:
    """What rank 0 announces; None: there is no more."""
    return decide(lambda: None)


@contextlib.contextmanager
def memory_agreed(advice: str) -> Iterator[None]:
    """A block that all ranks run: raises OutOfMemory on all of them if one ran out of memory in it.

    In a process that trains alone, errors pass.
    """
    refusal: BaseException | None = None
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_distributed() or not is_out_of_memory(error):
            raise
        refusal = error
    if is_distributed() and (first := int(largest(rank() + 1 if refusal else 0))):
        raise OutOfMemory(f"rank {first - 1} ran out of memory. {advice}") from refusal


def check_same(facts: Mapping[str, Any]) -> None:
    """Raise InputError unless all ranks have the same facts."""
    if not is_distributed():
        return
    everyone: list[Any] = [None] * world_size()
    dist.all_gather_object(everyone, dict(facts))
    for name in facts:
        values = [each[name] for each in everyone]
        if values.count(values[0]) < len(values):
            raise InputError(f"all ranks must have the same {name}, but by rank they have {values}.")


def rows_of_rank(batch: Batch) -> Batch:
    """This rank's rows of a global batch; perhaps none."""
    first, end = (len(batch.windows_B) * each // world_size() for each in (rank(), rank() + 1))
    return batch.rows(slice(first, end))


def add_up(tensor: Tensor) -> Tensor:
    """Replace a tensor by its sum over ranks."""
    if is_distributed():
        dist.all_reduce(tensor)
    return tensor


def largest(number: float) -> float:
    """The largest that any rank has."""
    numbers = torch.tensor(number, dtype=torch.float64)
    if is_distributed():
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return float(numbers)


def merge(rows: Mapping[str, NDArray[np.float32]]) -> None:
    """Fill each array with the rows that other ranks have; where this rank has none it is zero."""
    for values in rows.values():
        add_up(torch.from_numpy(values.view(np.int32)))  # integers: a sum with zero keeps every bit


class GradientSum:
    """Sums the gradients that a model's weights have, over ranks; the weights are then rank 0's."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._ddp: Any = None
        if is_distributed():
            self._ddp = DistributedDataParallel(_Zero(self._weights))

    def __call__(self) -> None:
        """To be called on all ranks, after the last micro-batch."""
        if self._ddp is None:
            return
        has_gradient = add_up(torch.tensor([weight.grad is not None for weight in self._weights]).int())
        self._ddp().backward()
        for weight, is_used in zip(self._weights, has_gradient.tolist(), strict=True):
            # DDP averages. A weight without a gradient on any rank has none: decay must not reach it.
            weight.grad = cast(Tensor, weight.grad) * world_size() if is_used else None


class _Zero(nn.Module):
    """0, as a sum over all weights: each gets a gradient of 0."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)

    def forward(self) -> Tensor:
        return torch.stack([weight.sum().float() for weight in self.weights]).sum() * 0.0
