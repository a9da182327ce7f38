"""CUDA graphs of a micro-batch's forward and backward pass: recorded once for each shape, then replayed.

A step of an encoder launches thousands of kernels. The launches may take the CPU longer than the kernels take
the GPU. A replay is one launch of all kernels on the same addresses. So inputs are copied into fixed tensors,
gradients are added to fixed tensors, and numbers of labels are tensors. Dropout draws from the generator's
state at the replay, as in a normal pass.

A pass is recorded at the second batch of its shape. The first replay is compared with the pass. It also shows
the times of launches and kernels, and so the largest number of tokens worth a recording. If a pass cannot be
recorded (it waits for the GPU, or no memory is left), the trial continues without graphs, and `problem` has
the reason.
"""

import contextlib
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hpo.data.batches import Batch
from hpo.device import DeviceInfo, synchronize
from hpo.lost_device import raise_if_lost

MAX_GRAPHS = 48
"""Most recorded shapes."""
TOLERANCE = 0.02
"""Largest relative difference between a replay and its pass. Atomic additions differ from run to run."""
MIN_LAUNCH_RATIO = 1.1
"""Least ratio of the time of a pass's launches to the time of its replay for a recording."""

Passes = Callable[[Batch, Mapping[str, "int | Tensor"], "float | Tensor"], Tensor]
"""Run a micro-batch on the device forward and backward and return its loss, detached. The other arguments are
explained in `MultitaskLoss`."""


class _Recording(NamedTuple):
    graph: torch.cuda.CUDAGraph
    batch: Batch
    numbers: Tensor
    """Share of the rows, then the labelled items of each task with labels. [1 + T]"""
    loss: Tensor
    parameters: Sequence[nn.Parameter]
    """Parameters with a gradient."""


class StepGraphs:
    """Run `passes` of `model`, and record and replay them as CUDA graphs."""

    def __init__(self, model: nn.Module, passes: Passes, device: DeviceInfo) -> None:
        self._passes, self._device = passes, device
        self._trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._seen: Counter[Hashable] = Counter()
        self._recordings: dict[Hashable, _Recording] = {}
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._stream = _recording_stream(device.torch_device)
        self._pool: Any = None
        """Memory of the recordings."""
        self.problem = ""
        """Reason for no more recordings; empty: no problem."""
        self.num_recorded = 0
        self._has_tried = False
        self._most_tokens = math.inf
        """Padded tokens of the largest shape worth a recording."""

    def __call__(self, batch: Batch, num_items: Mapping[str, int], share: float) -> Tensor:
        """Add a micro-batch's gradients to the parameters' gradients; return its loss."""
        key = (*(None if one is None else one.shape for one in batch.inputs), *map(bool, num_items.values()))
        recording = self._recordings.get(key)
        if recording is None and self._is_due(key, batch.input_ids_BL.numel()):
            recording = self._record(batch, num_items)
            if recording and not self._recordings and not self._is_good(recording, batch, num_items, share):
                recording = None
                self._gradients.clear()
            if recording:
                self._recordings[key] = recording
                self.num_recorded += 1
        if recording is None:
            return self._passes(batch, num_items, share)
        return self._replay(recording, batch, num_items, share)

    def take_tried(self) -> bool:
        """Return whether a recording was tried since the last call."""
        tried, self._has_tried = self._has_tried, False
        return tried

    def release(self) -> bool:
        """Drop all graphs and their memory for good. False: there are none."""
        if not self._gradients:
            return False
        self._give_up("no memory was left for CUDA graphs.")
        return True

    def _give_up(self, problem: str) -> None:
        self.problem = problem
        self._recordings.clear()
        self._gradients.clear()

    def _is_due(self, key: Hashable, num_tokens: int) -> bool:
        """Return whether to record this shape. The first comparison needs parameters without gradients."""
        if self.problem or len(self._recordings) == MAX_GRAPHS or num_tokens > self._most_tokens:
            return False
        self._seen[key] += 1
        is_comparable = self._recordings or all(one.grad is None for one in self._trainable)
        return self._seen[key] > 1 and bool(is_comparable)

    def _replay(
        self, recording: _Recording, batch: Batch, num_items: Mapping[str, int], share: float
    ) -> Tensor:
        for fixed, values in zip(_tensors(recording.batch), _tensors(batch), strict=True):
            fixed.copy_(values, non_blocking=True)
        numbers = torch.tensor([share, *filter(None, num_items.values())], dtype=torch.float32)
        recording.numbers.copy_(numbers.pin_memory(), non_blocking=True)
        self._fix_gradients(recording.parameters)
        recording.graph.replay()
        return recording.loss

    def _fix_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace gradients by the fixed tensors with equal values; 0 for a missing gradient."""
        for parameter in parameters:
            if parameter not in self._gradients:
                self._gradients[parameter] = torch.empty_like(parameter)
        empty = [self._gradients[parameter] for parameter in parameters if parameter.grad is None]
        if empty:
            torch._foreach_zero_(empty)
        for parameter in parameters:
            fixed = self._gradients[parameter]
            if parameter.grad is not None and parameter.grad is not fixed:
                fixed.copy_(parameter.grad)
            parameter.grad = fixed

    def _record(self, batch: Batch, num_items: Mapping[str, int]) -> _Recording | None:
        """Record a pass without running it. None: it cannot be recorded, for the reason in `problem`."""
        self._has_tried = True
        before = [parameter.grad for parameter in self._trainable]
        try:
            with contextlib.suppress(torch.OutOfMemoryError):
                return self._try_to_record(batch, num_items)
            # A recording cannot reuse the freed memory of passes.
            torch.cuda.empty_cache()
            return self._try_to_record(batch, num_items)
        except RuntimeError as error:
            raise_if_lost(self._device, error)
            self._give_up(f"a step cannot be recorded: {str(error).splitlines()[0]}")
            return None
        finally:
            for parameter, gradient in zip(self._trainable, before, strict=True):
                parameter.grad = gradient

    def _try_to_record(self, batch: Batch, num_items: Mapping[str, int]) -> _Recording:
        names = [name for name, count in num_items.items() if count]
        self._fix_gradients(self._trainable)
        fixed = batch.map(torch.clone)
        numbers = torch.ones(1 + len(names), device=self._device.torch_device)
        share, *counts = numbers.unbind()
        items: dict[str, int | Tensor] = dict.fromkeys(num_items, 0)
        items.update(zip(names, counts, strict=True))
        with self._recorded() as (graph, reached):
            loss = self._passes(fixed, items, share)
        return _Recording(graph, fixed, numbers, loss, list(reached))

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[tuple[torch.cuda.CUDAGraph, dict[nn.Parameter, None]]]:
        """Record the kernels of the block; yield the graph and the parameters with a gradient."""
        graph, reached = torch.cuda.CUDAGraph(), dict[nn.Parameter, None]()
        mode = torch.cuda.get_sync_debug_mode()
        if not self._recordings:
            self._pool = torch.cuda.graph_pool_handle()  # PyTorch refuses the pool of dropped graphs
        self._stream.wait_stream(torch.cuda.current_stream())
        with contextlib.ExitStack() as undo:
            for parameter in self._trainable:
                hook = parameter.register_post_accumulate_grad_hook(lambda one: reached.setdefault(one))
                undo.callback(hook.remove)
            undo.enter_context(torch.cuda.stream(self._stream))
            undo.enter_context(_captured(graph, self._pool, self._device.index))
            # An operation that waits for the GPU raises before it spoils the recording.
            _set_sync_debug_mode("error")
            undo.callback(_set_sync_debug_mode, mode)
            yield graph, reached
        torch.cuda.current_stream().wait_stream(self._stream)

    def _is_good(
        self, recording: _Recording, batch: Batch, num_items: Mapping[str, int], share: float
    ) -> bool:
        """Return whether a replay equals the pass and takes less time than its launches.

        Infinite or NaN values decide nothing. Then a later pass is recorded.
        """
        state, results, seconds = torch.cuda.get_rng_state(), [], []
        for run in (self._passes, lambda *arguments: self._replay(recording, *arguments)):
            torch.cuda.set_rng_state(state)
            synchronize(self._device)
            started = time.perf_counter()
            loss = run(batch, num_items, share)
            launched = time.perf_counter() - started
            synchronize(self._device)
            seconds.append((launched, time.perf_counter() - started))
            results.append([loss.clone(), *(one.grad for one in self._trainable if one.grad is not None)])
            for parameter in self._trainable:
                parameter.grad = None
        torch.cuda.set_rng_state(state)
        # The time of launches is equal for all shapes. The time of kernels grows with the tokens.
        num_tokens, ratio = batch.input_ids_BL.numel(), seconds[0][0] / seconds[1][1]
        self._most_tokens = num_tokens * ratio / MIN_LAUNCH_RATIO
        return self._is_same(*results) and num_tokens <= self._most_tokens

    def _is_same(self, passed: Sequence[Tensor], replayed: Sequence[Tensor]) -> bool:
        """Return whether the loss and the gradients of a replay equal the pass."""
        if len(passed) != len(replayed):
            self._give_up("a replayed step gives other parameters a gradient.")
            return False
        differences = [one.float() - other.float() for one, other in zip(passed, replayed, strict=True)]
        sizes = torch.stack([_norm(values) for values in (passed[:1], passed[1:])]).tolist()
        errors = torch.stack([_norm(values) for values in (differences[:1], differences[1:])]).tolist()
        if all(error <= TOLERANCE * size for error, size in zip(errors, sizes, strict=True)):
            return True
        if all(map(math.isfinite, sizes)):
            parts = [f"{error:.2g} of {size:.2g}" for error, size in zip(errors, sizes, strict=True)]
            self._give_up(f"a replayed step differs from the step: {' and '.join(parts)} (loss, gradients).")
        return False


@contextlib.contextmanager
def _captured(graph: torch.cuda.CUDAGraph, pool: Any, device: int) -> Iterator[None]:
    """Capture the kernels of the block, on the current stream.

    Raises RuntimeError if PyTorch cannot begin or end the capture. The device's generator would then refuse
    dropout for good, so it gets a new state. Earlier graphs use the old one: do not replay them.
    """
    generator, is_whole = torch.cuda.default_generators[device], False
    before = generator.clone_state()
    try:
        # Other threads may use the GPU meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()
            is_whole = True
    except Exception as error:
        if is_whole:
            raise
        generator.graphsafe_set_state(before)
        # PyTorch 2.11 still sends allocations to the pool, and then frees no cached memory.
        with contextlib.suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(device, pool)
        raise RuntimeError(str(error)) from error  # out of memory too: the caller must drop its graphs


@cache
def _recording_stream(device: str | torch.device) -> torch.cuda.Stream:
    """Return the stream of all recordings. Its cuBLAS workspace must not be in a graph's memory."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        ones = torch.ones(16, 16, device=device)
        nn.functional.linear(ones, ones, ones[0])
    return stream


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls it a prototype
        torch.cuda.set_sync_debug_mode(mode)


def _norm(values: Sequence[Tensor]) -> Tensor:
    norms = torch.stack([value.float().norm() for value in values])
    return norms.norm()  # type: ignore[no-any-return]


def _tensors(batch: Batch) -> list[Tensor]:
    tensors = (batch.input_ids_BL, batch.attention_mask_BL, batch.type_ids_BL, *batch.targets.values())
    return [one for one in tensors if one is not None]
