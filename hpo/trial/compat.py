"""Does this model work under this precision, here? Asked of a dummy batch before a trial trains.

The trial's own encoder, heads and loss run forward and backward twice from the same weights, dropout off:
in fp32 and under the precision. Compared are finiteness, the relative error of each head's logits
||y - y32|| / ||y32||, the cosine between the gradients, time and peak memory. A gradient that overflows
under loss scaling is given what training would give it: the scale backs off to its floor before the
verdict.

    ok            as expected of the precision
    degraded      works, but further from fp32 than the study's bounds, or not everywhere in the precision
    incompatible  not finite, raises, or so far from fp32 that training would mean nothing

The measurements do not depend on the study's bounds, so they can be cached and judged anew.
"""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from collections.abc import Callable, Iterator, Set
from dataclasses import asdict, dataclass, field, replace
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

_MEANINGFUL_BYTES = 2**20


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
    logits_relative_error: dict[str, float] = field(default_factory=dict)
    """{task: ||y - y32|| / ||y32||}."""
    loss_relative_error: float | None = None
    gradient_cosine: float | None = None
    usable_scale: float | None = None
    """fp16: the largest scale, backing off from `init_scale`, at which gradients are finite."""
    speed_ratio: float | None = None
    """fp32's seconds over this precision's: above 1 is faster than fp32."""
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
        return {
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "cached": self.cached,
        } | asdict(self.measurement)


@dataclass
class _Pass:
    """One forward and backward."""

    logits: dict[str, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None
    gradients: dict[str, Tensor] = field(default_factory=dict)


def measure(
    model: nn.Module,
    batch: Batch,
    objective: MultitaskLoss,
    precision: Precision,
    config: AmpConfig,
    device: DeviceInfo,
    transform: Callable[[nn.Module], None] | None = None,
    repeats: int = 1,
) -> Measurement:
    """Run `model` (fp32 weights, on the device) on `batch` in fp32 and under `precision`.

    `transform` is what a trial does to the prepared model besides, such as compiling it in place; it gets a
    copy. `repeats` more passes are timed, the fastest counts. The model comes back as it was, without
    gradients.
    """
    was_training = model.training
    model.eval()
    batch = batch.to(device.torch_device)
    try:
        with use_training_attention():
            return _measure(model, batch, objective, precision, config, device, transform, repeats)
    finally:
        model.zero_grad(set_to_none=True)
        model.train(was_training)


def _measure(
    model: nn.Module,
    batch: Batch,
    objective: MultitaskLoss,
    precision: Precision,
    config: AmpConfig,
    device: DeviceInfo,
    transform: Callable[[nn.Module], None] | None,
    repeats: int,
) -> Measurement:
    fp32 = PRECISIONS["fp32"]
    with backend_flags(fp32, config):
        mixed32 = MixedPrecision(fp32, config, device)
        try:
            with _entered_module(model) as entered:
                reference = _run(model, batch, objective, mixed32)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return Measurement(
                precision.name,
                error=f"{_describe(error, entered)} (in fp32 already)",
                finite=False,
                reference_finite=False,
            )
        broken = _not_finite(reference)
        if broken:
            return Measurement(
                precision.name,
                finite=False,
                reference_finite=False,
                nonfinite=broken,
                first_nonfinite_module=_find_culprit(model, batch, objective, mixed32, reference),
            )
    with backend_flags(precision, config):
        mixed_precision = MixedPrecision(precision, config, device)
        prepared = model
        with _entered_module(model) as entered:
            try:
                if precision.float8 or precision.weights != "float32" or transform is not None:
                    prepared = prepare_model(copy.deepcopy(model), precision)
                with observe(prepared) as seen:
                    result = _run_with_backoff(prepared, batch, objective, mixed_precision)
                if transform is not None:  # what is judged is what a trial runs
                    transform(prepared)
                    result = _run_with_backoff(prepared, batch, objective, mixed_precision)
            except Exception as error:
                # Whatever an operator or a compiler raises under this precision is the answer; memory is not.
                if is_out_of_memory(error):
                    raise
                return Measurement(precision.name, error=_describe(error, entered), finite=False)
        broken = _not_finite(result)
        measurement = Measurement(
            precision.name,
            finite=not broken,
            nonfinite=broken,
            usable_scale=mixed_precision.scaler.get_scale()
            if precision.loss_scaling and not broken
            else None,
            observed=seen.telemetry(compiled=bool(compiled_modules(prepared))),
            disagreement=seen.disagreement(precision),
        )
        if broken:
            culprit = _find_culprit(prepared, batch, objective, mixed_precision, result)
            return replace(measurement, first_nonfinite_module=culprit)
        seconds, peak_bytes = _timed(prepared, batch, objective, mixed_precision, repeats)
        prepared.zero_grad(set_to_none=True)
    with backend_flags(fp32, config):
        seconds32, peak_bytes32 = _timed(model, batch, objective, mixed32, repeats)
    big_enough = min(peak_bytes, peak_bytes32) > _MEANINGFUL_BYTES
    assert reference.loss is not None
    assert result.loss is not None
    return replace(
        measurement,
        logits_relative_error={
            name: _relative_error(result.logits[name], reference.logits[name]) for name in reference.logits
        },
        loss_relative_error=_relative_error(result.loss, reference.loss),
        gradient_cosine=_cosine(result.gradients, reference.gradients),
        speed_ratio=seconds32 / seconds,
        memory_ratio=peak_bytes / peak_bytes32 if big_enough else None,
        seconds=seconds,
    )


def judge(measurement: Measurement, bounds: CompatConfig, *, cached: bool = False) -> Compatibility:
    """The verdict on a measurement under a study's bounds, with every reason for it."""
    incompatible, degraded = [], []
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
        if error > bounds.incompatible_logits_relative_error:
            incompatible.append(
                f"logits of {task} are {error:.3g} away from fp32's (relative), more than "
                f"{bounds.incompatible_logits_relative_error:g}."
            )
        elif error > bounds.degraded_logits_relative_error:
            degraded.append(
                f"logits of {task} are {error:.3g} away from fp32's (relative), more than "
                f"{bounds.degraded_logits_relative_error:g}."
            )
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
    return Compatibility(verdict, (*incompatible, *degraded), measurement, cached)


def _run(model: nn.Module, batch: Batch, objective: MultitaskLoss, mixed_precision: MixedPrecision) -> _Pass:
    """Forward and backward once; logits and unscaled gradients in fp32, on the CPU."""
    result = _Pass()

    def keep_logits(logits: dict[str, Tensor]) -> None:
        result.logits = {name: value.detach().float().cpu() for name, value in logits.items()}

    loss = _forward_backward(model, batch, objective, mixed_precision, keep_logits)
    result.loss = loss.detach().cpu()
    scale = mixed_precision.scale_value().cpu()
    result.gradients = {
        name: parameter.grad.detach().float().cpu() / scale
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return result


def _forward_backward(
    model: nn.Module,
    batch: Batch,
    objective: MultitaskLoss,
    mixed_precision: MixedPrecision,
    on_logits: Callable[[dict[str, Tensor]], None] = lambda _: None,
) -> Tensor:
    """The pass of a training step; the gradients are left in the model."""
    items = objective.count(batch)

    def forward(*args: Any) -> dict[str, Tensor]:
        logits: dict[str, Tensor] = model(*args)
        on_logits(logits)
        return logits

    model.zero_grad(set_to_none=True)
    with mixed_precision.autocast():
        loss = objective(forward, batch, items, items)
    mixed_precision.scaler.scale(loss).backward()
    return loss


def _run_with_backoff(
    model: nn.Module, batch: Batch, objective: MultitaskLoss, mixed_precision: MixedPrecision
) -> _Pass:
    """`_run`, with the loss scale backing off while gradients overflow, down to its floor."""
    config = mixed_precision.config
    while True:
        result = _run(model, batch, objective, mixed_precision)
        scale = mixed_precision.scaler.get_scale()
        overflowed = _not_finite(result) == "gradients"
        if not overflowed or not mixed_precision.precision.loss_scaling or scale <= config.min_scale:
            return result
        mixed_precision.update_amp_config(init_scale=max(config.min_scale, scale * config.backoff_factor))


def _timed(
    model: nn.Module, batch: Batch, objective: MultitaskLoss, mixed_precision: MixedPrecision, repeats: int
) -> tuple[float, int]:
    """Seconds of the fastest of `repeats` passes, and the bytes that it takes on top of what is held."""
    device = mixed_precision.device
    memory = PeakMemory(device)
    passes = []
    for _ in range(repeats):
        model.zero_grad(set_to_none=True)
        release_free_memory(device)
        memory.reset()
        held = memory.read()
        synchronize(device)
        started = time.perf_counter()
        _forward_backward(model, batch, objective, mixed_precision)
        synchronize(device)
        passes.append((time.perf_counter() - started, memory.read() - held))
    return min(passes)


def _describe(error: Exception, entered: list[str]) -> str:
    where = f" in {entered[0]}" if entered else ""
    return f"{type(error).__name__}{where}: {error}"


def _not_finite(result: _Pass) -> str | None:
    assert result.loss is not None
    if not all(_is_finite(value) for value in result.logits.values()):
        return "logits"
    if not _is_finite(result.loss):
        return "loss"
    if not all(_is_finite(value) for value in result.gradients.values()):
        return "gradients"
    return None


def _is_finite(values: Tensor) -> bool:
    """Whether all values are; by their extremes, which NaN becomes one of: several times faster than each."""
    return not values.numel() or bool(torch.stack(torch.aminmax(values.detach())).isfinite().all())


def _find_culprit(
    model: nn.Module, batch: Batch, objective: MultitaskLoss, mixed_precision: MixedPrecision, result: _Pass
) -> str | None:
    """Run again, watching every module: the first that turns finite values into others, in either pass.

    Where no module does (the loss itself may), it is the one whose parameters' gradients broke first: the
    backward pass runs from the heads to the embeddings, so the last in the order of the model.
    """
    with _watch(model) as found, contextlib.suppress(RuntimeError):  # hooks refuse some in-place operators
        _run(model, batch, objective, mixed_precision)
    if found:
        return found[0]
    broken = [name for name, value in result.gradients.items() if not _is_finite(value)]
    return broken[-1].rpartition(".")[0] if broken else None


@contextlib.contextmanager
def _entered_module(model: nn.Module) -> Iterator[list[str]]:
    """A list that holds the name of the module whose forward began last."""
    entered: list[str] = []
    handles = [
        module.register_forward_pre_hook(lambda *_, name=name: entered.__setitem__(slice(None), [name]))
        for name, module in model.named_modules()
        if name
    ]
    try:
        yield entered
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _watch(model: nn.Module) -> Iterator[list[str]]:
    """A list of the modules, in order, that turned finite values into others in the block."""
    found: list[str] = []
    handles = []

    def hook_for(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, before: Any, after: Any) -> None:
            if _all_finite(before) and not _all_finite(after):
                found.append(name)

        return hook

    for name, module in model.named_modules():
        if name:
            forward_hook = hook_for(name)
            handles.append(module.register_forward_hook(forward_hook))
            handles.append(
                module.register_full_backward_hook(
                    lambda module, grad_input, grad_output, hook=forward_hook: hook(
                        module, grad_output, grad_input
                    )
                )
            )
    try:
        with warnings.catch_warnings():
            # Said of modules whose inputs need no gradient, such as embeddings, and of those that return
            # no tensor: the modules inside them are watched.
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            warnings.filterwarnings("ignore", message="For backward hooks to be called")
            yield found
    finally:
        for handle in handles:
            handle.remove()


def _all_finite(values: Any) -> bool:
    if isinstance(values, Tensor):
        return not values.is_floating_point() or _is_finite(values)
    if isinstance(values, dict):
        return all(_all_finite(value) for value in values.values())
    if isinstance(values, tuple | list):
        return all(_all_finite(value) for value in values)
    return True


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
