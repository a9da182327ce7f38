"""The costs of a precision: time and memory of training passes, against fp32 on the same batch.

Both sides are compiled or neither is, so the ratios show the precision alone. The sides take turns, so other
load on the machine slows both.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from hpo.data.batches import collate
from hpo.device import DeviceInfo
from hpo.errors import OutOfMemory
from hpo.memory import peak_memory_bytes, release_free_memory, reset_peak_memory
from hpo.precision.amp import MixedPrecision, prepare_model
from hpo.precision.table import PRECISIONS
from hpo.training.budget import TrainState
from hpo.training.compilation import drop_compiled
from hpo.training.micro_batches import within_memory
from hpo.trial.measure import Side, Work, work_of
from hpo.trial.parts import TrialParts, training_args

_MEANINGFUL_BYTES = 2**20


@dataclass(frozen=True)
class Costs:
    """Costs of one forward and backward pass, against fp32."""

    seconds: float
    """Wall seconds of the fastest pass."""
    speed_ratio: float
    """Seconds of fp32 over those of the pass, the median over pairs. Above 1 is faster."""
    memory_ratio: float | None
    """Peak memory of a pass over that of fp32. None: too small to be measured."""
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
    compiles both sides, a copy of the model for `amp`. The model stays compiled. Raises an error of the
    allocator if both sides do not fit into memory together.
    """
    device, precision = amp.device, amp.precision
    is_reference = precision.name != "fp32"
    fp32 = Side(model, MixedPrecision(PRECISIONS["fp32"], amp.config, device), work, is_reference)
    side = replace(fp32, mixed_precision=amp, is_reference=False)
    if compile_model:
        side = replace(side, model=copy.deepcopy(model))
    sides = (fp32, side)
    if compile_model:
        with side.flags():
            prepare_model(side.model, precision)
        for each in sides:
            compile_model(each.model)

    def time(side: Side, run: Callable[[Callable[[], float]], Any] = lambda run: run()) -> Any:
        with side.flags() if compile_model else side.ready():
            return run(side.time)

    for each in sides:
        time(each)
    peak_bytes = [time(each, partial(_peak_bytes, device)) for each in sides]
    passes = []
    for repeat in range(repeats):  # in alternating order
        first, second = (time(each) for each in sides[:: -1 if repeat % 2 else 1])
        passes.append((second, first) if repeat % 2 else (first, second))
    ratios = [reference / own for reference, own in passes]
    memory = peak_bytes[1] / peak_bytes[0] if min(peak_bytes) > _MEANINGFUL_BYTES else None
    return Costs(min(own for _, own in passes), median(ratios), memory, min(ratios))


def costs_of_trial(parts: TrialParts, repeats: int) -> Costs | None:
    """Measure a micro-batch of a batch of median size, halved as in training if memory runs out.

    None: not one example fits on both sides together.
    """
    amp = MixedPrecision(parts.resolution.precision, parts.config.amp, parts.device)
    split = parts.data.train
    args = training_args(parts.study, parts.config, split.num_windows)
    batches = parts.data.batches(args.batch_size, args.seed, epoch=0)
    batches.sort(key=lambda windows: len(windows) * int(split.lengths_W[windows].max()))
    batch = collate(split, batches[len(batches) // 2], parts.loss_fn.tasks, parts.data.pad_id)
    state = TrainState(micro_batch_size=args.micro_batch_size)

    def attempt() -> Costs:
        work = work_of(parts, batch.split(state.micro_batch_size)[0])
        return measure_costs(parts.model, amp, work, repeats, parts.compile)

    try:
        return within_memory(attempt, state, batch)
    except OutOfMemory:
        return None
    finally:
        if parts.compile:
            drop_compiled(parts.device)


def _peak_bytes(device: DeviceInfo, run: Callable[[], object]) -> int:
    """Return the peak memory of `run`, without the memory held before."""
    release_free_memory(device)
    reset_peak_memory(device)
    held = peak_memory_bytes(device)
    run()
    return peak_memory_bytes(device) - held
