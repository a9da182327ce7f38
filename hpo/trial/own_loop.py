"""The interface of a study's own training loop: `run`, and the mixed precision that `run.prepare` returns.

    @hpo.trial
    def train(run):
        model = Net(run.params["width"]).to(run.device)
        amp = run.prepare(model, loss_of_batch, batch)
        optimizer = torch.optim.AdamW(model.parameters(), lr=run.params["learning_rate"])
        run.keep(model=model, optimizer=optimizer)
        for epoch in run.steps(10):
            for batch in loader:
                amp.step(loss_of_batch, batch, optimizer)
            run.report({"accuracy": accuracy(model)})

A step is made as in `hpo.training.loop`. The rest of the trial is in `hpo.trial.own_trial` and
`hpo.trial.base_run`.
"""

import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpo.config.limits import MEASURED_METRICS
from hpo.errors import CodeError, Incompatible, InputError, Invalid, Nonfinite
from hpo.precision.amp import MixedPrecision, prepare_model
from hpo.precision.effective import observe_model
from hpo.precision.observation import Agreement
from hpo.precision.table import Precision
from hpo.random_numbers import held_generators, same_random_numbers
from hpo.training.loop import CHECK_EVERY, apply_gradients, backward, repeated_in_fp32
from hpo.training.optim import gradient_norm, needs_closure
from hpo.trial.check_precision import LossOfBatch, device_of, fitting_batch, work_of_loss
from hpo.trial.compat import Compatibility, judge
from hpo.trial.measure import Measurement, Work, measure_work
from hpo.trial.own_batch import examples_of
from hpo.trial.own_parts import Params
from hpo.trial.own_trial import OwnTrial


class Amp:
    """Mixed precision of one model: autocast, loss scaling, clipping and finiteness."""

    def __init__(self, trial: OwnTrial, model: nn.Module) -> None:
        self._trial = trial
        self._model = model
        self._mixed_precision = trial.mixed_precision
        self._mixed_precision.follow(model)
        self._loop = trial.follow(model, lambda *_: None)

    def step(
        self,
        loss_of_batch: LossOfBatch,
        batch: Any,
        optimizer: Optimizer | Sequence[Optimizer],
        num_examples: int | None = None,
    ) -> Tensor:
        """Make one optimiser step on a batch, and return its loss, detached.

        Forward and loss run under autocast. The gradients of the optimizer's parameters are unscaled and
        clipped to `max_grad_norm`. A step with non-finite gradients is skipped. If loss or gradients stay
        non-finite, the trial ends as `nonfinite`. Two losses, as of a GAN, are two calls.

        Args:
            loss_of_batch: the loss, a scalar tensor, of `(model, batch)`.
            optimizer: one, or several that step together: their gradients have one norm, and all skip a step
                that one must skip. One that needs a closure (L-BFGS) is alone, and has no fp16.
            num_examples: the examples of the batch; None: the one length of all its tensors. If they have
                several, the number of the trial's examples is unknown.
        """
        with self._trial.ending():
            rows = examples_of(batch) if num_examples is None else num_examples
            several: Any = [*optimizer] if isinstance(optimizer, list | tuple) else [optimizer]
            return self._step(loss_of_batch, batch, several, rows)

    def _step(
        self, loss_of_batch: LossOfBatch, batch: Any, optimizers: list[Optimizer], num_examples: float
    ) -> Tensor:
        trial, model, amp = self._trial, self._model, self._mixed_precision
        max_norm, parameters = trial.config.max_grad_norm or 0.0, _parameters(optimizers)
        has_closure = any(map(needs_closure, optimizers))
        if len({*parameters}) < len(parameters) or (has_closure and len(optimizers) > 1):
            raise CodeError(
                "amp.step: several optimisers must share no parameter, and need no closure, as L-BFGS does. "
                "Give each a call of its own."
            )
        if has_closure and amp.scaler.is_enabled():
            raise Incompatible("PyTorch's loss scaling has no steps with a closure. Use bf16, fp32 or AdamW.")
        trial.end_setup()
        amp.start_step()
        in_fp32 = partial(self._in_fp32, loss_of_batch, batch)

        def forward_backward() -> Tensor:
            self._clear_gradients(optimizers)
            return backward(
                amp,
                lambda: loss_of_batch(model, fitting_batch(model, batch)).squeeze(),
                lambda: in_fp32(amp.scaler.scale),
            )

        self._loop.begin_step(("step", *map(id, optimizers)))
        loss = forward_backward()
        self._loop.end_step()
        with_gradient = [any(one.grad is not None for one in _parameters([each])) for each in optimizers]
        if not (with_gradient and all(with_gradient)):
            raise CodeError("amp.step: no parameter of the optimizer has a gradient by the loss.")
        passed = [loss]

        def closure() -> Tensor:
            if passed:  # its gradients are there
                return passed.pop()
            again = forward_backward()
            if max_norm:
                nn.utils.clip_grad_norm_(parameters, max_norm)
            return again

        apply_gradients(parameters, optimizers, loss, amp, max_norm, closure if has_closure else None)
        amp.end_step(amp.step_fallbacks if amp.config.fallback_to_fp32 else 0)
        trial.count_step(loss, num_examples)
        if trial.state.step % CHECK_EVERY[amp.device.type] == 0:
            with repeated_in_fp32(amp, partial(self._is_finite_in_fp32, in_fp32, optimizers)):
                amp.check()
        trial.heartbeat()
        return loss

    def evaluation(self) -> AbstractContextManager[None]:
        """Return a context for evaluation: autocast without gradients."""
        return self._mixed_precision.evaluation()

    def inputs(self, batch: Any) -> Any:
        """Return the batch in the format of the weights: with bf16 tensors under `bf16-true`."""
        return fitting_batch(self._model, batch)

    def _in_fp32(self, loss_of_batch: LossOfBatch, batch: Any, scale: Callable[[Tensor], Tensor]) -> Tensor:
        """Run a batch forward and backward in fp32; return its loss, detached."""
        in_fp32 = self._mixed_precision.float32(_LossModule(self._model, loss_of_batch))
        with self._loop.paused(), in_fp32 as loss_of:
            loss: Tensor = loss_of(batch).squeeze()
            scale(loss).backward()
        return loss.detach()

    def _clear_gradients(self, optimizers: list[Optimizer]) -> None:
        """Clear those of the model, also beside the optimizers, and of parameters beside the model."""
        self._model.zero_grad(set_to_none=True)
        for each in optimizers:
            each.zero_grad(set_to_none=True)

    def _is_finite_in_fp32(self, in_fp32: Callable[..., Tensor], optimizers: list[Optimizer]) -> bool | None:
        """Repeat the last step in fp32. None: another step broke, or the weights have changed since."""
        if not bool(self._mixed_precision.last_skipped):
            return None
        self._clear_gradients(optimizers)
        loss = in_fp32(lambda loss: loss)
        gradients = [one.grad for one in _parameters(optimizers) if one.grad is not None]
        norm = gradient_norm(gradients, self._mixed_precision.device.type)
        return bool(torch.isfinite(loss + norm))


class _LossModule(nn.Module):
    """A model and its loss as one module, so that its weights can be replaced for a call."""

    def __init__(self, model: nn.Module, loss_of_batch: LossOfBatch) -> None:
        super().__init__()
        self.model = model
        self.loss_of_batch = loss_of_batch

    def forward(self, batch: Any) -> Tensor:
        return self.loss_of_batch(self.model, batch)


def _parameters(optimizers: list[Optimizer]) -> list[Tensor]:
    return [one for each in optimizers for group in each.param_groups for one in group["params"]]


class Run:
    """One trial, for the function that trains it.

    Attributes:
        params: the settings of the trial by name, fixed and searched ones.
        device: the device to train on.
        precision: the trial's precision: `run.precision.name`, and its formats.
    """

    def __init__(self, trial: OwnTrial) -> None:
        self._trial = trial
        self.params: Params = trial.config.params
        self.device = torch.device(trial.parts.device.torch_device)
        self.precision: Precision = trial.parts.resolution.precision

    @property
    def folder(self) -> Path:
        """A folder for files of the function. It stays as long as the trial's checkpoints."""
        return self._trial.files()

    @property
    def step(self) -> int:
        """Optimiser steps so far, those before a resume included."""
        return self._trial.state.step

    def prepare(self, model: nn.Module, loss_of_batch: LossOfBatch, batch: Any) -> Amp:
        """Check the trial's precision with this model and batch, give the model its weights, and observe it.

        The check is `hpo.check_precision` with the bounds of `compat`. It leaves the model unchanged. The
        trial ends here if its precision does not work. Put several modules into one.

        Args:
            model: on `run.device`, with weights in fp32.
            loss_of_batch: the loss, a scalar tensor, of `(model, batch)`. The model may be a copy.
            batch: a batch on `run.device`, in any container. Floating-point tensors are bf16 under
                `bf16-true`.
        """
        with self._trial.ending():
            return self._prepare(model, loss_of_batch, batch)

    def _prepare(self, model: nn.Module, loss_of_batch: LossOfBatch, batch: Any) -> Amp:
        trial, amp = self._trial, self._trial.mixed_precision
        if trial.prepared is not None:
            raise InputError("run.prepare: must be called once. Put several modules into one.")
        device = device_of(model)
        if device.type != amp.device.type:
            raise InputError(
                f"run.prepare: the model must be on run.device ({self.device}), but it is on {device.type}. "
                "Call model.to(run.device)."
            )
        work = work_of_loss(model, loss_of_batch, batch)
        check = self._check(model, work)
        trial.judge(check)
        skipped = check.verdict == "skipped"
        prepare_model(model, amp.precision if skipped else check.measurement.fitting(amp.precision))
        trial.prepared = model
        with same_random_numbers(*held_generators(model, loss_of_batch, batch)):
            seen = observe_model(model, amp, work.observed, trial.collected)
        trial.observed(model, seen)
        return Amp(trial, model)

    def _check(self, model: nn.Module, work: Work) -> Compatibility:
        amp, bounds = self._trial.mixed_precision, self._trial.parts.study.compat
        if not bounds.enabled:
            return Compatibility("skipped", (), Measurement(amp.precision.name))
        # The check searches the scale of fp16, so it has an object of its own.
        trying = MixedPrecision(amp.precision, amp.config, amp.device)
        return judge(measure_work(model, trying, work), bounds)

    def observe(self, model: nn.Module) -> None:
        """Observe in which precision another library's loop computes, for a loop without `amp.step`.

        The first step and the first evaluation are observed as they are made, and again under another
        autocast. A step begins with a call of the model and ends with the step of one of PyTorch's optimisers
        or with `run.count_step`. The trial ends as `invalid` if the products are not those of the precision.
        """
        self._trial.end_check()
        self._trial.follow(model, self._check_agreement)

    def _check_agreement(self, agreement: Agreement, is_step: bool) -> None:
        self._trial.is_watched |= is_step
        if agreement.agrees is False:
            mode = "training" if is_step else "evaluation"
            with self._trial.ending():
                raise Invalid(
                    f"the loop must compute in the trial's `fp_precision`, {self.precision.name}, but in "
                    f"{mode} {agreement.reason} Give the loop that precision: `run.precision` has it."
                )

    def keep(self, **named: Any) -> None:
        """Put modules, optimisers, schedulers and generators into the checkpoints of the trial.

        In a resumed trial they get the state of its last checkpoint at once. A kept object needs `state_dict`
        and `load_state_dict`, or is a torch.Generator.
        """
        self._trial.keep(named)

    def steps(self, number: int) -> Iterator[int]:
        """Yield the rounds of the training, such as epochs, from 0 or from the checkpoint.

        Between two rounds the trial may be checkpointed, pause or stop.
        """
        prepared, modules = self._trial.prepared, self._trial.modules
        is_kept = any(prepared is one for kept in modules.values() for one in kept.modules())
        if self._trial.keeps and prepared is not None and not is_kept:
            raise InputError(
                "run.keep: must hold the model of `run.prepare`, so that a resumed trial has its weights."
            )
        return self._trial.rounds(number)

    def report(self, metrics: Mapping[str, float], done: float | None = None) -> None:
        """Store an evaluation of the trial: a number for each metric, by the names of objectives and limits.

        The trial may end here: the pruner stops it, it breaks a limit, or a metric is not finite. If weights
        and losses are finite, the metric is at fault (`invalid`), or else the training (`nonfinite`). A
        metric with `/` in its name belongs to a task. A loop without `run.steps` gives `done`, and pauses
        here.

        Args:
            done: the finished share of the training, above 0 and at most 1; None: the share of `run.steps`,
                or 1 without it.
        """
        with self._trial.ending():
            if done is not None and not 0 < done <= 1:
                raise InputError(f"run.report: `done` must be above 0 and at most 1, but got {done!r}.")
            checked = _checked(metrics)
            if broken := [name for name, value in checked.items() if not math.isfinite(value)]:
                end = Nonfinite if self._trial.may_be_nonfinite() else Invalid
                at_fault = "" if end is Nonfinite else "Weights and losses are finite. "
                raise end(
                    f"a reported metric must be finite, but {broken[0]} is {checked[broken[0]]}. {at_fault}"
                    "Leave a metric out where it is not defined."
                )
            self._trial.report(checked, done)

    def count_step(self, num_examples: int) -> None:
        """Count an optimiser step of a loop without `amp.step`. The trial may stop here."""
        with self._trial.ending():
            self._trial.end_setup()
            self._trial.count_step(None, num_examples)
            self._trial.heartbeat()


def _checked(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics as floats. Raises InputError."""
    if not isinstance(metrics, Mapping) or not metrics:
        raise InputError(f"run.report: must be given a mapping of names to numbers, but got {metrics!r}.")
    checked: dict[str, float] = {}
    groups = {name.partition("/")[0] for name in metrics if isinstance(name, str) and "/" in name}
    for name, value in metrics.items():
        number = value.item() if hasattr(value, "item") and getattr(value, "size", 1) != () else value
        if not isinstance(name, str) or name in MEASURED_METRICS or name in (*groups, "reported"):
            raise InputError(
                f"run.report: a metric must have a name of its own, but got {name!r}. It must be no measured "
                "metric, not `reported`, and not the part before `/` of another one."
            )
        if isinstance(number, bool) or not isinstance(number, numbers.Real):
            raise InputError(f"run.report: `{name}` must be a number, but got {value!r}.")
        checked[name] = float(number)
    return checked
