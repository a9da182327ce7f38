"""Measurement of a model under a precision against fp32, on one small batch.

Model and loss run forward and backward, in fp32 and under the precision, from equal weights and random
numbers, as in training but without dropout (`hpo.precision.conditions`). Compared are finiteness, the
relative error of each output (of a trial's model: of each head's logits) ||y - y32|| / ||y32||, and the
cosine between the gradients. If two passes in fp32 differ, nothing is known of the precision. If gradients
overflow under loss scaling, the scale backs off as in training, to its floor. If fp32 does not fit into
memory, only finiteness is measured. `hpo.trial.costs` measures time and memory.
"""

from __future__ import annotations

import contextlib
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from hpo.data.batches import Batch
from hpo.device import synchronize
from hpo.errors import InputError
from hpo.lost_device import raise_if_lost
from hpo.memory import is_out_of_memory, release_free_memory
from hpo.models.attention import sdpa_in_place_of_flash, use_training_attention
from hpo.precision.amp import MixedPrecision, backend_flags, float32_buffers, prepare_model
from hpo.precision.conditions import SameDraws, training_without_dropout, unchanged
from hpo.precision.effective import observe_model
from hpo.precision.observation import Agreement, Observation
from hpo.precision.sums import float32_sums
from hpo.precision.table import PRECISIONS, AmpConfig, Precision
from hpo.random_numbers import generator_states, held_generators, same_random_numbers, seed_all
from hpo.training.compilation import drop_compiled
from hpo.trial.differences import cosine, gradient_shares, relative_error
from hpo.trial.first_nonfinite import FirstNonfinite, is_finite
from hpo.trial.parts import TrialParts

MEASUREMENT_VERSION = 16
"""Raise it when the measurement changes. Cached results of another version are measured again."""

REPEATS = 1e-3
"""Largest relative difference between two passes in fp32 that rounding explains: sums in another order."""

BEFORE_COMPILE = (
    "the products were measured before the model was compiled; each trial measures its compiled model."
)


@dataclass(frozen=True)
class Measurement:
    """One model under one precision, against fp32. JSON-able by `asdict`."""

    precision: str
    error: str | None = None
    """The exception of the pass."""
    finite: bool = True
    nonfinite: str | None = None
    """The first without finite numbers: `logits`, `loss` or `gradients`."""
    first_nonfinite_module: str | None = None
    """The innermost module of `first_nonfinite`; None: after the logits, or not known."""
    first_nonfinite: str | None = None
    """The operator with the first such number, in words."""
    reference_finite: bool = True
    """True if fp32 was finite and raised nothing. Otherwise `error` and `nonfinite` are those of fp32, and
    the precision is not to blame."""
    reference_fits: bool = True
    """True if fp32 fitted into memory. Otherwise nothing is known against it."""
    reference_repeats: bool = True
    """False if two equal passes in fp32 differ. Then nothing is known of the precision."""
    float32_buffers: list[str] = field(default_factory=list)
    """Buffers in fp32 beside weights in bf16 (`hpo.precision.amp.float32_buffers`)."""
    keeps_rotary: bool = True
    """False if the model runs only with its rotary frequencies in bf16."""
    logits_relative_error: dict[str, float] = field(default_factory=dict)
    """{task or output: ||y - y32|| / ||y32||}."""
    gradient_cosine: float | None = None
    gradient_shares: dict[str, float] = field(default_factory=dict)
    """{parameter: share of fp32's gradient that is left}, the three smallest (`gradient_share`)."""
    usable_scale: float | None = None
    """fp16: the largest scale, backing off from `init_scale`, at which gradients are finite."""
    agrees: bool | None = None
    """True if the observed products are those of the precision; None: unverified."""
    disagreement: str = ""
    """The reason if `agrees` is not true."""
    observed: dict[str, Any] = field(default_factory=dict)

    def fitting(self, precision: Precision) -> Precision:
        """Return the precision as it was measured."""
        return replace(precision, keeps_rotary=self.keeps_rotary)


@dataclass
class _Pass:
    """One forward and backward: logits and unscaled gradients in fp32, on the CPU."""

    loss: Tensor
    logits: dict[str, Tensor]
    gradients: dict[str, Tensor]
    draws: bool
    """True if it drew from a generator of PyTorch."""

    def broken(self) -> str | None:
        """Return the first part that is not finite; None: all are finite."""
        parts = {"logits": self.logits.values(), "loss": [self.loss], "gradients": self.gradients.values()}
        return next((name for name, values in parts.items() if not all(map(is_finite, values))), None)


Forward = Callable[[Any], tuple[Tensor, dict[str, Tensor]]]
"""Returns a model's loss on a batch, as in training, and its outputs by name."""


@dataclass(frozen=True)
class Work:
    """The work of both sides with a batch on the device."""

    forward: Forward
    observed: Callable[[Any], object]
    """Calls the model, perhaps on a part of the batch."""
    compared: Callable[[Tensor], Tensor] = lambda output: output
    """Returns the meaningful part of an output on the CPU."""
    reference_flags: Callable[[Any], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """A context for the model of the reference."""
    may_lower_rotary: bool = False
    """Whether rotary frequencies may be bf16 if fp32 fails, as in code of a user."""
    owners: Sequence[object] = ()
    """Objects beside the model that may hold generators of random numbers."""


def work_of(parts: TrialParts, batch: Batch) -> Work:
    """Return the work of a trial."""
    batch = batch.to(parts.device.torch_device)
    items = parts.loss_fn.count(batch)

    def forward(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
        logits = model(*batch.inputs)
        return parts.loss_fn(logits, batch, items), logits

    inputs = batch.rows(slice(0, 2)).inputs  # a batch norm needs two
    is_token_BL = batch.attention_mask_BL.bool().cpu()
    return Work(
        forward,
        lambda model: model(*inputs),
        # Token tasks without padding, whose attention is arbitrary.
        lambda logits: logits[is_token_BL] if logits.dim() == 3 else logits,
        lambda model: sdpa_in_place_of_flash(model.encoder),
    )


@dataclass(frozen=True)
class Side:
    """A model under one precision, and its work."""

    model: Any
    mixed_precision: MixedPrecision
    work: Work
    is_reference: bool = False
    same_draws: bool = False
    """Draw numbers in 16 bits from those of fp32 (`SameDraws`)."""

    @contextlib.contextmanager
    def alike(self) -> Iterator[None]:
        """Begin with the same random numbers, buffers and states of modules every time, and restore them."""
        with unchanged(self.model), same_random_numbers(*self.work.owners):
            seed_all(0)
            yield

    @contextlib.contextmanager
    def flags(self) -> Iterator[None]:
        own = self.work.reference_flags(self.model) if self.is_reference else contextlib.nullcontext()
        amp = self.mixed_precision
        with backend_flags(amp.precision, amp.config), float32_sums(amp.precision), own:
            yield

    def run(self) -> _Pass:
        """Run forward and backward once."""
        with self.alike(), SameDraws() if self.same_draws else contextlib.nullcontext():  # type: ignore[no-untyped-call]
            before = self._torch_states()
            loss, outputs = self._step()
            draws = not all(map(torch.equal, before, self._torch_states()))
        scale = self.mixed_precision.scale_value().cpu()
        gradients = {
            name: _plain(parameter.grad) / scale
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }
        self.model.zero_grad(set_to_none=True)
        logits = {name: self.work.compared(_plain(value)) for name, value in outputs.items()}
        return _Pass(loss.detach().cpu(), logits, gradients, draws)

    def _torch_states(self) -> list[Tensor]:
        own = (one.get_state() for one in self.work.owners if isinstance(one, torch.Generator))
        return [*generator_states(), *own]

    def run_with_backoff(self) -> _Pass:
        """Run at the largest loss scale of training's backoff with finite gradients, or else at its floor.

        The scale is found by bisection: from 1e38 there are more than a hundred.
        """
        amp, result = self.mixed_precision, self.run()
        scales = _backed_off(amp.config) if amp.precision.loss_scaling else []
        if not scales or result.broken() != "gradients":
            return result

        def run_at(scale: float) -> _Pass:
            amp.update_amp_config(init_scale=scale)
            return self.run()

        first = bisect_left(scales[:-1], True, key=lambda scale: run_at(scale).broken() != "gradients")
        return run_at(scales[first])

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Prepare the model for `time`, and restore it after the block."""
        with self.alike(), self.flags():
            if not self.is_reference:
                prepare_model(self.model, self.mixed_precision.precision)
            yield

    def time(self) -> float:
        """Return the wall seconds of one pass."""
        device = self.mixed_precision.device
        synchronize(device)
        started = time.perf_counter()
        self._step()
        synchronize(device)
        seconds = time.perf_counter() - started
        self.model.zero_grad(set_to_none=True)
        return seconds

    def _step(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and outputs of a pass as in training. The gradients stay in the model."""
        self.model.zero_grad(set_to_none=True)
        with self.flags():
            with self.mixed_precision.autocast():
                loss, outputs = self.work.forward(self.model)
            self.mixed_precision.scaler.scale(loss).backward()
        return loss, outputs

    def origin(self) -> dict[str, Any]:
        """Run again with every operator watched. Returns the first number that is not finite."""
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
    """Run a model with fp32 weights in fp32 and under the precision of `amp`, and compare.

    If some weights of `model` are stored in fewer bits, `build_reference` builds the model to run in fp32.
    Model and random number generators come back unchanged, without gradients. Raises an error of the
    allocator if the precision does not fit into memory, and InputError for a batch that cannot be converted.
    """
    work = replace(work, owners=held_generators(model, *work.owners))
    with same_random_numbers(*work.owners):
        return _measure_sides(Side(model, amp, work), compile_model, build_reference)


def _measure_sides(
    side: Side,
    compile_model: Callable[[Any], object] | None,
    build_reference: Callable[[], Any] | None,
) -> Measurement:
    model, amp, precision = side.model, side.mixed_precision, side.mixed_precision.precision

    def attempt_in_fp32(
        compile_model: Callable[[Any], object] | None = None,
    ) -> tuple[_Pass | None, Measurement] | None:
        """Run in fp32; None: it does not fit into memory."""
        fp32 = MixedPrecision(PRECISIONS["fp32"], amp.config, amp.device)
        try:
            reference = build_reference() if build_reference else model
            own = Side(reference, fp32, side.work, is_reference=True)
            with training_without_dropout(reference):
                result, measurement = _attempt(own, compile_model, observes=False)
                if result and not compile_model and measurement.finite:
                    repeats = _differ_by(own.run(), result) <= REPEATS
                    measurement = replace(measurement, reference_repeats=repeats)
                return result, measurement
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
    reference = fp32 and fp32[0]
    # The compiler does not run inside the mode.
    side = replace(side, same_draws=bool(reference and reference.draws and not compile_model))
    with training_without_dropout(model):
        candidate, measurement = _attempt(side, compile_model)
        if candidate is None and side.work.may_lower_rotary and measurement.float32_buffers:
            plain = MixedPrecision(replace(precision, keeps_rotary=False), amp.config, amp.device)
            again = _attempt(replace(side, mixed_precision=plain), compile_model)
            if again[0]:
                candidate, measurement = again[0], replace(again[1], keeps_rotary=False)
    if compile_model and fp32 and not measurement.finite:  # the compiler may be at fault
        fp32 = attempt_in_fp32(compile_model)
        if fp32 and not fp32[1].finite:
            return replace(fp32[1], precision=precision.name, reference_finite=False)
    measurement = replace(
        measurement,
        reference_fits=fp32 is not None,
        reference_repeats=fp32 is None or fp32[1].reference_repeats,
    )
    if candidate is None or reference is None or not measurement.finite:
        return measurement
    shares = gradient_shares(candidate.gradients, reference.gradients)
    return replace(
        measurement,
        logits_relative_error={
            name: relative_error(candidate.logits[name], value)
            for name, value in reference.logits.items()
            if name in candidate.logits and candidate.logits[name].shape == value.shape
        },
        gradient_cosine=cosine(candidate.gradients, reference.gradients),
        gradient_shares=dict(sorted(shares.items(), key=itemgetter(1))[:3]),
    )


def _attempt(
    side: Side, compile_model: Callable[[Any], object] | None = None, *, observes: bool = True
) -> tuple[_Pass | None, Measurement]:
    """Run a side with its model as a trial prepares it. Return the pass (None: it raised) and measurement.

    With `observes`, the formats of its products are measured too. Errors of the allocator are raised.
    """
    amp, precision = side.mixed_precision, side.mixed_precision.precision
    buffers: list[str] = []
    with unchanged(side.model), side.flags():
        try:
            prepare_model(side.model, precision)
            buffers = float32_buffers(side.model)
            with side.alike():
                seen = observe_model(side.model, amp, side.work.observed) if observes else Observation()
            if compile_model:  # as in a trial
                seen.compiled = Agreement(None, BEFORE_COMPILE)
                compile_model(side.model)
            result = side.run_with_backoff()
        except Exception as error:
            # An error of an operator or a compiler is the result; one of the allocator or the batch is not.
            if is_out_of_memory(error) or isinstance(error, InputError):
                raise
            raise_if_lost(amp.device, error)  # a lost GPU tells nothing about the precision
            message = f"{type(error).__name__}: {error}"
            return None, Measurement(precision.name, error=message, finite=False, float32_buffers=buffers)
        agrees, reason = seen.agreement(precision) if observes else (None, "")
        broken = result.broken()
        measurement = Measurement(
            precision.name,
            finite=not broken,
            nonfinite=broken,
            **(side.origin() if broken else {}),
            usable_scale=amp.scaler.get_scale() if precision.loss_scaling and not broken else None,
            float32_buffers=buffers,
            observed=seen.telemetry(),
            agrees=agrees,
            disagreement=reason,
        )
    return result, measurement


def _backed_off(config: AmpConfig) -> list[float]:
    """Return the loss scales after repeated overflows, the last at the floor."""
    scales: list[float] = []
    scale = config.init_scale
    while scale > config.min_scale:
        scale = max(config.min_scale, scale * config.backoff_factor)
        scales.append(scale)
    return scales


def _plain(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor of any layout as a dense one in fp32 on the CPU."""
    tensor = tensor.detach()
    if tensor.is_nested:
        tensor = torch.cat([part.flatten() for part in tensor.unbind()])
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.to_dense().float().cpu()


def _differ_by(one: _Pass, other: _Pass) -> float:
    """Return the largest relative difference between two passes: of outputs, or of the gradients together."""
    errors = [
        relative_error(one.logits[name], value) if one.logits[name].shape == value.shape else math.inf
        for name, value in other.logits.items()
    ]
    same = cosine(one.gradients, other.gradients)
    return max(*errors, 0.0, 0.0 if same is None else math.sqrt(max(0.0, 2 - 2 * same)))
