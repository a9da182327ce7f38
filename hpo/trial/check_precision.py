"""Check of a precision with any module and loss, without a study.

    check = hpo.check_precision(model, loss_of_batch, batch, "bf16")
    print(check)

It is the check before a trial (`hpo.trial.compat`), with the costs of the batch.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_leaves_with_path

from hpo.config.sections import CompatConfig
from hpo.device import DeviceInfo, probe_device
from hpo.errors import InputError
from hpo.memory import is_out_of_memory
from hpo.precision.amp import MixedPrecision, has_bf16_weights
from hpo.precision.conditions import training_without_dropout, unchanged
from hpo.precision.sums import PLAIN_SUMS, summed
from hpo.precision.table import PRECISIONS, AmpConfig, canonical_precision, support
from hpo.random_numbers import held_generators, same_random_numbers, seed_all
from hpo.trial.compat import Compatibility, judge
from hpo.trial.costs import Costs, measure_costs
from hpo.trial.measure import Work, measure_work
from hpo.trial.own_batch import arrays_of, map_leaves

LossOfBatch = Callable[[Any, Any], Tensor]


def check_precision(
    model: nn.Module, loss_of_batch: LossOfBatch, batch: Any, precision: str = "bf16", *, repeats: int = 3
) -> Compatibility:
    """Train `model` forward and backward on one batch in fp32 and under `precision`, and compare.

    Measured are the relative error of each output ||y - y32|| / ||y32|| (of the loss, if the model is not
    called as a whole), the cosine of the gradients, the first module and operator without finite numbers, the
    formats of the products forward and backward, speed and memory against fp32. Both sides have the same
    random numbers and no dropout. The model and the generators of random numbers come back unchanged, without
    gradients. An emulated precision is measured too, and the reasons say so.

    Args:
        model: with weights in fp32, all on one device.
        loss_of_batch: returns the loss, a scalar tensor, of `(model, batch)`. The model may be a copy.
        batch: an argument of `loss_of_batch` on the model's device, in any container. Floating-point tensors
            are bf16 under `bf16-true`.
        precision: as a trial's `fp_precision`: fp32, tf32, bf16, fp16, bf16-true or fp8.
        repeats: timed passes of each side, uncompiled and in turn, at least 1; their median counts.

    Returns:
        The verdict by the default bounds of studies with every reason, the measurement, and the costs of the
        batch: `ok`, `degraded`, `incompatible`, `invalid` if fp32 is not finite either, or `unverified` if
        two equal passes in fp32 differ.

    Raises:
        InputError: there is no such precision, this device cannot run it, or the model or loss is not as
            above.
        Exception: an error of `loss_of_batch` with the unchanged model, or of the allocator.
    """
    try:
        precision = canonical_precision(precision)
    except ValueError as error:
        raise InputError(f"precision: {error}") from None
    if repeats < 1:
        raise InputError(f"repeats: must be at least 1, but got {repeats}.")
    device = device_of(model)
    supported = support(precision, device)
    if supported.level == "unsupported":
        raise InputError(supported.reason)
    amp = MixedPrecision(PRECISIONS[precision], AmpConfig(), device)
    with torch.enable_grad():
        work = work_of_loss(model, loss_of_batch, batch)
        summed.clear()
        check = judge(measure_work(model, amp, work), CompatConfig())
        in_float32 = sorted(summed)
        if check.measurement.finite and check.measurement.reference_fits:
            amp.precision = check.measurement.fitting(amp.precision)
            check = replace(check, costs=_costs_of(model, amp, work, repeats))
    emulated = (f"{supported.reason} It is emulated here.",) if supported.level == "emulated" else ()
    own = f"Gradients of {', '.join(in_float32)} were summed in fp32, as in trials of hpo. {PLAIN_SUMS}"
    return replace(check, reasons=(*check.reasons, *([own] if in_float32 else []), *emulated))


def _costs_of(model: nn.Module, amp: MixedPrecision, work: Work, repeats: int) -> Costs | None:
    """Measure the costs without dropout. None: both sides do not fit into memory together."""
    try:
        with training_without_dropout(model):
            return measure_costs(model, amp, work, repeats)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None


def device_of(model: nn.Module) -> DeviceInfo:
    """Return the device of the model. Raises InputError if it cannot be a reference in fp32."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model: must be a torch.nn.Module, but got a {type(model).__name__}.")
    parameters = [one for one in model.parameters() if one.is_floating_point()]
    devices = {one.device for one in parameters}
    known = {torch.device("cpu")}
    if torch.cuda.is_available():
        known.add(torch.device("cuda", torch.cuda.current_device()))
    if len(devices) != 1 or not devices <= known:
        names = ", ".join(map(str, devices)) or "no weights"
        raise InputError(f"model: must be on the CPU or on the current CUDA device, but got {names}.")
    others = Counter(str(one.dtype) for one in parameters if one.dtype != torch.float32)
    if others:
        formats = ", ".join(f"{count} in {dtype}" for dtype, count in others.items())
        raise InputError(
            f"model: all weights must be in torch.float32, but there are {formats}. transformers loads a "
            "checkpoint in the dtype in which it is stored, unless it is given `dtype=torch.float32`."
        )
    return probe_device(devices.pop().type)


def work_of_loss(tried: nn.Module, loss_of_batch: LossOfBatch, batch: Any) -> Work:
    """Try the loss in fp32, and return its work. In evaluation mode, a detector may have no loss.

    Raises its errors, and InputError if it is no loss.
    """
    evaluates, generators = True, held_generators(tried, loss_of_batch, batch)
    with unchanged(tried), same_random_numbers(*generators):
        loss = loss_of_batch(tried, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise InputError("loss_of_batch: must give a scalar tensor that depends on the model's weights.")
    try:
        with unchanged(tried), same_random_numbers(*generators):
            loss_of_batch(tried.eval(), batch)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        evaluates = False

    def loss_of(model: nn.Module) -> Tensor:
        seed_all(0)  # both sides draw the same; `measure_work` puts the generators back
        try:
            return loss_of_batch(model, fitting_batch(model, batch))
        except RuntimeError as error:
            arrays = {str(one.dtype) for one in arrays_of(batch) if not isinstance(one, Tensor)}
            if has_bf16_weights(model) and (floats := [name for name in arrays if name.startswith("float")]):
                raise InputError(
                    f"batch: must have its numbers in tensors under `bf16-true`, but it has a NumPy array of "
                    f"{floats[0]}, which has no bf16 ({error}). Use torch.from_numpy before."
                ) from error
            raise

    def forward(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        outputs: dict[str, Tensor] = {}
        calls = itertools.count(1)

        def note(_module: nn.Module, _args: Any, output: Any) -> None:
            call = next(calls)
            for path, leaf in tree_leaves_with_path(output):
                if isinstance(leaf, Tensor) and leaf.is_floating_point():
                    outputs[f"output{keystr(path)}{f' of call {call}' * (call > 1)}"] = leaf

        hooked = not isinstance(model, torch.jit.ScriptModule)
        with model.register_forward_hook(note) if hooked else nullcontext():
            loss = loss_of(model).squeeze()
        # A model called in parts, or without tensors in its output, has only its loss.
        return loss, outputs or {"loss": loss}

    def observed(model: nn.Module) -> Tensor | None:
        if not (model.training or evaluates):
            return None
        with torch.enable_grad():  # a loss may have gradients inside, such as a penalty
            return loss_of(model)

    return Work(forward, observed, may_lower_rotary=True, owners=(loss_of_batch, batch))


def fitting_batch(model: nn.Module, batch: Any) -> Any:
    """Return the batch with bf16 in place of other floating-point tensors if the model has bf16 weights."""
    return map_leaves(_as_bf16, batch) if has_bf16_weights(model) else batch


def _as_bf16(leaf: Any) -> Any:
    return leaf.bfloat16() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
