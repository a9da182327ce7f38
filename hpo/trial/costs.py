"""What a precision costs: time and memory of training passes, against fp32 on the same batch.

Both sides are compiled or neither is, so the ratios show the precision alone. The sides take turns, so other
load on the machine slows both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, TypeVar

from hpo.data.batches import collate
from hpo.device import DeviceInfo
from hpo.errors import OutOfMemory
from hpo.memory import peak_memory_bytes, release_free_memory, reset_peak_memory
from hpo.models.model_parts import set_float32_parts
from hpo.precision.amp import MixedPrecision, prepare_model
from hpo.precision.table import PRECISIONS
from hpo.training.budget import TrainState
from hpo.training.compilation import drop_compiled
from hpo.training.micro_batches import within_memory
from hpo.trial.measure import Side, Work, work_of
from hpo.trial.trial_parts import TrialParts, training_args

_MEANINGFUL_BYTES = 2**20
_T = TypeVar("_T")


@dataclass(frozen=True)
class Costs:
    """Costs of one forward and backward pass, against a reference: fp32, or no part in fp32."""

    seconds: float
    """Wall seconds of the fastest pass."""
    speed_ratio: float
    """Seconds of the reference over those of the pass, the median over pairs. Above 1 is faster."""
    memory_ratio: float | None
    """Peak memory of a pass over that of the reference. None: too small to be measured."""
    least_speed_ratio: float
    """The smallest ratio of a pair."""


def measure_costs(
    model: Any,
    amp: MixedPrecision,
    work: Work,
    repeats: int,
    compile_model: Callable[[Any], object] | None = None,
) -> Costs:
    """Run `work` in fp32 and in the precision of `amp`, in the mode that the model is in.

    Each side runs once to warm up, once for its memory and `repeats` times for its time. `compile_model`
    compiles both sides. The model keeps it.

    Raises what an allocator raises if both sides do not fit into memory together.
    """
    device, precision = amp.device, amp.precision
    is_reference = precision.name != "fp32"
    fp32 = Side(model, MixedPrecision(PRECISIONS["fp32"], amp.config, device), work, is_reference)
    side = replace(fp32, mixed_precision=amp, is_reference=False)
    if precision.changes_weights or compile_model:
        side = replace(side, model=copy.deepcopy(model))
    sides = (fp32, side)
    with side.flags():
        prepare_model(side.model, precision)
    for each in sides:
        if compile_model:
            compile_model(each.model)
    for each in sides:
        each.time()
    peak_bytes = _peak_bytes(device, fp32.time), _peak_bytes(device, side.time)
    passes = []
    for repeat in range(repeats):  # in alternating order
        first, second = (each.time() for each in sides[:: -1 if repeat % 2 else 1])
        passes.append((second, first) if repeat % 2 else (first, second))
    return _costs(passes, peak_bytes)


def costs_of_trial(parts: TrialParts, repeats: int) -> Costs | None:
    """The costs of a micro-batch as the trial trains it, halved as in training if memory runs out.

    None: not one example fits on both sides together.
    """
    amp = MixedPrecision(parts.resolution.precision, parts.config.amp, parts.device)
    try:
        return _on_micro_batch(
            parts, lambda work: measure_costs(parts.model, amp, work, repeats, parts.compile)
        )
    finally:
        if parts.compile:
            drop_compiled(parts.device)


def costs_of_parts(
    parts: TrialParts, sets: Sequence[Sequence[str]], repeats: int
) -> dict[Sequence[str], Costs] | None:
    """The costs of a micro-batch with each of the sets of parts in fp32, against none, uncompiled.

    Each pass of a set has one without parts beside it. None: not one example fits into memory.
    """
    amp = MixedPrecision(parts.resolution.precision, parts.config.amp, parts.device)

    def measure(work: Work) -> dict[Sequence[str], Costs]:
        side = Side(parts.model, amp, work)

        def run(names: Sequence[str]) -> float:
            set_float32_parts(parts.model, names)
            return side.time()

        peaks = {}
        for names in ((), *sets):
            run(names)  # to warm up
            peaks[names] = _peak_bytes(parts.device, partial(run, names))
        passes: dict[Sequence[str], list[tuple[float, float]]] = {names: [] for names in sets}
        for repeat in range(repeats):  # in alternating order
            for names in sets:
                first, second = (run(each) for each in ((names, ()) if repeat % 2 else ((), names)))
                passes[names].append((second, first) if repeat % 2 else (first, second))
        return {names: _costs(pairs, (peaks[()], peaks[names])) for names, pairs in passes.items()}

    return _on_micro_batch(parts, measure)


def _on_micro_batch(parts: TrialParts, measure: Callable[[Work], _T]) -> _T | None:
    """`measure` on a micro-batch of a batch of median size. None: not one example fits into memory."""
    split = parts.data.train
    args = training_args(parts.study, parts.config, split.num_windows)
    batches = parts.data.batches(args.batch_size, args.seed, epoch=0)
    batches.sort(key=lambda windows: len(windows) * int(split.lengths_W[windows].max()))
    batch = collate(split, batches[len(batches) // 2], parts.loss_fn.tasks, parts.data.pad_id)
    state = TrainState(micro_batch_size=args.micro_batch_size)

    def attempt() -> _T:
        return measure(work_of(parts, batch.split(state.micro_batch_size)[0]))

    try:
        return within_memory(attempt, state, batch)
    except OutOfMemory:
        return None


def _peak_bytes(device: DeviceInfo, run: Callable[[], object]) -> int:
    """The memory that `run` needs at most, beside what was held before."""
    release_free_memory(device)
    reset_peak_memory(device)
    held = peak_memory_bytes(device)
    run()
    return peak_memory_bytes(device) - held


def _costs(passes: Sequence[tuple[float, float]], peak_bytes: tuple[int, int]) -> Costs:
    """The costs of pairs of passes (seconds of the reference, own seconds)."""
    ratios = [reference / own for reference, own in passes]
    memory = peak_bytes[1] / peak_bytes[0] if min(peak_bytes) > _MEANINGFUL_BYTES else None
    return Costs(min(own for _, own in passes), median(ratios), memory, min(ratios))
