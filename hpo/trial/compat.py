"""Does this model work under this precision on this device? Measured on a small batch before a trial trains.

The trial's model and loss run forward and backward, in fp32 and under the precision from equal weights, as
in training but without dropout. Compared are finiteness, the relative error of each head's logits
||y - y32|| / ||y32||, the cosine between the gradients, time and peak memory. Where gradients overflow under
loss scaling, the scale backs off as in training, to its floor, before the verdict. Where fp32 does not fit
into memory, finiteness alone is measured.

    ok            as expected of the precision
    degraded      works, but further from fp32 than the study's bounds, or not everywhere in the precision
    incompatible  not finite, raises, or so far from fp32 that training would mean nothing

The measurements do not depend on the study's bounds, so they can be cached and judged anew.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from hpo.config.study_config import CompatConfig
from hpo.data.batches import Batch
from hpo.device import DeviceInfo, synchronize
from hpo.memory import PeakMemory, is_out_of_memory, release_free_memory
from hpo.models.attention import use_training_attention
from hpo.precision.amp import MixedPrecision, backend_flags, observe, prepare_model
from hpo.precision.table import PRECISIONS, AmpConfig, Precision
from hpo.training.compilation import compiled_modules
from hpo.training.losses import MultitaskLoss
from hpo.trial.nonfinite import entered_module, is_finite, watch_for_nonfinite

MEASUREMENT_VERSION = 2
"""To be raised when the measuring changes: what is cached of another version is measured again."""

_MEANINGFUL_BYTES = 2**20
_TIMED_SECONDS = 0.2
"""A timing of each side lasts about as long, over several passes where they are shorter."""


@dataclass(frozen=True)
class Measurement:
    """What one model did under one precision, against fp32. JSON-able by `asdict`."""

    precision: str
    error: str | None = None
    """What was raised, with the module it was raised in."""
    finite: bool = True
    nonfinite: str | None = None
    """What was not finite first: `logits`, `loss` or `gradients`."""
    first_nonfinite_module: str | None = None
    reference_finite: bool = True
    """Whether fp32 was finite; if not, the precision is not to blame."""
    reference_fits: bool = True
    """Whether fp32 fitted into memory; if not, nothing is known against it."""
    logits_relative_error: dict[str, float] = field(default_factory=dict)
    """{task: ||y - y32|| / ||y32||}."""
    loss_relative_error: float | None = None
    gradient_cosine: float | None = None
    usable_scale: float | None = None
    """fp16: the largest scale, backing off from `init_scale`, at which gradients are finite."""
    speed_ratio: float | None = None
    """fp32's seconds over this precision's, of the fastest timing each: above 1 is faster than fp32."""
    speed_ratio_low: float | None = None
    """The smallest of the ratios of one timing each, made in turn; with `speed_ratio_high` the noise."""
    speed_ratio_high: float | None = None
    memory_ratio: float | None = None
    """This precision's peak memory of one pass over fp32's; None where it is too small to be seen."""
    seconds: float | None = None
    disagreement: str = ""
    """Why the observed dtypes are not the precision; empty when they are."""
    observed: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Compatibility:
    """A measurement judged by a study's bounds."""

    verdict: str
    """ok, degraded, incompatible or skipped."""
    reasons: tuple[str, ...]
    measurement: Measurement
    cached: bool = False

    def telemetry(self) -> dict[str, Any]:
        record = {"verdict": self.verdict, "reasons": list(self.reasons), "cached": self.cached}
        return {"compatibility": record | asdict(self.measurement)}


@dataclass(frozen=True)
class _Side:
    """A model under one precision, with the check's batch (on the device) and loss."""

    model: nn.Module
    mixed_precision: MixedPrecision
    batch: Batch
    loss_fn: MultitaskLoss

    def flags(self) -> contextlib.AbstractContextManager[None]:
        return backend_flags(self.mixed_precision.precision, self.mixed_precision.config)


@dataclass
class _Pass:
    """One forward and backward: logits and unscaled gradients in fp32, on the CPU."""

    loss: Tensor
    logits: dict[str, Tensor]
    gradients: dict[str, Tensor]
    seconds: float

    def broken(self) -> str | None:
        """What is not finite first."""
        parts = {
            "logits": self.logits.values(),
            "loss": [self.loss],
            "gradients": self.gradients.values(),
        }
        return next((name for name, values in parts.items() if not all(map(is_finite, values))), None)


def measure(
    model: nn.Module,
    batch: Batch,
    loss_fn: MultitaskLoss,
    precision: Precision,
    config: AmpConfig,
    device: DeviceInfo,
    transform: Callable[[Any], object] | None = None,
    repeats: int = 0,
    on_estimate: Callable[[float], None] = lambda _: None,
) -> Measurement:
    """Run `model` (fp32 weights, on the device) on `batch` in fp32 and under `precision`.

    `transform` is what a trial does to the prepared model besides, such as compiling it in place; it gets a
    copy. Each side is timed `repeats` times, in turn, after a pass that warms up; with 0 that pass is timed.
    `on_estimate` is told the seconds that this will take. The model comes back as it was, without gradients.

    Raises what an allocator raises where the precision itself does not fit into memory.
    """
    batch = batch.to(device.torch_device)
    fp32 = _Side(model, MixedPrecision(PRECISIONS["fp32"], config, device), batch, loss_fn)
    side = replace(fp32, mixed_precision=MixedPrecision(precision, config, device))
    with _training_without_dropout(model), use_training_attention():
        reference, found = _reference(fp32, precision.name)
        if found is not None:
            return found
        side, candidate, found = _candidate(side, transform)
        if candidate is None or not found.finite:
            return found
        if reference is None:
            return replace(found, reference_fits=False, seconds=candidate.seconds)
        on_estimate((repeats + 1) * (reference.seconds + candidate.seconds))
        return replace(found, **_errors(candidate, reference), **_costs(side, fp32, repeats))


def _reference(fp32: _Side, name: str) -> tuple[_Pass | None, Measurement | None]:
    """The pass in fp32, and the measurement of `name` where fp32 is broken; neither where it does not fit."""
    with fp32.flags(), entered_module(fp32.model) as entered:
        try:
            result = _run(fp32)
        except Exception as error:
            if not is_out_of_memory(error):
                message = f"{_describe(error, entered)} (in fp32 already)"
                return None, Measurement(name, error=message, finite=False, reference_finite=False)
            result = None
    if result is None:  # after the error, which held the activations, is gone
        fp32.model.zero_grad(set_to_none=True)
        release_free_memory(fp32.mixed_precision.device)
        return None, None
    broken = result.broken()
    if not broken:
        return result, None
    culprit = _find_culprit(fp32, result)
    return result, Measurement(
        name, finite=False, reference_finite=False, nonfinite=broken, first_nonfinite_module=culprit
    )


def _candidate(
    side: _Side, transform: Callable[[Any], object] | None
) -> tuple[_Side, _Pass | None, Measurement]:
    """The model as a trial prepares it, its pass (None: it raised), and what is known without fp32."""
    precision, mixed_precision = side.mixed_precision.precision, side.mixed_precision
    with side.flags(), entered_module(side.model) as entered:
        try:
            if precision.float8 or precision.weights != "float32" or transform is not None:
                side = replace(side, model=prepare_model(copy.deepcopy(side.model), precision))
            with observe(side.model) as seen:
                result = _run_with_backoff(side)
            if transform is not None:  # what is judged is what a trial runs
                transform(side.model)
                result = _run_with_backoff(side)
        except Exception as error:
            # Whatever an operator or a compiler raises under this precision is the answer; memory is not.
            if is_out_of_memory(error):
                raise
            return side, None, Measurement(precision.name, error=_describe(error, entered), finite=False)
        broken = result.broken()
        scale = mixed_precision.scaler.get_scale() if precision.loss_scaling and not broken else None
        found = Measurement(
            precision.name,
            finite=not broken,
            nonfinite=broken,
            first_nonfinite_module=_find_culprit(side, result) if broken else None,
            usable_scale=scale,
            observed=seen.telemetry(compiled=bool(compiled_modules(side.model))),
            disagreement=seen.disagreement(precision),
        )
        return side, result, found


def _errors(candidate: _Pass, reference: _Pass) -> dict[str, Any]:
    """How far the precision's pass is from fp32's."""
    return {
        "logits_relative_error": {
            name: _relative_error(candidate.logits[name], reference.logits[name]) for name in reference.logits
        },
        "loss_relative_error": _relative_error(candidate.loss, reference.loss),
        "gradient_cosine": _cosine(candidate.gradients, reference.gradients),
    }


def _costs(side: _Side, fp32: _Side, repeats: int) -> dict[str, Any]:
    """Time and memory against fp32: one pass of each for memory, then `repeats` of each for time.

    They are timed in turn, so that other load on the machine slows both; of short passes the median of many
    counts. The first pass has no freed memory to reuse, so its time counts only with `repeats` of 0.
    """
    device = side.mixed_precision.device
    memory = PeakMemory(device)
    times, first, peak_bytes = [], [], []
    try:
        for each in (fp32, side):
            release_free_memory(device)
            memory.reset()
            held = memory.read()
            first.append(_seconds(each))
            peak_bytes.append(memory.read() - held)
        turns = math.ceil(min(_TIMED_SECONDS / max(first), 50))
        for _ in range(repeats):
            passes = [[_seconds(fp32), _seconds(side)] for _ in range(turns)]
            times.append([median(seconds) for seconds in zip(*passes, strict=True)])
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return {}  # fp32 fits alone, but not beside the copy of the model that the precision needs
    times = times or [first]
    ratios = [reference / own for reference, own in times]
    reference, own = (min(seconds) for seconds in zip(*times, strict=True))
    return {
        "speed_ratio": reference / own,
        "speed_ratio_low": min(ratios),
        "speed_ratio_high": max(ratios),
        "memory_ratio": peak_bytes[1] / peak_bytes[0] if min(peak_bytes) > _MEANINGFUL_BYTES else None,
        "seconds": own,
    }


def _seconds(side: _Side) -> float:
    """Wall time of one pass."""
    device = side.mixed_precision.device
    with side.flags():
        synchronize(device)
        started = time.perf_counter()
        _forward_backward(side)
        synchronize(device)
        seconds = time.perf_counter() - started
    side.model.zero_grad(set_to_none=True)
    return seconds


def judge(measurement: Measurement, bounds: CompatConfig, *, cached: bool = False) -> Compatibility:
    """The verdict on a measurement under a study's bounds, with every reason for it."""
    incompatible: list[str] = []
    degraded: list[str] = []
    name = measurement.precision
    if measurement.error:
        incompatible.append(f"{name} raised {measurement.error}")
    elif not measurement.finite:
        where = measurement.first_nonfinite_module
        also = "" if measurement.reference_finite else ", and so in fp32"
        incompatible.append(
            f"{measurement.nonfinite} not finite under {name}{also}"
            + (f"; the first module that made them so is {where}." if where else ".")
        )
    for task, error in measurement.logits_relative_error.items():
        too_far = error > bounds.incompatible_logits_relative_error
        bound = (
            bounds.incompatible_logits_relative_error if too_far else bounds.degraded_logits_relative_error
        )
        if error > bound:
            reason = f"logits of {task} are {error:.3g} away from fp32's (relative), more than {bound:g}."
            (incompatible if too_far else degraded).append(reason)
    cosine = measurement.gradient_cosine
    if cosine is not None and cosine < bounds.incompatible_gradient_cosine:
        incompatible.append(
            f"gradients point elsewhere than fp32's: cosine {cosine:.3f}, under "
            f"{bounds.incompatible_gradient_cosine:g}."
        )
    elif cosine is not None and cosine < bounds.degraded_gradient_cosine:
        degraded.append(
            f"gradients differ from fp32's: cosine {cosine:.3f}, under {bounds.degraded_gradient_cosine:g}."
        )
    if measurement.disagreement:
        degraded.append(measurement.disagreement)
    verdict = "incompatible" if incompatible else "degraded" if degraded else "ok"
    reasons = incompatible + degraded
    if not measurement.reference_fits:
        reasons.append(
            f"fp32 does not fit into memory here, so of {name} only that it is finite was checked."
        )
    return Compatibility(verdict, tuple(reasons), measurement, cached)


def _run(side: _Side) -> _Pass:
    """Forward and backward once."""
    logits: dict[str, Tensor] = {}

    def keep_logits(values: dict[str, Tensor]) -> None:
        logits.update({name: value.detach().float().cpu() for name, value in values.items()})

    started = time.perf_counter()
    loss = _forward_backward(side, keep_logits)
    synchronize(side.mixed_precision.device)
    seconds = time.perf_counter() - started
    scale = side.mixed_precision.scale_value().cpu()
    gradients = {
        name: parameter.grad.detach().float().cpu() / scale
        for name, parameter in side.model.named_parameters()
        if parameter.grad is not None
    }
    side.model.zero_grad(set_to_none=True)
    return _Pass(loss.detach().cpu(), logits, gradients, seconds)


def _forward_backward(side: _Side, on_logits: Callable[[dict[str, Tensor]], None] = lambda _: None) -> Tensor:
    """The pass of a training step; the gradients are left in the model."""
    items = side.loss_fn.count(side.batch)

    def forward(*args: Any) -> dict[str, Tensor]:
        logits: dict[str, Tensor] = side.model(*args)
        on_logits(logits)
        return logits

    side.model.zero_grad(set_to_none=True)
    with side.mixed_precision.autocast():
        loss = side.loss_fn(forward, side.batch, items, items)
    side.mixed_precision.scaler.scale(loss).backward()
    return loss


def _run_with_backoff(side: _Side) -> _Pass:
    """`_run`, with the loss scale backing off while gradients overflow, down to its floor."""
    mixed_precision = side.mixed_precision
    config = mixed_precision.config
    while True:
        result = _run(side)
        scale = mixed_precision.scaler.get_scale()
        overflowed = result.broken() == "gradients"
        if not overflowed or not mixed_precision.precision.loss_scaling or scale <= config.min_scale:
            return result
        mixed_precision.update_amp_config(init_scale=max(config.min_scale, scale * config.backoff_factor))


def _describe(error: Exception, entered: list[str]) -> str:
    where = f" in {entered[0]}" if entered else ""
    return f"{type(error).__name__}{where}: {error}"


def _find_culprit(side: _Side, result: _Pass) -> str | None:
    """Run again, watching every module: the first that turns finite values into others, in either pass.

    Where no module does (the loss itself may), it is the one whose parameters' gradients broke first: the
    backward pass runs from the heads to the embeddings, so the last in the order of the model.
    """
    with side.flags(), watch_for_nonfinite(side.model) as found, contextlib.suppress(RuntimeError):
        _run(side)  # hooks refuse some in-place operators
    if found:
        return found[0]
    broken = [name for name, value in result.gradients.items() if not is_finite(value)]
    return broken[-1].rpartition(".")[0] if broken else None


@contextlib.contextmanager
def _training_without_dropout(model: nn.Module) -> Iterator[None]:
    """As in training but for dropout: modules that compute activations again do so, the others evaluate."""
    was_training = model.training
    model.eval()
    kept = []
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            module.training = True
            # Some layers drop by a number of their own and not by a module.
            for name, value in vars(module).items():
                if "drop" in name and isinstance(value, float):
                    kept.append((module, name, value))
    for module, name, _ in kept:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)
        model.zero_grad(set_to_none=True)
        model.train(was_training)


def _relative_error(value: Tensor, reference: Tensor) -> float:
    norm = float(reference.double().norm())
    difference = float((value.double() - reference.double()).norm())
    return difference / norm if norm else difference


def _scaled(gradients: dict[str, Tensor], names: Set[str]) -> dict[str, Tensor]:
    """To a largest absolute value of 1, unless all are zero."""
    largest = max((float(gradients[name].abs().max()) for name in names), default=0.0) or 1.0
    return {name: gradients[name] / largest for name in names}


def _cosine(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> float | None:
    """Cosine between all gradients as one vector each; None when one of them is zero."""
    names = gradients.keys() & reference.keys()

    def product(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
        # Rows in fp32, their sum in fp64: all in fp64 takes fifteen times as long.
        pairs = ((torch.atleast_1d(one[name]), torch.atleast_1d(other[name])) for name in names)
        return sum(float(torch.linalg.vecdot(*pair).sum(dtype=torch.float64)) for pair in pairs)

    # A cosine knows no scale, and squares of very large or small values leave the range of fp32.
    gradients, reference = _scaled(gradients, names), _scaled(reference, names)
    norms = [product(side, side) ** 0.5 for side in (gradients, reference)]
    return product(gradients, reference) / (norms[0] * norms[1]) if all(norms) else None
