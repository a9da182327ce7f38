"""Measurement of a model under a precision against fp32, on one small batch.

Model and loss run forward and backward, in fp32 and under the precision from equal weights, as in training
but without dropout. Compared are finiteness, the relative error of each output (of a trial's model: of each
head's logits) ||y - y32|| / ||y32||, and the cosine between the gradients. If gradients overflow under loss
scaling, the scale backs off as in training, to its floor. If fp32 does not fit into memory, only finiteness
is measured. `hpo.trial.costs` measures time and memory.
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from hpo.data.batches import Batch
from hpo.device import synchronize
from hpo.lost_device import raise_if_lost
from hpo.memory import is_out_of_memory, release_free_memory
from hpo.models.attention import sdpa_in_place_of_flash, use_training_attention
from hpo.precision.amp import MixedPrecision, backend_flags, prepare_model
from hpo.precision.effective import observe_model, restored
from hpo.precision.observation import Agreement, Observation
from hpo.precision.table import PRECISIONS, AmpConfig
from hpo.training.compilation import drop_compiled
from hpo.trial.parts import TrialParts

MEASUREMENT_VERSION = 14
"""Raise it when the measurement changes. Cached results of another version are measured again."""

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
    logits_relative_error: dict[str, float] = field(default_factory=dict)
    """{task or output: ||y - y32|| / ||y32||}."""
    gradient_cosine: float | None = None
    usable_scale: float | None = None
    """fp16: the largest scale, backing off from `init_scale`, at which gradients are finite."""
    agrees: bool | None = None
    """True if the observed products are those of the precision; None: unverified."""
    disagreement: str = ""
    """The reason if `agrees` is not true."""
    observed: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Pass:
    """One forward and backward: logits and unscaled gradients in fp32, on the CPU."""

    loss: Tensor
    logits: dict[str, Tensor]
    gradients: dict[str, Tensor]

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


def work_of(parts: TrialParts, batch: Batch) -> Work:
    """Return the work of a trial."""
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

    @contextlib.contextmanager
    def flags(self) -> Iterator[None]:
        own = self.work.reference_flags(self.model) if self.is_reference else contextlib.nullcontext()
        with backend_flags(self.mixed_precision.precision, self.mixed_precision.config), own:
            yield

    def run(self) -> _Pass:
        """Run forward and backward once."""
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
    The model comes back unchanged, without gradients. Raises an error of the allocator if the precision does
    not fit into memory.
    """
    precision = amp.precision

    def attempt_in_fp32(
        compile_model: Callable[[Any], object] | None = None,
    ) -> tuple[_Pass | None, Measurement] | None:
        """Run in fp32; None: it does not fit into memory."""
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
    """Run a side with its model as a trial prepares it. Return the pass (None: it raised) and measurement.

    With `observes`, the formats of its products are measured too. Errors of the allocator are raised.
    """
    amp, precision = side.mixed_precision, side.mixed_precision.precision
    if precision.changes_weights or compile_model:
        side = replace(side, model=copy.deepcopy(side.model))
    with side.flags():
        try:
            prepare_model(side.model, precision)
            seen = observe_model(side.model, amp, side.work.observed) if observes else Observation()
            if compile_model:  # as in a trial
                seen.compiled = Agreement(None, BEFORE_COMPILE)
                compile_model(side.model)
            result = side.run_with_backoff()
        except Exception as error:
            # An error of an operator or a compiler is the result; one of the allocator is not.
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


@contextlib.contextmanager
def training_without_dropout(model: nn.Module) -> Iterator[None]:
    """Put a model into training mode without dropout during the block.

    Only modules with gradient checkpointing, batch norms and recurrent modules (cuDNN needs it) train; the
    others evaluate. Modules in another mode than the model keep it.
    """
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
    """Return ||value - reference|| / ||reference||; the numerator if the reference is 0."""
    norm = float(reference.double().norm())
    difference = float((value.double() - reference.double()).norm())
    return difference / norm if norm else difference


def _cosine(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> float | None:
    """Return the cosine between all gradients as one vector each; None if one of them is zero."""
    names = gradients.keys() & reference.keys()
    one, other = (_scaled([side[name] for name in names]) for side in (gradients, reference))
    norms = math.sqrt(_product(one, one)) * math.sqrt(_product(other, other))
    return _product(one, other) / norms if norms else None


def _scaled(tensors: list[Tensor]) -> list[Tensor]:
    """Scale to a largest absolute value of 1, so that squares stay in the range of fp32."""
    largest = max((float(tensor.abs().max()) for tensor in tensors), default=0.0) or 1.0
    return [torch.atleast_1d(tensor) / largest for tensor in tensors]


def _product(one: list[Tensor], other: list[Tensor]) -> float:
    """Return the inner product: rows in fp32, their sum in fp64. All in fp64 takes fifteen times as long."""
    pairs = zip(one, other, strict=True)
    return sum(float(torch.linalg.vecdot(*pair).sum(dtype=torch.float64)) for pair in pairs)


_MASKING = {"masked_fill", "where", "log", "_to_copy"}
"""Operators with an intended -inf; `_to_copy` makes it from fp32's lowest number."""


class FirstNonfinite(TorchDispatchMode):
    """A block that notes the `operator` of its first non-finite number, in words; None: all are finite."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operator: str | None = None
        self.module: str | None = None
        """The innermost module of the operator; "" is the model itself, None the loss after it."""
        self._tracker = ModuleTracker()

    def __enter__(self) -> FirstNonfinite:
        self._tracker.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._tracker.__exit__(*error)

    def facts(self) -> dict[str, str | None]:
        """Return the fields of a `Measurement`."""
        return {"first_nonfinite": self.operator, "first_nonfinite_module": self.module}

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1].rstrip("_")
        inputs = _floating((args, kwargs))
        is_constant = "empty" in name or "full" in name
        if self.operator or func.is_view or is_constant or not inputs:
            return func(*args, **kwargs)
        largest = max((float(tensor.abs().max()) for tensor in inputs if tensor.numel()), default=0.0)
        masks = name in _MASKING or largest == torch.inf
        result = func(*args, **kwargs)
        broken = [tensor for tensor in _floating(result) if not is_finite(tensor)]
        if broken and not (masks and all(map(_only_masks, broken))):
            self._note(func, broken[0].dtype, largest)
        return result

    def _note(self, func: Any, dtype: torch.dtype, largest_input: float) -> None:
        modules = [module for module in self._tracker.parents if module != "Global"]
        if modules:
            self.module = max(modules, key=len).partition(".")[2]
        where = "the loss, after the logits" if self.module is None else self.module or "the model itself"
        phase = "backward" if self._tracker.is_bw else "forward"
        kind = str(dtype).removeprefix("torch.")
        self.operator = f"{func} ({kind}) in {where}, {phase} pass, inputs up to {largest_input:.4g}"


def is_finite(values: Tensor) -> bool:
    """Return true if all values are finite. The extremes (NaN propagates) are faster than each value."""
    return not values.numel() or bool(torch.stack(torch.aminmax(values.detach())).isfinite().all())


def _floating(values: Any) -> list[Tensor]:
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return [leaf for leaf in leaves if leaf.is_floating_point() and leaf.layout == torch.strided]


def _only_masks(tensor: Tensor) -> bool:
    """Return true if -inf is the only number that is not finite."""
    return not bool((tensor.isnan() | tensor.isposinf()).any())
