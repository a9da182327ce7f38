"""Several processes that train one model together (*ranks*): what they share, and how one's end ends all.

torchrun starts a rank for each GPU, or several on a CPU. Rank 0 is the worker that the study sees; the others
follow it from trial to trial. The loop is written against `Ranks`, of which a process that trains alone has
nothing to do.

What is computed. Every rank collates the whole global batch and runs its own rows of it, in micro-batches.
So each knows the batch's labelled items, examples and tokens without asking, losses are normalised over
micro-batches and ranks alike, and the meter's rates are those of all ranks. After the last micro-batch the
gradients are summed, once a step; each rank then clips them by the same norm, takes the same step, and skips
the same steps under loss scaling, because an overflow on one rank is in the sum of all.

Why not DistributedDataParallel. It reduces inside the last backward pass, in buckets as they fill. A rank
that runs out of memory there leaves the others in a reduction that never ends, so halving the micro-batch
could not be agreed on. It also wants one forward through the wrapper for every backward: the fp32 fallback
goes past it, a rank without rows has no backward, and learnt loss weights are used outside of the forward. A
sum after the last micro-batch is `no_sync` by construction; what it gives up is reducing while the backward
pass still runs.

How all agree. Ranks tell each other how it goes at the end of every micro-batch (`together`), in one small
message of a fixed form, which comes before everything else that they send. A rank that fails, wherever it
is, sends that message at once; the others meet it in their next one, and raise the same error. Running out of
memory in a micro-batch is such an error: all halve it and repeat the step.

When a rank is gone. A thread of each rank tells the others every second, through torchrun's store, that it
lives. A rank that was killed or stopped (its connections break, or it is silent for `SILENT_SECONDS`), or
that keeps the others waiting in a step or an evaluation and has come nowhere for `HANG_SECONDS` (no message,
no evaluation batch), ends all processes at once, as if the worker had been killed: another worker goes on
with the trial from its last checkpoint. While rank 0 talks to the database or writes a checkpoint, the others
wait for as long as it lives.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from hpo.data.batches import Batch
from hpo.device import DeviceInfo
from hpo.errors import InputError, shorten
from hpo.training.rank_errors import RankReport, is_agreed, note_agreed

SILENT_SECONDS = 15.0
"""A rank of which nothing was heard for so long is gone; torchrun may take 30 s more to end it."""
HANG_SECONDS = 30.0
"""Longer than any rank keeps the others waiting in a step."""
COMPILE_SECONDS = 600.0
"""The same for a trial with `compile`: a shape that one rank sees first is compiled while the others wait."""
BUCKET_ELEMENTS = 2**24
"""Gradients that are summed at a time; in fp32 64 MiB."""

_ENDED = "ended"
_FOREVER = timedelta(days=365)
_T = TypeVar("_T")


class Ranks:
    """A process that trains alone: it has nothing to share and nobody to wait for."""

    rank = 0
    world_size = 1

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0: it alone talks to database and terminal, and writes checkpoints."""
        return self.rank == 0

    # Agreement

    def together(self, *, ends_trial: bool = False) -> AbstractContextManager[None]:
        """A block that all ranks run: what one of them raises in it, or before, all raise at its end.

        Running out of memory stays that, for all to try again, unless the block `ends_trial`.
        """
        del ends_trial
        return nullcontext()

    def watched(self) -> AbstractContextManager[None]:
        """A block in which a rank that keeps the others waiting for long is taken to hang."""
        return nullcontext()

    def announce(self, task: Any) -> None:
        """Give the followers the next task; they must have the executor for it at the end of the call."""

    def start_trial(self, device: DeviceInfo, fingerprint: str, *, compiles: bool) -> None:
        """Raise InputError unless all ranks have the same kind of device and the same data."""

    def count_progress(self) -> None:
        """Tell the others in the next sign of life that this rank works; messages tell so by themselves."""

    def gather(self, *numbers: float) -> list[tuple[float, ...]]:
        """Up to two numbers of each rank."""
        return [numbers]

    # State

    def broadcast(self, value: _T) -> _T:
        """A picklable value as rank 0 has it."""
        return value

    def copy_from_main(self, model: nn.Module) -> None:
        """Give the model the weights and buffers that it has on rank 0."""

    # Shares of the work

    def seed(self, seed: int) -> int:
        """A seed of this rank's own, so that no two ranks draw the same dropout masks; rank 0 has `seed`."""
        return seed

    def share(self, num_rows: int) -> int:
        """The most rows of so many that a rank has."""
        return num_rows

    def micro_batches(self, batch: Batch, size: int) -> list[Batch]:
        """This rank's rows in batches of at most `size`; on all ranks as many, some perhaps empty."""
        return batch.split(size)

    def own(self, batches: Sequence[_T]) -> list[_T]:
        """Those of a split's batches that this rank evaluates."""
        return list(batches)

    # Sums of what was computed

    def sum_gradients(self, model: nn.Module, *losses: Tensor) -> None:
        """Replace gradients and losses by their sums over ranks; to be called right after `together`."""

    def merge(self, rows: dict[str, NDArray[np.float32]]) -> None:
        """Fill each array with the rows that other ranks have; where this rank has none it is zero."""


ONE_RANK = Ranks()


class ConnectedRanks(Ranks):
    """This process and the others that torchrun started with it, connected by gloo, on GPUs by nccl too."""

    def __init__(self, rank: int, world_size: int, store: TCPStore) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._device_group: dist.ProcessGroup | None = None
        """None: gloo's, which is the default group."""
        self._flat = torch.empty(0)
        """The buffer in which gradients are summed."""
        self._progress = 0
        self._num_entered = 0  # messages that this rank has waited for or waits for; alike on all ranks
        self._waiting_since: float | None = None
        self._hang_seconds = HANG_SECONDS
        self._is_watched = False
        self._leaving = threading.Event()
        self._store.set(str(rank), self._sign_of_life(0))
        dist.barrier()
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def leave(self) -> None:
        """Let the followers go (rank 0), and break the connection."""
        if self.is_main:
            self.broadcast(None)
        self._leaving.set()
        dist.destroy_process_group()

    @contextlib.contextmanager
    def together(self, *, ends_trial: bool = False) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not is_agreed(error):
                note_agreed(error)
                self._exchange(report=RankReport.of(error, ends_trial=ends_trial))
            raise
        self._exchange()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        was_watched, self._is_watched = self._is_watched, True
        try:
            yield
        finally:
            self._is_watched = was_watched

    def count_progress(self) -> None:
        self._progress += 1

    def announce(self, task: Any) -> None:
        if self.is_main:
            self.broadcast(task)
            self._exchange()

    def next_task(self) -> Any:
        """What rank 0 announces next; None: it has left."""
        return self.broadcast(None)

    def start_trial(self, device: DeviceInfo, fingerprint: str, *, compiles: bool) -> None:
        self._hang_seconds = COMPILE_SECONDS if compiles else HANG_SECONDS
        kind = (device.type, device.compute_capability, sorted(device.cpu_features))
        mine = {"kind of device": kind, "PyTorch": device.torch_version, "data": fingerprint}
        self._exchange()
        everyone: list[Any] = [None] * self.world_size
        self._wait_for(dist.all_gather_object, everyone, mine)
        for rank, theirs in enumerate(everyone):
            for name, value in everyone[0].items():
                if theirs[name] != value:
                    raise InputError(
                        f"all ranks must have the same {name}, but rank 0 has {value} and rank {rank} has "
                        f"{theirs[name]}."
                    )
        if device.type == "cuda" and self._device_group is None:
            with self.watched():
                self._wait_for(self._connect_devices, torch.device(device.torch_device))

    def _connect_devices(self, device: torch.device) -> None:
        self._device_group = dist.new_group(backend="nccl", device_id=device)

    def _exchange(self, *numbers: float, report: RankReport | None = None) -> list[list[float]]:
        """Tell the others whether this rank failed, and up to two numbers; return everyone's numbers.

        Raises what another rank reports, unless this rank's own report counts: that of the lowest rank, or of
        the lowest that did not only run out of memory.
        """
        mine = torch.zeros(3, dtype=torch.float64)
        mine[: 1 + len(numbers)] = torch.tensor([report is not None, *numbers], dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        self._wait_for(dist.all_gather, rows, mine)
        if any(row[0] for row in rows):
            reports: list[RankReport | None] = [None] * self.world_size
            self._wait_for(dist.all_gather_object, reports, report)
            found = [(rank, each) for rank, each in enumerate(reports) if each is not None]
            rank, first = min(found, key=lambda pair: (pair[1].kind == "memory", pair[0]))
            if rank != self.rank:
                raise note_agreed(first.error(rank))
        return [row[1:].tolist() for row in rows]

    def gather(self, *numbers: float) -> list[tuple[float, ...]]:
        return [tuple(row[: len(numbers)]) for row in self._exchange(*numbers)]

    def broadcast(self, value: _T) -> _T:
        self._exchange()
        values = [value]
        self._wait_for(dist.broadcast_object_list, values, 0)
        return values[0]

    def copy_from_main(self, model: nn.Module) -> None:
        self._exchange()
        for tensor in model.state_dict().values():
            contiguous = tensor.contiguous()
            self._wait_for(dist.broadcast, contiguous, 0, self._device_group)
            if contiguous is not tensor:
                tensor.copy_(contiguous)

    def seed(self, seed: int) -> int:
        words = np.random.SeedSequence([seed, self.rank]).generate_state(1, np.uint64)
        return int(words[0]) if self.rank else seed

    def share(self, num_rows: int) -> int:
        return -(-num_rows // self.world_size)

    def micro_batches(self, batch: Batch, size: int) -> list[Batch]:
        num_rows = len(batch.windows_B)
        first, end = (num_rows * rank // self.world_size for rank in (self.rank, self.rank + 1))
        starts = range(first, first + self.share(num_rows), size)
        return [batch.rows(slice(start, min(start + size, end))) for start in starts]

    def own(self, batches: Sequence[_T]) -> list[_T]:
        return list(batches[self.rank :: self.world_size])

    def sum_gradients(self, model: nn.Module, *losses: Tensor) -> None:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # A rank without rows has no gradients, but the others may; where no rank has one there is none.
        exists_P = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
        self._wait_for(dist.all_reduce, exists_P, dist.ReduceOp.MAX)
        # All memory is taken where a rank that has none can tell the others.
        with self.together():
            tensors = [*losses, *self._gradients(parameters, exists_P.tolist())]
            self._take_buffer(tensors)
        for pieces in _in_buckets(tensors, len(self._flat)):
            sizes = [len(piece) for piece in pieces]
            flat = self._flat[: sum(sizes)]
            is_in_place = len(pieces) == 1 and pieces[0].dtype == flat.dtype
            if is_in_place:
                flat = pieces[0]
            else:
                torch._foreach_copy_(list(flat.split(sizes)), pieces)
            self._wait_for(dist.all_reduce, flat, dist.ReduceOp.SUM, self._device_group)
            if not is_in_place:
                torch._foreach_copy_(pieces, list(flat.split(sizes)))

    @staticmethod
    def _gradients(parameters: Sequence[nn.Parameter], exists: Sequence[int]) -> list[Tensor]:
        """The gradients that some rank has, contiguous; zero where this one has none."""
        gradients = []
        for parameter in itertools.compress(parameters, exists):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            parameter.grad = parameter.grad.contiguous()
            gradients.append(parameter.grad)
        return gradients

    def _take_buffer(self, tensors: Sequence[Tensor]) -> None:
        """Have room in fp32 for the tensors, or for some of them at a time; kept from step to step."""
        size = min(BUCKET_ELEMENTS, sum(tensor.numel() for tensor in tensors))
        if len(self._flat) != size or self._flat.device != tensors[0].device:
            self._flat = torch.empty(0)  # freed before there is another one
            self._flat = torch.empty(size, device=tensors[0].device)

    def merge(self, rows: dict[str, NDArray[np.float32]]) -> None:
        self._exchange()
        for values in rows.values():
            # As integers, whose sum with zero keeps every bit.
            self._wait_for(dist.all_reduce, torch.from_numpy(values.view(np.int32)))

    # Signs of life

    def _wait_for(self, communicate: Callable[..., Any], *arguments: Any) -> None:
        """Send and receive; a broken connection ends the process."""
        self._num_entered += 1
        self._waiting_since = time.monotonic()
        try:
            communicate(*arguments)
        except RuntimeError as error:
            self._end(f"the connection to another rank broke: {shorten(str(error), 120)}")
        finally:
            self._waiting_since = None

    def _sign_of_life(self, number: int) -> str:
        patience = self._hang_seconds if self._is_watched else 0.0
        return f"{number} {self._num_entered} {self._progress} {patience}"

    def _watch(self) -> None:
        """Tell the others that this rank lives, and end the process when another one does not."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        heard = store_heard = time.monotonic()
        watched = {rank: _Other(heard) for rank in others}
        number = 0
        while not self._leaving.wait(1.0):
            number += 1
            try:
                self._store.set(str(self.rank), self._sign_of_life(number))
                signs = self._store.multi_get([str(rank) for rank in others])
                store_heard = time.monotonic()
            except RuntimeError:
                if time.monotonic() - store_heard > SILENT_SECONDS and not self._leaving.is_set():
                    self._end("torchrun is gone")
                continue
            for rank, sign in zip(others, signs, strict=True):
                entered, since = self._num_entered, self._waiting_since
                if problem := watched[rank].problem(sign.decode(), entered, since):
                    self._end(f"rank {rank} {problem}")

    def _end(self, why: str) -> NoReturn:
        """End this process at once, whatever it waits for, and tell the others so."""
        sys.stderr.write(f"Error: rank {self.rank} ends, as {why}.\n")
        sys.stderr.flush()
        with contextlib.suppress(RuntimeError):
            self._store.set(str(self.rank), _ENDED)
        os._exit(1)


class _Other:
    """What is known of another rank by the signs of life that it gives."""

    def __init__(self, now: float) -> None:
        self._sign = ""
        self._heard = now
        self._num_entered = self._progress = 0
        self._moved = now

    def problem(self, sign: str, num_entered: int, waiting_since: float | None) -> str:
        """Why the rank is lost; empty: it is not.

        The arguments are of the rank that asks: how many messages it has waited for, and since when it does.
        """
        now = time.monotonic()
        if sign == _ENDED:
            return "has ended"
        if sign != self._sign:
            self._sign, self._heard = sign, now
        _, entered, progress, patience = sign.split()
        if (int(entered), int(progress)) != (self._num_entered, self._progress):
            self._num_entered, self._progress, self._moved = int(entered), int(progress), now
        if now - self._heard > SILENT_SECONDS:
            return f"has been silent for {now - self._heard:.0f} s"
        if waiting_since is not None and self._num_entered < num_entered and float(patience):
            waited = now - max(waiting_since, self._moved)
            if waited > float(patience):
                return f"has kept the others waiting for {waited:.0f} s"
        return ""


def _in_buckets(tensors: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Contiguous tensors, flat, in lists of at most `size` elements; larger ones in pieces."""
    bucket: list[Tensor] = []
    free = size
    for piece in (piece for tensor in tensors for piece in tensor.view(-1).split(size)):
        if len(piece) > free:
            yield bucket
            bucket, free = [], size
        bucket.append(piece)
        free -= len(piece)
    if bucket:
        yield bucket


@contextlib.contextmanager
def connected_ranks() -> Iterator[ConnectedRanks]:
    """Connect the processes that one torchrun started; at the end of rank 0's block the others' tasks end."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    patience = timedelta(seconds=SILENT_SECONDS)
    gloo = PrefixStore("gloo", TCPStore(address, port, is_master=False))
    # The connections have no time limit: ranks wait for each other for as long as they live.
    dist.init_process_group("gloo", store=gloo, rank=rank, world_size=world_size, timeout=_FOREVER)
    ranks = ConnectedRanks(rank, world_size, TCPStore(address, port, is_master=False, timeout=patience))
    try:
        yield ranks
    except Exception:
        ranks.leave()
        raise
    ranks.leave()
