"""Callbacks of a study's own code: they watch a trial and may end its training early.

A callback must not change the trial. Each call runs without gradients. The random generators and the mode of
the model are restored after it, and changed weights end the trial. The time of the calls counts as device
time of the study, but not as training: it is in no rate and in no budget of seconds.

The callbacks of a trial are made when it starts or resumes in a process. They keep no state over a restart.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hpo.code import errors_of_code
from hpo.config.trial_config import TrialConfig
from hpo.errors import Failed, InputError, TrialEnd, shorten
from hpo.extensions import CALLBACK_METHODS, CALLBACKS, options_of
from hpo.memory import is_out_of_memory
from hpo.outcome import Outcome
from hpo.random_numbers import same_random_numbers
from hpo.training.budget import TrainState

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CallbackState:
    """A trial as its callbacks see it."""

    config: TrialConfig
    """The settings of the trial."""
    model: nn.Module
    """The model in training, in the weights of its precision. At `on_end` these are the last weights."""
    step: int = 0
    """Training steps so far."""
    budget_used: float = 0.0
    """From 0 to 1."""
    train_loss: float | None = None
    """The mean since the last evaluation. On a GPU, as of the last step that waited for it."""
    examples_per_second: float | None = None
    """The rate of training; None before the warm-up is over."""
    metrics: Mapping[str, Mapping[str, float]] | None = None
    """{task: {metric: value}} of the last evaluation in this process; None before the first."""
    values: tuple[float, ...] | None = None
    """The objectives of the study at that evaluation."""
    outcome: str = ""
    """How the trial ended, for `on_end`: `complete`, `pruned`, `paused`, `preempted`, ..."""


def make_callbacks(config: TrialConfig, code: Mapping[str, str]) -> dict[str, Any]:
    """Return the callbacks of a study's `code` by their names, without those of other code in the process.

    Raises InputError if a callback has no method to call.
    """
    own = {name: made for name, made in CALLBACKS.items() if CALLBACKS.hash_of(name) in code.values()}
    made = {name: extension.make(options_of(name, config.option)) for name, extension in own.items()}
    for name, callback in made.items():
        given = {method: getattr(callback, method, None) for method in CALLBACK_METHODS}
        if not any(map(callable, given.values())):
            raise InputError(
                f"The callback `{name}` must have one of the methods {', '.join(CALLBACK_METHODS)}, but it "
                f"is {shorten(repr(callback), 60)}."
            )
    return made


def watcher_of_steps(callbacks: Mapping[str, Any]) -> str:
    """Return the name of a callback with `on_step`; empty: there is none."""
    return next((name for name, callback in callbacks.items() if hasattr(callback, "on_step")), "")


class UserCallbacks:
    """The callbacks of one trial in this process."""

    def __init__(
        self, config: TrialConfig, code: Mapping[str, str], model: nn.Module, progress: TrainState
    ) -> None:
        self.state = CallbackState(config, model)
        self._code = code
        self._progress = progress
        self._callbacks: dict[str, Any] = {}
        self.watch_steps = False
        """True if a callback is called after each step."""

    def make(self) -> None:
        """Make the callbacks. Of several ranks, only the first has them."""
        with _errors("", "its making"):
            self._callbacks = make_callbacks(self.state.config, self._code)
        self.watch_steps = bool(watcher_of_steps(self._callbacks))

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def call(self, method: str, **changes: Any) -> str:
        """Call the method of all callbacks with the state after `changes`.

        Returns the reason of the first callback to end the training; empty: none ends it. Raises Failed if a
        callback raises, returns neither None nor a text, or changes the weights.
        """
        self.state = replace(self.state, **changes)
        started, ending = time.perf_counter(), ""
        for name, callback in self._callbacks.items():
            if called := getattr(callback, method, None):
                reason = self._call(called, name, method)
                ending = ending or (reason and f"{reason} (callback {name})")
        self._progress.callback_seconds += time.perf_counter() - started
        return ending

    def _call(self, called: Callable[[CallbackState], Any], name: str, method: str) -> str:
        model, weights = self.state.model, _versions(self.state.model)
        modes = [(module, module.training) for module in model.modules()]
        with _errors(name, method), same_random_numbers(), torch.no_grad():
            reason = called(self.state)
        for module, is_training in modes:
            module.training = is_training
        if _versions(model) != weights:
            raise Failed(f"The callback `{name}` must not change the weights of the model, but {method} did.")
        if not (reason is None or isinstance(reason, str)):
            raise Failed(
                f"The callback `{name}` must return None, or a text to end the training, but {method} "
                f"returned {shorten(repr(reason), 60)}."
            )
        return shorten(reason or "", 200)

    @contextmanager
    def told_of_error(self) -> Iterator[None]:
        """Call `on_end` if the block raises. The trial has its outcome then, so a fault is only logged."""
        try:
            yield
        except Exception as error:
            is_oom = is_out_of_memory(error)
            outcome = error.outcome if isinstance(error, TrialEnd) else Outcome.OOM if is_oom else "failed"
            try:
                self.call("on_end", outcome=str(outcome))
            except Failed as fault:
                _logger.warning("%s The trial had already ended as %s.", fault, outcome)
            raise


@contextmanager
def _errors(name: str, method: str) -> Iterator[None]:
    """Raise Failed for an error of a callback, with its line. Out-of-memory errors pass through."""
    of = f"The callback `{name}`" if name else "A callback"
    try:
        with errors_of_code():
            yield
    except InputError as error:
        raise Failed(f"{of} failed in {method}: {error}") from error
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise Failed(f"{of} failed in {method}: {type(error).__name__}: {error}") from error


def _versions(model: nn.Module) -> list[tuple[int, int]]:
    """Return the address of each weight and buffer, and the number of its changes in place."""
    return [(one.data_ptr(), one._version) for one in (*model.parameters(), *model.buffers())]
