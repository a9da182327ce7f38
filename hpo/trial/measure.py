"""What a model does under a precision, measured against fp32 on one small batch.

The trial's model and loss run forward and backward, in fp32 and under the precision from equal weights, as
in training but without dropout. Compared are finiteness, the relative error of each head's logits
||y - y32|| / ||y32||, the cosine between the gradients, time and peak memory. Where gradients overflow under
loss scaling, the scale backs off as in training, to its floor. Where fp32 does not fit into memory,
finiteness alone is measured.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from hpo.data.batches import Batch
from hpo.device import DeviceInfo, synchronize
from hpo.memory import is_out_of_memory, peak_memory_bytes, release_free_memory, reset_peak_memory
from hpo.models.attention import use_training_attention
from hpo.precision.amp import MixedPrecision, backend_flags, prepare_model
from hpo.precision.compiled import observe_compiled
from hpo.precision.effective import Observation, observe_model
from hpo.precision.parts import float32_modules
from hpo.precision.table import PRECISIONS
from hpo.training.compilation import compiled_modules
from hpo.training.losses import MultitaskLoss
from hpo.trial.adverse import with_extreme_class_weights
from hpo.trial.nonfinite import entered_module, is_finite, watch_for_nonfinite
from hpo.trial.trial_parts import TrialParts

MEASUREMENT_VERSION = 4
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
    """What was not finite first: `logits`, `loss` or `gradients`, and with what."""
    first_nonfinite_module: str | None = None
    reference_finite: bool = True
    """Whether fp32 was finite; if not, the precision is not to blame."""
    reference_fits: bool = True
    """Whether fp32 fitted into memory; if not, nothing is known against it."""
    longest_alone: bool = False
    """Whether the longest text was measured alone, since with others it does not fit into memory."""
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
    unmeasured: str = ""
    """Which modules' products could not be measured; empty when all were."""
    observed: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Pass:
    """One forward and backward: logits and unscaled gradients in fp32, on the CPU."""

    loss: Tensor
    logits: dict[str, Tensor]
    gradients: dict[str, Tensor]
    seconds: float

    def broken(self) -> str | None:
        """What is not finite first."""
        parts = {"logits": self.logits.values(), "loss": [self.loss], "gradients": self.gradients.values()}
        return next((name for name, values in parts.items() if not all(map(is_finite, values))), None)


@dataclass(frozen=True)
class _Side:
    """A model under one precision, with the batch (on the device) and the loss that both sides have."""

    model: nn.Module
    mixed_precision: MixedPrecision
    batch: Batch
    loss_fn: MultitaskLoss

    def flags(self) -> contextlib.AbstractContextManager[None]:
        return backend_flags(self.mixed_precision.precision, self.mixed_precision.config)

    def run(self) -> _Pass:
        """Forward and backward once."""
        seconds, loss, logits = self._step()
        scale = self.mixed_precision.scale_value().cpu()
        gradients = {
            name: parameter.grad.detach().float().cpu() / scale
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }
        self.model.zero_grad(set_to_none=True)
        logits = {name: value.detach().float().cpu() for name, value in logits.items()}
        return _Pass(loss.detach().cpu(), logits, gradients, seconds)

    def run_with_backoff(self) -> _Pass:
        """`run`, with the loss scale backing off while gradients overflow, down to its floor."""
        amp = self.mixed_precision
        while True:
            result = self.run()
            scale = amp.scaler.get_scale()
            overflowed = amp.precision.loss_scaling and result.broken() == "gradients"
            if not overflowed or scale <= amp.config.min_scale:
                return result
            amp.update_amp_config(init_scale=max(amp.config.min_scale, scale * amp.config.backoff_factor))

    def inputs(self, rows: slice) -> tuple[Any, ...]:
        """What the model is called with for some rows of the batch."""
        batch = self.batch.rows(rows)
        return batch.input_ids_BL, batch.attention_mask_BL, batch.type_ids_BL

    def outputs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Loss and gradients of a pass, and its logits."""
        result = self.run()
        return [result.loss, *result.gradients.values()], list(result.logits.values())

    def time(self) -> float:
        """Wall seconds of one pass."""
        seconds = self._step()[0]
        self.model.zero_grad(set_to_none=True)
        return seconds

    def _step(self) -> tuple[float, Tensor, dict[str, Tensor]]:
        """The seconds, loss and logits of a pass as in training; the gradients are left in the model."""
        device, items = self.mixed_precision.device, self.loss_fn.count(self.batch)
        logits: dict[str, Tensor] = {}

        def forward(*args: Any) -> dict[str, Tensor]:
            logits.update(self.model(*args))
            return logits

        self.model.zero_grad(set_to_none=True)
        synchronize(device)
        started = time.perf_counter()
        with self.flags():
            with self.mixed_precision.autocast():
                loss = self.loss_fn(forward, self.batch, items, items)
            self.mixed_precision.scaler.scale(loss).backward()
        synchronize(device)
        return time.perf_counter() - started, loss, logits

    def culprit(self, result: _Pass) -> str | None:
        """Run again, watching every module: the first that turns finite values into others, in either pass.

        Where no module does (the loss itself may), it is the one whose parameters' gradients broke first: the
        backward pass runs from the heads to the embeddings, so the last in the order of the model.
        """
        with watch_for_nonfinite(self.model) as found, contextlib.suppress(RuntimeError):
            self.run()  # hooks refuse some in-place operators
        if found:
            return found[0]
        broken = [name for name, value in result.gradients.items() if not is_finite(value)]
        return broken[-1].rpartition(".")[0] if broken else None


def measure(
    parts: TrialParts,
    batch: Batch,
    device: DeviceInfo,
    repeats: int = 0,
    on_estimate: Callable[[float], None] = lambda _: None,
) -> Measurement:
    """Run the trial's model on `batch` in fp32 and under the trial's precision.

    Each side is timed `repeats` times, in turn, after a pass that warms up; with 0 that pass is timed.
    `on_estimate` is told the seconds that this will take. The model comes back as it was, without gradients.

    Raises what an allocator raises where the precision itself does not fit into memory.
    """
    model, precision, config = parts.model, parts.resolution.precision, parts.config.amp
    batch = batch.to(device.torch_device)
    fp32 = _Side(model, MixedPrecision(PRECISIONS["fp32"], config, device), batch, parts.loss_fn)
    side = replace(fp32, mixed_precision=MixedPrecision(precision, config, device))
    with _training_without_dropout(model), use_training_attention():
        reference: _Pass | None = None
        try:
            _, reference, found = _attempt(fp32, observes=False)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        else:
            if not found.finite:
                raised = found.error and f"{found.error} (in fp32 already)"
                return replace(found, precision=precision.name, reference_finite=False, error=raised)
        if reference is None:  # it did not fit, and the error, which held the activations, is gone
            model.zero_grad(set_to_none=True)
            release_free_memory(device)
        side, candidate, found = _attempt(side, parts.compile)
        if candidate is None or not found.finite:
            return found
        if (extreme := with_extreme_class_weights(parts.loss_fn)) is not None:
            weighted = replace(side, loss_fn=extreme)
            result = weighted.run_with_backoff()
            if broken := result.broken():
                what, where = f"{broken} with class weights at their bounds", weighted.culprit(result)
                return replace(found, finite=False, nonfinite=what, first_nonfinite_module=where)
        if reference is None:
            return replace(found, reference_fits=False, seconds=candidate.seconds)
        on_estimate((repeats + 1) * (reference.seconds + candidate.seconds))
        return replace(
            found,
            logits_relative_error={
                task: relative_error(candidate.logits[task], value)
                for task, value in reference.logits.items()
            },
            loss_relative_error=relative_error(candidate.loss, reference.loss),
            gradient_cosine=_cosine(candidate.gradients, reference.gradients),
            **_costs(side, fp32, repeats),
        )


def _attempt(
    side: _Side, compile_model: Callable[[Any], object] | None = None, *, observes: bool = True
) -> tuple[_Side, _Pass | None, Measurement]:
    """The side with its model as a trial prepares it, its pass (None: it raised), and what that tells alone.

    With `observes`, also what its products really are. Raises what an allocator raises.
    """
    amp, precision = side.mixed_precision, side.mixed_precision.precision
    with side.flags(), entered_module(side.model) as entered:
        try:
            if precision.float8 or precision.weights != "float32" or compile_model:
                side = replace(side, model=prepare_model(copy.deepcopy(side.model), precision))
            inputs, in_float32 = side.inputs(slice(0, 1)), float32_modules(side.model)
            seen = observe_model(side.model, amp, *inputs) if observes else Observation()
            if compile_model:  # what is judged is what a trial runs
                compile_model(side.model)
            result = side.run_with_backoff()
            if compile_model and not result.broken():
                seen.compiled = observe_compiled(side.model, side.outputs, precision, in_float32)
        except Exception as error:
            # Whatever an operator or a compiler raises under this precision is the answer; memory is not.
            if is_out_of_memory(error):
                raise
            where = f" in {entered[0]}" if entered else ""
            message = f"{type(error).__name__}{where}: {error}"
            return side, None, Measurement(precision.name, error=message, finite=False)
        broken = result.broken()
        found = Measurement(
            precision.name,
            finite=not broken,
            nonfinite=broken,
            first_nonfinite_module=side.culprit(result) if broken else None,
            usable_scale=amp.scaler.get_scale() if precision.loss_scaling and not broken else None,
            observed=seen.telemetry(compiled=bool(compiled_modules(side.model))),
            disagreement=seen.disagreement(precision, in_float32),
            unmeasured=seen.unmeasured(),
        )
    return side, result, found


@contextlib.contextmanager
def _training_without_dropout(model: nn.Module) -> Iterator[None]:
    """As in training but for dropout: modules that compute activations again do so, the others evaluate."""
    with contextlib.ExitStack() as undo:
        undo.callback(model.train, model.training)
        undo.callback(model.zero_grad, set_to_none=True)
        model.eval()
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False) is True:
                module.training = True
                # Some layers drop by a number of their own and not by a module.
                for name, value in vars(module).items():
                    if "drop" in name and isinstance(value, float):
                        undo.callback(setattr, module, name, value)
                        setattr(module, name, 0.0)
        yield


def _costs(side: _Side, fp32: _Side, repeats: int) -> dict[str, Any]:
    """Time and memory against fp32: one pass of each for memory, then `repeats` of each for time.

    They are timed in turn, so that other load on the machine slows both; of short passes the median of many
    counts. The first pass has no freed memory to reuse, so its time counts only with `repeats` of 0.
    """
    device = side.mixed_precision.device
    times, first, peak_bytes = [], [], []
    try:
        for each in (fp32, side):
            release_free_memory(device)
            reset_peak_memory(device)
            held = peak_memory_bytes(device)
            first.append(each.time())
            peak_bytes.append(peak_memory_bytes(device) - held)
        turns = math.ceil(min(_TIMED_SECONDS / max(first), 50))
        for _ in range(repeats):
            passes = [(fp32.time(), side.time()) for _ in range(turns)]
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


def relative_error(value: Tensor, reference: Tensor) -> float:
    """||value - reference|| / ||reference||; of a reference of 0 the numerator alone."""
    norm = float(reference.double().norm())
    difference = float((value.double() - reference.double()).norm())
    return difference / norm if norm else difference


def _cosine(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> float | None:
    """Cosine between all gradients as one vector each; None when one of them is zero."""
    names = gradients.keys() & reference.keys()
    one, other = (_scaled([side[name] for name in names]) for side in (gradients, reference))
    norms = math.sqrt(_product(one, one)) * math.sqrt(_product(other, other))
    return _product(one, other) / norms if norms else None


def _scaled(tensors: list[Tensor]) -> list[Tensor]:
    """To a largest absolute value of 1: squares of very large or small values leave the range of fp32."""
    largest = max((float(tensor.abs().max()) for tensor in tensors), default=0.0) or 1.0
    return [torch.atleast_1d(tensor) / largest for tensor in tensors]


def _product(one: list[Tensor], other: list[Tensor]) -> float:
    """The inner product; rows in fp32, their sum in fp64: all in fp64 takes fifteen times as long."""
    pairs = zip(one, other, strict=True)
    return sum(float(torch.linalg.vecdot(*pair).sum(dtype=torch.float64)) for pair in pairs)
