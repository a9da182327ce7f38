"""Several processes (*ranks*) for one model, by DistributedDataParallel under torchrun.

Rank 0 is the study's worker; the others follow it from trial to trial. Without other ranks, every function
here does nothing. Every rank collates the whole global batch and runs its own rows in micro-batches. Losses
are normalised over micro-batches and ranks alike. Gradients are summed, not averaged: all ranks clip by one
norm and skip the same steps.

If a rank ran out of memory in a reducing backward pass, the others would wait forever. So the bare model runs
micro-batches, all ranks agree on their memory (`memory_agreed`), and then a backward pass of 0 through
DistributedDataParallel sums the accumulated gradients (`GradientSum`).

Rank 0 decides for all (`decide`): its clock, stop requests, the pruner, the checkpoint for a resume. If
memory runs out on any rank, the trial ends as `oom`. Any other error ends its process, and torchrun ends the
others: the trial resumes at the next start.
"""

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
"""Longest wait for another rank in a step. One rank may have to compile a new shape."""
NO_HALVING = "Several ranks do not halve the micro-batch: lower `micro_batch_size`."
_T = TypeVar("_T")

_decisions: Any = None  # process group for waiting on rank 0, without a timeout


def is_distributed() -> bool:
    return _decisions is not None


def rank() -> int:
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    return dist.get_world_size() if is_distributed() else 1


@contextlib.contextmanager
def connected_ranks() -> Iterator[None]:
    """Connect the processes of one torchrun. The end of rank 0's block ends the tasks of the others."""
    global _decisions
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=TIMEOUT)
    _decisions = dist.new_group(backend="gloo", timeout=timedelta(days=365))
    is_lost = False
    try:
        yield
    except RunError:  # another rank may hang and never receive an announcement
        is_lost = True
        raise
    finally:
        if not is_lost:
            with contextlib.suppress(RuntimeError):  # the others may be gone
                announce(None)
        dist.destroy_process_group()
        _decisions = None


def decide(what: Callable[[], _T]) -> _T:
    """Return `what()` of rank 0. If it raises there, the other ranks raise Preempted."""
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
    """Send the next task from rank 0 to the other ranks, waiting in `next_task`."""
    if rank() == 0:
        decide(lambda: task)


def next_task() -> Any:
    """Return the next task of rank 0. None: there is no more."""
    return decide(lambda: None)


@contextlib.contextmanager
def memory_agreed(advice: str) -> Iterator[None]:
    """Raise OutOfMemory on all ranks if one of them runs out of memory in the block."""
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
    """Return this rank's rows of a global batch, possibly none."""
    first, end = (len(batch.windows_B) * each // world_size() for each in (rank(), rank() + 1))
    return batch.rows(slice(first, end))


def add_up(tensor: Tensor) -> Tensor:
    """Replace a tensor by its sum over ranks."""
    if is_distributed():
        dist.all_reduce(tensor)
    return tensor


def largest(number: float) -> float:
    """Return the largest number of all ranks."""
    numbers = torch.tensor(number, dtype=torch.float64)
    if is_distributed():
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return float(numbers)


def merge(rows: Mapping[str, NDArray[np.float32]]) -> None:
    """Fill each array with the rows of other ranks. They must be zero here."""
    for values in rows.values():
        add_up(torch.from_numpy(values.view(np.int32)))  # integers: a sum with zero keeps every bit


class GradientSum:
    """Sum of a model's gradients over ranks. Its creation copies rank 0's weights to all ranks."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._ddp: Any = None
        if is_distributed():
            self._ddp = DistributedDataParallel(_Zero(self._weights))

    def __call__(self) -> None:
        """Sum the gradients, on all ranks after the last micro-batch."""
        if self._ddp is None:
            return
        has_gradient = add_up(torch.tensor([weight.grad is not None for weight in self._weights]).int())
        self._ddp().backward()
        for weight, is_used in zip(self._weights, has_gradient.tolist(), strict=True):
            # DDP averages. A weight unused on all ranks must have no gradient, or it would decay.
            weight.grad = cast(Tensor, weight.grad) * world_size() if is_used else None


class _Zero(nn.Module):
    """A loss of 0 with a gradient of 0 for each weight."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)

    def forward(self) -> Tensor:
        return torch.stack([weight.sum().float() for weight in self.weights]).sum() * 0.0
