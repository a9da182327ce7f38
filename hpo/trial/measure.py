"""What a model does under a precision, measured against fp32 on one small batch.

Model and loss run forward and backward, in fp32 and under the precision from equal weights, as in training
but without dropout. Compared are finiteness, the relative error of each output (of a trial's model: of each
head's logits) ||y - y32|| / ||y32||, and the cosine between the gradients. Where gradients overflow under
loss scaling, the scale backs off as in training, to its floor. Where fp32 does not fit into memory,
finiteness alone is measured. `hpo.trial.costs` measures time and memory.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hpo.data.batches import Batch
from hpo.device import synchronize
from hpo.lost_device import raise_if_lost
from hpo.memory import is_out_of_memory, release_free_memory
from hpo.models.attention import sdpa_in_place_of_flash, use_training_attention
from hpo.precision.amp import MixedPrecision, backend_flags, prepare_model
from hpo.precision.effective import Agreement, Observation, observe_model, restored
from hpo.precision.table import PRECISIONS, AmpConfig
from hpo.training.compilation import compiled_modules, drop_compiled
from hpo.trial.nonfinite import FirstNonfinite, is_finite
from hpo.trial.trial_parts import TrialParts

MEASUREMENT_VERSION = 12
"""To be raised when the measuring changes: what is cached of another version is measured again."""

BEFORE_COMPILE = (
    "the products were measured before the model was compiled; each trial measures its compiled model."
)


@dataclass(frozen=True)
class Measurement:
    """What one model did under one precision, against fp32. JSON-able by `asdict`."""

    precision: str
    error: str | None = None
    """What was raised."""
    finite: bool = True
    nonfinite: str | None = None
    """What was not finite first: `logits`, `loss` or `gradients`."""
    first_nonfinite_module: str | None = None
    """The innermost that it ran in; None: after the logits, or not known."""
    first_nonfinite: str | None = None
    """The operator that made the first such number, in words."""
    reference_finite: bool = True
    """Whether fp32 was finite and raised nothing. If not, `error` and `nonfinite` are those of fp32, and the
    precision is not to blame."""
    reference_fits: bool = True
    """Whether fp32 fitted into memory; if not, nothing is known against it."""
    logits_relative_error: dict[str, float] = field(default_factory=dict)
    """{task or output: ||y - y32|| / ||y32||}."""
    gradient_cosine: float | None = None
    usable_scale: float | None = None
    """fp16: the largest scale, backing off from `init_scale`, at which gradients are finite."""
    agrees: bool | None = None
    """Whether the products observed are the precision's; None: unverified."""
    disagreement: str = ""
    """The reason where they are not, or are unverified."""
    observed: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Pass:
    """One forward and backward: logits and unscaled gradients in fp32, on the CPU."""

    loss: Tensor
    logits: dict[str, Tensor]
    gradients: dict[str, Tensor]

    def broken(self) -> str | None:
        """What is not finite first."""
        parts = {"logits": self.logits.values(), "loss": [self.loss], "gradients": self.gradients.values()}
        return next((name for name, values in parts.items() if not all(map(is_finite, values))), None)


Forward = Callable[[Any], tuple[Tensor, dict[str, Tensor]]]
"""Of a model: its loss on a batch, as in training, and what it gives, by name."""


@dataclass(frozen=True)
class Work:
    """What both sides do with a batch that is on the device."""

    forward: Forward
    observed: Callable[[Any], object]
    """Calls the model, perhaps on less."""
    compared: Callable[[Tensor], Tensor] = lambda output: output
    """The part of an output, on the CPU, that has a meaning."""
    reference_flags: Callable[[Any], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """In which a model that is the reference runs."""


def work_of(parts: TrialParts, batch: Batch) -> Work:
    """That of a trial."""
    batch = batch.to(parts.device.torch_device)
    items = parts.loss_fn.count(batch)

    def forward(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
        logits = model(*batch.inputs)
        return parts.loss_fn(logits, batch, items), logits

    inputs = batch.rows(slice(0, 1)).inputs
    is_token_BL = batch.attention_mask_BL.bool().cpu()
    return Work(
        forward,
        lambda model: model(*inputs),
        # Those of token tasks without padding, where attention gives what it likes.
        lambda logits: logits[is_token_BL] if logits.dim() == 3 else logits,
        lambda model: sdpa_in_place_of_flash(model.encoder),
    )


@dataclass(frozen=True)
class Side:
    """A model under one precision, and what it does."""

    model: Any
    mixed_precision: MixedPrecision
    work: Work
    is_reference: bool = False

    @contextlib.contextmanager
    def flags(self) -> Iterator[None]:
        own = self.work.reference_flags(self.model) if self.is_reference else contextlib.nullcontext()
        with backend_flags(self.mixed_precision.precision, self.mixed_precision.config), own:
            yield

    def run(self) -> _Pass:
        """Forward and backward once."""
        loss, outputs = self._step()
        scale = self.mixed_precision.scale_value().cpu()
        gradients = {
            name: parameter.grad.detach().to_dense().float().cpu() / scale
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }
        self.model.zero_grad(set_to_none=True)
        logits = {name: self.work.compared(value.detach().float().cpu()) for name, value in outputs.items()}
        return _Pass(loss.detach().cpu(), logits, gradients)

    def run_with_backoff(self) -> _Pass:
        """`run` at the first loss scale that training backs off to whose gradients are finite, or else at its
        floor. Found by bisection: from 1e38 there are more than a hundred."""
        amp, result = self.mixed_precision, self.run()
        scales = _backed_off(amp.config) if amp.precision.loss_scaling else []
        if not scales or result.broken() != "gradients":
            return result

        def run_at(scale: float) -> _Pass:
            amp.update_amp_config(init_scale=scale)
            return self.run()

        first = bisect_left(scales[:-1], True, key=lambda scale: run_at(scale).broken() != "gradients")
        return run_at(scales[first])

    def time(self) -> float:
        """Wall seconds of one pass."""
        device = self.mixed_precision.device
        synchronize(device)
        started = time.perf_counter()
        self._step()
        synchronize(device)
        seconds = time.perf_counter() - started
        self.model.zero_grad(set_to_none=True)
        return seconds

    def _step(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and outputs of a pass as in training. The gradients stay in the model."""
        self.model.zero_grad(set_to_none=True)
        with self.flags():
            with self.mixed_precision.autocast():
                loss, outputs = self.work.forward(self.model)
            self.mixed_precision.scaler.scale(loss).backward()
        return loss, outputs

    def origin(self) -> dict[str, Any]:
        """Run again, watching every operator: where the first number that is not finite comes from."""
        with FirstNonfinite() as watched:
            self.run()
        return watched.facts()


def measure(parts: TrialParts, batch: Batch) -> Measurement:
    """Run the trial's model on `batch` in fp32 and under the trial's precision; see `measure_work`."""
    amp = MixedPrecision(parts.resolution.precision, parts.config.amp, parts.device)
    with use_training_attention():
        try:
            return measure_work(parts.model, amp, work_of(parts, batch), parts.compile, parts.build_reference)
        finally:
            if parts.compile:
                drop_compiled(parts.device)


def measure_work(
    model: Any,
    amp: MixedPrecision,
    work: Work,
    compile_model: Callable[[Any], object] | None = None,
    build_reference: Callable[[], Any] | None = None,
) -> Measurement:
    """Run a model, whose weights are fp32 ones, in fp32 and under the precision of `amp`, and compare.

    If some weights of `model` are stored in fewer bits, `build_reference` builds the model to run in fp32.
    The model comes back as it was, without gradients.

    Raises what an allocator raises where the precision itself does not fit into memory.
    """
    precision = amp.precision

    def attempt_in_fp32(
        compile_model: Callable[[Any], object] | None = None,
    ) -> tuple[_Pass | None, Measurement] | None:
        """None: fp32 does not fit into memory."""
        fp32 = MixedPrecision(PRECISIONS["fp32"], amp.config, amp.device)
        try:
            reference = build_reference() if build_reference else model
            with training_without_dropout(reference):
                return _attempt(Side(reference, fp32, work, is_reference=True), compile_model, observes=False)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    fp32 = attempt_in_fp32()
    if fp32 is None:  # the error, which held the activations, is gone
        model.zero_grad(set_to_none=True)
        release_free_memory(amp.device)
    elif not fp32[1].finite:
        return replace(fp32[1], precision=precision.name, reference_finite=False)
    with training_without_dropout(model):
        candidate, measurement = _attempt(Side(model, amp, work), compile_model)
    if candidate is None or not measurement.finite:
        if compile_model and fp32:  # the compiler may be at fault
            fp32 = attempt_in_fp32(compile_model)
            if fp32 and not fp32[1].finite:
                return replace(fp32[1], precision=precision.name, reference_finite=False)
        return replace(measurement, reference_fits=fp32 is not None)
    reference = fp32 and fp32[0]
    if reference is None:
        return replace(measurement, reference_fits=False)
    return replace(
        measurement,
        logits_relative_error={
            name: relative_error(candidate.logits[name], value) for name, value in reference.logits.items()
        },
        gradient_cosine=_cosine(candidate.gradients, reference.gradients),
    )


def _attempt(
    side: Side, compile_model: Callable[[Any], object] | None = None, *, observes: bool = True
) -> tuple[_Pass | None, Measurement]:
    """Run a side with its model as a trial prepares it. Return the pass (None: it raised) and what it tells.

    With `observes`, also what its products really are. Raises what an allocator raises.
    """
    amp, precision = side.mixed_precision, side.mixed_precision.precision
    if precision.changes_weights or compile_model:
        side = replace(side, model=copy.deepcopy(side.model))
    with side.flags():
        try:
            prepare_model(side.model, precision)
            seen = observe_model(side.model, amp, side.work.observed) if observes else Observation()
            if compile_model:  # what is judged is what a trial runs
                seen.compiled = Agreement(None, BEFORE_COMPILE)
                compile_model(side.model)
            result = side.run_with_backoff()
        except Exception as error:
            # Whatever an operator or a compiler raises under this precision is the answer; memory is not.
            if is_out_of_memory(error):
                raise
            raise_if_lost(amp.device, error)  # a lost GPU tells nothing about the precision
            message = f"{type(error).__name__}: {error}"
            return None, Measurement(precision.name, error=message, finite=False)
        agrees, reason = seen.agreement(precision) if observes else (None, "")
        broken = result.broken()
        measurement = Measurement(
            precision.name,
            finite=not broken,
            nonfinite=broken,
            **(side.origin() if broken else {}),
            usable_scale=amp.scaler.get_scale() if precision.loss_scaling and not broken else None,
            observed=seen.telemetry(compiled=bool(compiled_modules(side.model))),
            agrees=agrees,
            disagreement=reason,
        )
    return result, measurement


def _backed_off(config: AmpConfig) -> list[float]:
    """The loss scales after one overflow after the other, the last at the floor."""
    scales: list[float] = []
    scale = config.init_scale
    while scale > config.min_scale:
        scale = max(config.min_scale, scale * config.backoff_factor)
        scales.append(scale)
    return scales


@contextlib.contextmanager
def training_without_dropout(model: nn.Module) -> Iterator[None]:
    """As in training but for dropout: modules that compute activations again do so, batch norms take the
    statistics of the batch, and recurrent ones are as cuDNN needs them; the others evaluate. Modules that are
    in another mode than the model keep theirs."""
    trains = {module for module in model.modules() if module.training == model.training}
    with contextlib.ExitStack() as undo:
        undo.callback(model.zero_grad, set_to_none=True)
        undo.enter_context(restored(model))
        model.eval()
        for module in trains:
            recomputes = getattr(module, "gradient_checkpointing", False) is True
            if recomputes or isinstance(module, (nn.RNNBase, _BatchNorm)):
                module.training = True
                # Some layers drop by a number of their own and not by a module.
                for name, value in vars(module).items():
                    if "drop" in name and isinstance(value, float):
                        undo.callback(setattr, module, name, value)
                        setattr(module, name, 0.0)
        yield


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
