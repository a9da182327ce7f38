"""The runtime of a precision: backend flags, weights, autocast, loss scaling, fp32 fallback.

The training loop calls the same methods in the same order under every precision. If a precision needs no
autocast or scaler, these are no-ops.

No step waits for the device. Tensors on the device count bad losses and gradients, and `check` reads them
every few steps. They keep the longest run of bad steps, so the interval of `check` does not decide how a
trial ends.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hpo.device import DeviceInfo
from hpo.errors import Nonfinite
from hpo.precision.buffers import StepBuffers
from hpo.precision.float8 import convert_to_float8
from hpo.precision.frozen import FrozenLinear, store_frozen
from hpo.precision.parts import float32_modules, run_as_before
from hpo.precision.table import PRECISIONS, AmpConfig, Precision

NONFINITE_PATIENCE = 3
"""Number of bad steps in a row that end a trial.

In a bad step the loss is not finite, or without loss scaling a gradient.
"""

MOVES_EVERY = 20
"""Steps between two samples of the moved weights; the first samples are at the powers of 2 from 2."""
MOVES_SAMPLE = 1024
"""Weights of each parameter in a sample."""

_COUNTS = ("epoch_fallbacks", "num_steps", "fp32_fallbacks")
_TENSORS = (
    *("skipped", "scale_sum", "scale_min", "scale_max", "losses_in_a_row", "gradients_in_a_row"),
    *("moved", "movable"),
)
"""Counters in a checkpoint, on the host and on the device. After a `check`, longest runs are not needed."""


def fp32_backends() -> dict[str, tuple[Any, ...]]:
    """Return PyTorch's switches of fp32 products by type of device.

    Each switch is for one operation. The switches of a whole backend are only defaults of these.
    """
    backends: Any = torch.backends
    return {
        "cuda": (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn),
        "cpu": (backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn),
    }


@contextlib.contextmanager
def backend_flags(precision: Precision, config: AmpConfig) -> Iterator[None]:
    """Set the flags of fp32 products and of the compiler's cache inside the block.

    `fp32` is IEEE fp32 under every config. cuDNN's default is TF32.
    """
    backends: Any = torch.backends
    compiler: Any = torch.compiler.config
    allows_tf32 = precision.tf32 or (precision.autocast is not None and bool(config.tf32))
    fp32_precision = "tf32" if allows_tf32 else "ieee"
    switches = fp32_backends()
    flags = [
        *((switch, "fp32_precision", fp32_precision) for switch in switches["cuda"]),
        # A CPU has no TF32. By default, oneDNN may compute fp32 products in bf16.
        *((switch, "fp32_precision", "ieee") for switch in switches["cpu"]),
        (backends.cuda.matmul, "allow_fp16_accumulation", False),
        (backends.cudnn, "benchmark", bool(config.cudnn_benchmark)),
        # Below 2.13, PyTorch's cache of compiled graphs does not distinguish the dtypes of autocast:
        # https://github.com/pytorch/pytorch/pull/181564.
        (compiler, "cache_key_tag", f"{compiler.cache_key_tag}/{precision.name}"),
    ]
    with contextlib.ExitStack() as undo:
        for backend, name, _ in flags:
            undo.callback(setattr, backend, name, getattr(backend, name))
        # Inductor reads older names of the same switches: https://github.com/pytorch/pytorch/issues/196728.
        # They also set switches, so they are set and restored first. If a user's switches disagree with them,
        # reading them raises, and there is nothing to restore.
        with contextlib.suppress(RuntimeError):
            undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        with contextlib.suppress(RuntimeError):
            undo.callback(setattr, backends.cudnn, "allow_tf32", backends.cudnn.allow_tf32)
        torch.set_float32_matmul_precision("high" if allows_tf32 else "highest")
        backends.cudnn.allow_tf32 = allows_tf32
        for flag in flags:
            setattr(*flag)
        yield


def tf32_is_on() -> bool:
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def reduced_precision_reduction() -> dict[str, bool]:
    """Return PyTorch's flags for sums of cuBLAS in bf16 and fp16. hpo does not change them."""
    matmul: Any = torch.backends.cuda.matmul
    names = [f"allow_{width}_reduced_precision_reduction" for width in ("bf16", "fp16")]
    names += [f"{name}_split_k" for name in names]
    return {name: getattr(matmul, name) for name in sorted(names) if hasattr(matmul, name)}


def prepare_model(model: nn.Module, precision: Precision) -> nn.Module:
    """Convert the weights of a model: to bf16, to float8 linear layers, or frozen ones to fewer bits.

    Buffers beside weights in bf16 are bf16 too, but for those of `_float32_tensors`. Weights in bf16 have no
    parts in fp32 (`hpo.precision.parts`). Under fp8, the linear layers of such parts stay, and compute in
    bf16.
    """
    in_float32 = float32_modules(model)
    if precision.changes_weights:
        run_as_before(model)
    if precision.float8:
        model = convert_to_float8(model, kept=in_float32)
    dtype = getattr(torch, precision.weights)
    kept = {id(weight) for weight in store_frozen(model, precision.frozen, dtype)}
    kept |= {id(tensor) for tensor in _float32_tensors(model, keeps_rotary=precision.keeps_rotary).values()}

    def convert(tensor: Tensor) -> Tensor:
        return tensor if id(tensor) in kept or not tensor.is_floating_point() else tensor.to(dtype)

    if dtype == torch.float32:
        for parameter in model.parameters():
            if id(parameter) not in kept:
                parameter.data = convert(parameter.data)
    else:
        model._apply(convert)  # as `model.bfloat16()` does
    return model


_ROTARY = re.compile("freq|rotary|rope(?!r)", re.IGNORECASE)


def _float32_tensors(model: nn.Module, *, keeps_rotary: bool) -> dict[str, Tensor]:
    """Return the tensors that stay fp32 beside weights in bf16, by name.

    Rotary frequencies in bf16 are off by radians at long distances. Norms with running statistics need these
    and weights in one format. Scales of stored weights belong to their integers. Models of transformers name
    tensors that they never store in bf16.
    """
    kept: dict[str, Tensor] = {}
    named = [*model.named_parameters(), *model.named_buffers()]
    for prefix, module in model.named_modules():
        strict = getattr(module, "_keep_in_fp32_modules_strict", None) or ()
        inside = f"{prefix}." if prefix else ""
        patterns = [re.compile(rf"{re.escape(inside)}(.*\.)?{re.escape(one)}(\.|$)") for one in strict]
        kept |= {name: one for name, one in named if any(pattern.match(name) for pattern in patterns)}
        own = {f"{inside}{name}": one for name, one in module.named_buffers(recurse=False)}
        if isinstance(module, FrozenLinear):
            kept |= own
        elif isinstance(module, _NormBase) and module.running_mean is not None:
            kept |= own | {f"{inside}{name}": one for name, one in module.named_parameters(recurse=False)}
        else:
            shown = {name: type(module).__name__ + name[len(inside) :] for name in own if keeps_rotary}
            kept |= {name: own[name] for name, words in shown.items() if _ROTARY.search(words)}
    return {name: one for name, one in kept.items() if one.is_floating_point()}


def float32_buffers(model: nn.Module) -> list[str]:
    """Return the names of buffers in fp32 if there are weights in bf16, without those of norms."""
    return [
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name, one in module.named_buffers(recurse=False)
        if one.dtype == torch.float32 and not isinstance(module, _NormBase) and has_bf16_weights(model)
    ]


def has_bf16_weights(model: nn.Module) -> bool:
    return any(weight.dtype == torch.bfloat16 for weight in model.parameters())


@dataclass(frozen=True)
class AmpStatistics:
    """Counts since the last reset. The scale is fp16's loss scale; None without loss scaling."""

    scale_min: float | None = None
    scale_mean: float | None = None
    scale_max: float | None = None
    skipped_steps: int | None = 0
    """Steps skipped for gradients that are not finite. None: loss scaling with `track_stats: false`."""
    fp32_fallbacks: int = 0


class MixedPrecision:
    """Autocast, loss scaling, fp32 fallback and finiteness of one trial's training."""

    def __init__(self, precision: Precision, config: AmpConfig, device: DeviceInfo) -> None:
        self.precision = precision
        self.config = config
        self.device = device
        self.scaler = torch.amp.GradScaler(
            device.type,
            init_scale=config.init_scale,
            growth_factor=config.growth_factor,
            backoff_factor=config.backoff_factor,
            growth_interval=config.growth_interval,
            enabled=precision.loss_scaling,
        )
        self._zero = torch.zeros((), device=device.torch_device)
        self._one = self._zero + 1
        self.scale_value()  # creates the scaler's state: a rank without rows never scales a loss
        self._losses_in_a_row = self._gradients_in_a_row = self._overflows_at_floor = self._zero
        self._most_losses_in_a_row = self._most_gradients_in_a_row = self._zero
        self._skipped = self._scale_sum = self._scale_min = self._scale_max = self._zero
        self._moved = self._movable = self._zero
        self._num_updates = 0
        self.last_skipped = self._zero
        """1 if gradients of the last step were not finite, else 0; on the device."""
        self._epoch_fallbacks = 0
        self.step_fallbacks = 0
        """Micro-batches of the current step repeated in fp32 by this process."""
        self.buffers: StepBuffers | None = None
        """The buffers of the model in training (`follow`)."""
        self.reset_statistics()

    def follow(self, model: nn.Module) -> None:
        """Restore the buffers of `model` after each skipped step and before each repetition."""
        self.buffers = StepBuffers(model)

    def autocast(self, *, enabled: bool = True) -> torch.autocast:
        dtype = self.precision.autocast
        return torch.autocast(
            self.device.type,
            dtype=getattr(torch, dtype) if dtype else torch.bfloat16,
            enabled=enabled and dtype is not None,
        )

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Autocast without gradients. Enter it once for all batches, because it caches converted weights.

        `torch.inference_mode` of PyTorch 2.13 caches none.
        """
        with torch.no_grad(), self.autocast():
            yield

    def falls_back(self, loss: Tensor) -> bool:
        """Return whether to repeat a micro-batch with this loss in fp32, and count it.

        Waits for the device if the config has a fallback.
        """
        if not self.config.fallback_to_fp32 or not self.has_fp32_repeat or bool(torch.isfinite(loss)):
            return False
        self.step_fallbacks += 1
        return True

    @property
    def has_fp32_repeat(self) -> bool:
        """True if `float32` changes the products. Float8 layers stay float8."""
        return self.precision.linear_dtype != "float32" and not self.precision.float8

    @contextlib.contextmanager
    def float32(self, model: nn.Module) -> Iterator[Callable[..., Any]]:
        """Yield a call of `model` with fp32 copies of its weights, without autocast and under fp32's flags.

        Run the backward pass in the block too. Gradients reach the original weights.
        """
        weights = {
            name: one.float() if one.is_floating_point() else one
            for name, one in (*model.named_parameters(), *model.named_buffers())
        }
        with self.autocast(enabled=False), backend_flags(PRECISIONS["fp32"], self.config):
            yield lambda *inputs: torch.func.functional_call(model, weights, inputs)

    def scale_value(self) -> Tensor:
        """Return the loss scale as a tensor on the device; 1 without loss scaling."""
        scaled: Tensor = self.scaler.scale(self._one)
        return scaled

    def update_scale(self) -> None:
        """Update the loss scale after a step, down to its floor: a scale of 0 makes weights NaN."""
        self.scaler.update()
        floor = min(self.config.min_scale, self.config.init_scale)
        self.scaler.update(self.scale_value().clamp(min=floor))

    def record_step(self, loss: Tensor, gradient_norm: Tensor) -> Tensor:
        """Count on the device a loss or unscaled gradients that are not finite.

        Returns 1 if the gradients are not finite and the step must be skipped, else 0.
        """
        bad_loss = ~torch.isfinite(loss.detach())
        bad_gradient = ~torch.isfinite(gradient_norm.detach())
        self._losses_in_a_row = (self._losses_in_a_row + 1) * bad_loss
        self._most_losses_in_a_row = torch.maximum(self._most_losses_in_a_row, self._losses_in_a_row)
        self._skipped = self._skipped + bad_gradient
        self.last_skipped = bad_gradient.float()
        if self.buffers:
            self.buffers.end_step(bad_gradient)
        if not self.precision.loss_scaling:
            in_a_row = self._gradients_in_a_row = (self._gradients_in_a_row + 1) * bad_gradient
            self._most_gradients_in_a_row = torch.maximum(self._most_gradients_in_a_row, in_a_row)
            return self.last_skipped
        scale = self.scale_value()
        at_floor = scale <= self.config.min_scale
        self._overflows_at_floor = self._overflows_at_floor + (bad_gradient & at_floor)
        if self.config.track_stats is not False:
            self._scale_sum = self._scale_sum + scale
            self._scale_min = torch.minimum(self._scale_min, scale)
            self._scale_max = torch.maximum(self._scale_max, scale)
            self._num_steps += 1
        return self.last_skipped

    @contextlib.contextmanager
    def counting_moves(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Count, in a sample of weights in bf16 with a gradient, those that the step in the block moves.

        An update of less than half the distance to the next number of the format is lost: in bf16, 1e-5
        moves no weight above 0.008.
        """
        self._num_updates += 1
        number = self._num_updates
        is_due = number % MOVES_EVERY == 0 or (number > 1 and number & (number - 1) == 0)
        if self.precision.weights == "float32" or not is_due:
            yield
            return
        weights = [one for one in parameters if one.grad is not None and one.dtype != torch.float32]
        before = [_sample(one).clone() for one in weights]
        has_gradient = [_sample(cast(Tensor, one.grad)) != 0 for one in weights]
        yield
        for weight, old, counts in zip(weights, before, has_gradient, strict=True):
            counts = counts & (self.last_skipped == 0)
            self._moved = self._moved + ((_sample(weight) != old) & counts).sum()
            self._movable = self._movable + counts.sum()

    def moved_share(self) -> float | None:
        """Return the share of these weights that moved; None: nothing was counted. Waits for the device."""
        return float(self._moved / self._movable) if self._movable else None

    def check(self) -> None:
        """Raise Nonfinite if the training cannot recover. Waits for the device."""
        counts = [self._most_losses_in_a_row, self._most_gradients_in_a_row, self._overflows_at_floor]
        losses, gradients, floor = torch.stack(counts).tolist()
        if floor:
            raise Nonfinite(
                f"gradients overflowed with the loss scale at its floor of {self.config.min_scale:g} "
                "(amp.min_scale)."
            )
        if losses >= NONFINITE_PATIENCE:
            raise Nonfinite(f"the loss was not finite in {NONFINITE_PATIENCE} steps in a row.")
        if gradients >= NONFINITE_PATIENCE:
            raise Nonfinite(f"the gradients were not finite in {NONFINITE_PATIENCE} steps in a row.")

    def start_epoch(self) -> None:
        self._epoch_fallbacks = 0

    def start_step(self) -> None:
        """Begin or repeat a step. A repeated step counts its fallbacks once."""
        self.step_fallbacks = 0
        if self.buffers:
            self.buffers.begin_step()

    def end_step(self, num_fallbacks: int) -> None:
        """Count the fallbacks of a step on all ranks. Raises Nonfinite if an epoch has too many."""
        self._epoch_fallbacks += num_fallbacks
        self._fp32_fallbacks += num_fallbacks
        if self._epoch_fallbacks > self.config.max_fp32_fallbacks:
            error = Nonfinite(
                f"more than {self.config.max_fp32_fallbacks} micro-batches of one epoch were not finite "
                f"under {self.precision.name} (amp.max_fp32_fallbacks)."
            )
            error.finite_in_fp32 = True  # only repeats with a finite loss count
            raise error

    def update_amp_config(self, **changes: Any) -> None:
        """Change `AmpConfig` keys between epochs. A new `init_scale` becomes the scale at once.

        Raises pydantic's ValidationError for a wrong key or value, and ValueError for a key of the precision
        itself.
        """
        fixed = {"preset", "on_unsupported", "allow_emulated", "memory_fraction", "tf32", "cudnn_benchmark"}
        if fixed & changes.keys():
            raise ValueError(f"{', '.join(sorted(fixed & changes.keys()))} cannot change inside a trial.")
        self.config = AmpConfig.model_validate(self.config.model_dump() | changes)
        if not self.precision.loss_scaling:
            return
        self.scaler.set_growth_factor(self.config.growth_factor)
        self.scaler.set_backoff_factor(self.config.backoff_factor)
        self.scaler.set_growth_interval(self.config.growth_interval)
        if "init_scale" in changes:
            state = self.scaler.state_dict() | {"scale": self.config.init_scale, "_growth_tracker": 0}
            self.scaler.load_state_dict(state)

    def statistics(self) -> AmpStatistics:
        """Return the counts since the last reset. Waits for the device."""
        is_counted = not self.precision.loss_scaling or self.config.track_stats is not False
        skipped, fallbacks = int(self._skipped) if is_counted else None, self._fp32_fallbacks
        if not self._num_steps:
            return AmpStatistics(skipped_steps=skipped, fp32_fallbacks=fallbacks)
        scales = float(self._scale_min), float(self._scale_sum) / self._num_steps, float(self._scale_max)
        return AmpStatistics(*scales, skipped, fallbacks)

    def reset_statistics(self) -> None:
        self._num_steps = self._fp32_fallbacks = 0
        self._skipped = self._scale_sum = self._zero
        self._scale_min, self._scale_max = self._zero + math.inf, self._zero - math.inf

    def state_dict(self) -> dict[str, Any]:
        numbers = {name: float(getattr(self, f"_{name}")) for name in (*_COUNTS, *_TENSORS)}
        return {"scaler": dict(self.scaler.state_dict()), **numbers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint. Missing keys keep their values."""
        if scaler := state.get("scaler"):
            self.scaler.load_state_dict(scaler)
        for name in state.keys() & _COUNTS:
            setattr(self, f"_{name}", int(state[name]))
        for name in state.keys() & _TENSORS:
            setattr(self, f"_{name}", torch.tensor(state[name], device=self.device.torch_device))


def _sample(values: Tensor) -> Tensor:
    return values.detach().reshape(-1)[:: max(1, values.numel() // MOVES_SAMPLE)]
