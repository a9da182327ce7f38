"""A trial of a study whose own code trains (`@hpo.trial`).

`OwnTrial` is a `BaseRun`: evaluations, limits, the best weights, checkpoints and the end of a trial are the
same code. The function of the study replaces the training. It sees a `hpo.trial.own_loop.Run`.

`Run.steps` counts rounds, such as epochs. Checkpoints for a resume are written between rounds, when the
study's function is not in the middle of a step. They hold the states of all random number generators, so a
resumed trial draws the same numbers.
"""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpo.device import EnergyCounter, Utilization, synchronize
from hpo.errors import HpoError, InputError, Nonfinite, Paused, Preempted
from hpo.precision.effective import compiled_modules
from hpo.precision.observation import COMPILED, Agreement, Observation
from hpo.precision.observed_loop import ObservedLoop
from hpo.random_numbers import all_states, seed_all, set_all_states
from hpo.training.checkpoint import Checkpoint, CheckpointMirror
from hpo.training.evaluate import Evaluation
from hpo.training.float32_optimizer import state_facts
from hpo.training.throughput import TrainingClock
from hpo.trial.base_run import CHECKPOINT_FORMAT, BaseRun
from hpo.trial.first_nonfinite import is_finite
from hpo.trial.objectives import task_and_name
from hpo.trial.own_parts import OwnParts
from hpo.trial.telemetry import Callbacks, TrialRecorder, training_facts

_logger = logging.getLogger(__name__)


class Checked(HpoError):
    """The end of a check of the training function before the study is stored."""


class OwnTrial(BaseRun):
    """One running trial of a study's own training loop."""

    parts: OwnParts
    clock: TrainingClock

    def __init__(
        self,
        parts: OwnParts,
        train: Callable[[OwnTrial], object],
        recorder: TrialRecorder,
        callbacks: Callbacks,
        energy_counter: EnergyCounter | None = None,
    ) -> None:
        super().__init__(parts, recorder, callbacks, energy_counter)
        self.config = parts.config
        self.modules = parts.model
        self.kept: dict[str, Any] = {}
        """Kept objects by name, besides the modules."""
        self.checks_only = False
        """True for a check before the study is made: the function runs up to its first step."""
        self.round = 0
        self.num_rounds = 0
        """0: the function has not called `steps`."""
        self.prepared: nn.Module | None = None
        """The model of `Run.prepare`."""
        self.is_watched = False
        """True once `Run.observe` has seen a call in training."""
        self._train_function = train
        self._done = 0.0
        self._checkpoint: Checkpoint | None = None
        """The checkpoint of a resumed trial."""
        self._paused: Paused | None = None
        self._is_better = False
        self._reported_step = 0
        self._step_ended: float | None = None
        """The end of the last optimiser step; None: a report came after it."""
        self.collected = Observation()
        """The products of all models."""
        self._loops: list[ObservedLoop] = []
        self._has_foreign_steps = False
        """True if a step without `Amp.step` was counted since the last report."""
        self._steps_of_amp = set[bool]()
        """True for a step of `Amp.step`, False for another step; of all steps of the trial."""
        self._ended: HpoError | None = None
        self._is_set_up = False

    def run(
        self, folder: Path | None, resume_key: str, mirror: CheckpointMirror | None = None
    ) -> tuple[float, ...]:
        parts = self.parts
        code = "/".join(parts.study.code.values())
        precision, device = parts.resolution.effective, parts.device.type
        key = f"{resume_key}/{CHECKPOINT_FORMAT}/{precision}/{device}/own/{code}"
        with tempfile.TemporaryDirectory() as temporary, self.checkpoints(folder, key, mirror):
            self._folder = folder or Path(temporary)
            seed_all(self.config.seed)
            self._resume()
            self._follow_training()
            self._train()
            return self._finish()

    def _follow_training(self) -> None:
        self.clock = TrainingClock(self.state, self.meter, self.compile_clock)
        self.utilization = Utilization(self.parts.device, torch.get_num_threads())
        measured = (self.modules, self.mixed_precision, self.clock, self.utilization, self.evaluation_rates)
        self.recorder.follow(lambda: training_facts(*measured, 1))

    def _train(self) -> None:
        self.last_saved = time.monotonic()
        try:
            self._train_function(self)
        except Nonfinite as end:
            self.recorder.note(finite_in_fp32=end.finite_in_fp32)
            raise
        except Paused:
            self.store.share()
            raise
        finally:
            for loop in self._loops:
                loop.close()
        if self._ended is not None:
            raise self._ended
        if not self.state.num_evaluations:
            self.end_check()
        self._note_unverified()
        if unread := self.config.params.unread:
            self.recorder.note(unread_settings=unread)
            _logger.warning("The training function did not read `%s`.", "`, `".join(unread))

    # Methods for `Run`

    def files(self) -> Path:
        """Make and return the folder for the function's own files."""
        folder = self._folder / "files"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def keep(self, named: Mapping[str, Any]) -> None:
        """Put objects into the checkpoints. A resumed trial gives them the state of its checkpoint.

        Raises InputError for an object that has no state.
        """
        if self.num_rounds:
            raise InputError("run.keep: must be called before `run.steps`.")
        for name, one in named.items():
            if name in self.kept or hasattr(self.modules, name):
                raise InputError(f"run.keep: `{name}` is used already. Give each object its own name.")
            if isinstance(one, nn.Module):
                self.modules[name] = one
            else:
                _state_of(one, name)
                self.kept[name] = one
            if self._checkpoint is not None:
                _restore(name, one, self._checkpoint)

    @property
    def keeps(self) -> bool:
        """True if the function keeps anything to resume from."""
        return bool(self.kept or len(self.modules))

    def rounds(self, number: int) -> Iterator[int]:
        """Yield the remaining rounds, with a checkpoint and a chance to stop between them."""
        if type(number) is not int or number < 1:
            raise InputError(f"run.steps: must be a whole number of at least 1, but got {number!r}.")
        if self.num_rounds:
            raise InputError("run.steps: must be called once. Count all rounds of the trial in it.")
        self.end_check()
        self.num_rounds = number
        if not self.keeps:
            self.round = 0  # there is nothing to resume from
        self.end_setup()
        if self._checkpoint is not None and self.keeps:
            set_all_states(self._checkpoint.state["random_states"])
        while self.round < number:
            self.mixed_precision.start_epoch()
            self.clock.start()
            yield self.round
            with self.ending():
                self._end_round()

    def _end_round(self) -> None:
        self.round += 1
        self.state.epoch = self.round
        self._done = self.round / self.num_rounds
        paused, self._paused = self._paused, None
        if self.round < self.num_rounds and (paused or self._is_checkpoint_due() or self._is_better):
            self._save()
            self._is_better = False
        if paused:
            raise paused
        if self.round < self.num_rounds:
            self.heartbeat()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Keep an end of the trial in this block, so that the function cannot swallow it."""
        if self._ended is not None:
            raise self._ended
        try:
            yield
        except HpoError as end:
            self._ended = end
            raise

    def end_check(self) -> None:
        """End a check of the study before its first trial: the function is about to train."""
        if self.checks_only:
            raise Checked

    def end_setup(self) -> None:
        """Count time and memory from here on as training."""
        if not self._is_set_up:
            self._is_set_up = True
            if self.seen and self.prepared is not None and compiled_modules(self.prepared):
                self.seen.compiled = Agreement(None, COMPILED)
                self._note_precision()
            self.recorder.note(setup_seconds=time.perf_counter() - self.recorder.started)
            self._forget_setup_memory()
            self.clock.start()

    def follow(self, model: nn.Module, on_seen: Callable[[Agreement, bool], object]) -> ObservedLoop:
        """Observe steps and evaluations of a model. `on_seen` gets the agreement, and if it was a step."""
        seen = self.collected
        loop = ObservedLoop(model, seen, lambda is_step: on_seen(self.observed(model, seen), is_step))
        self._loops.append(loop)
        return loop

    def _note_unverified(self) -> None:
        """Record if nothing shows the precision of the training."""
        if self.seen is None:
            reason = "nothing was observed: call `run.prepare`, or `run.observe` with the model that trains."
        elif self._steps_of_amp != {True} and not self.is_watched:
            reason = "no training was observed: make each step with `amp.step`, or call `run.observe`."
        else:
            return
        self.unverified = reason
        self._note_precision()
        _logger.warning("Precision unverified: %s", reason)

    def _check_calls(self) -> None:
        """Record if steps of another library were made without a call of an observed model."""
        is_called = False
        for loop in self._loops:
            loop.end_step()
            is_called |= loop.called_in_training
            loop.called_in_training = False
        if self.is_watched and self._has_foreign_steps and not is_called:
            self.unverified = self.unverified or (
                f"the model was not called in training between two reports, up to step {self.state.step}: "
                "its products were not seen."
            )
        self._has_foreign_steps = False

    def heartbeat(self) -> None:
        """Report the progress. Raises Preempted if the trial is to stop."""
        self.end_check()
        self.end_setup()
        self._after_step()

    def _stop_if_asked(self) -> None:
        if self.callbacks.should_stop():
            saved = "its last checkpoint" if self.keeps else "its start"
            raise Preempted(f"told to stop after step {self.state.step}; the trial goes on from {saved}.")

    def may_be_nonfinite(self) -> bool:
        """Return whether a loss since the last report or a weight is not finite, or no weight is known."""
        modules = [*self.modules.values(), *([] if self.prepared is None else [self.prepared])]
        weights = [one for module in modules for one in module.parameters() if one.is_floating_point()]
        loss = self.state.loss_sum if self.state.num_losses else 0.0
        return not (weights and math.isfinite(loss) and all(map(is_finite, weights)))

    def count_step(self, loss: Tensor | None, num_examples: float) -> None:
        """Count an optimiser step; without a loss it was made by another library. NaN: unknown examples."""
        self._steps_of_amp.add(loss is not None)
        self._has_foreign_steps |= loss is None
        if loss is not None:
            self.state.count_step(loss, num_examples, 0)
        else:
            self.state.step += 1
            self.state.num_examples += num_examples
        self.meter.step(num_examples, 0, 0, 0)
        self.state.step_seconds = self.clock.lap()
        self._step_ended = self.clock.now()

    def report(self, metrics: Mapping[str, float], done: float | None) -> None:
        """Store an evaluation. Raises Pruned, or Paused outside a round."""
        self.end_check()
        self.end_setup()
        self._check_calls()
        in_round = self.num_rounds > self.round
        if done is None:
            done = (self.round + 1) / self.num_rounds if in_round else 1.0
        self.mixed_precision.check()
        synchronize(self.parts.device)
        self.meter.stop()
        state = self.state
        if self._step_ended is not None:
            state.evaluation_seconds += self.clock.now() - self._step_ended
            self._step_ended = None
        state.step = max(state.step, self._reported_step + 1)
        state.num_evaluations += 1
        self._reported_step = state.step
        self._done = done
        paused = None
        try:
            self._on_evaluation(self._evaluation(metrics, done))
        except Paused as end:
            paused = end
        if in_round:
            self._paused = paused or self._paused
        elif done < 1:
            self._save()
            if paused:
                raise paused
        self.clock.start()

    def _evaluation(self, metrics: Mapping[str, float], done: float) -> Evaluation:
        state, nested = self.state, dict[str, dict[str, float]]()
        for metric, value in metrics.items():
            task, name = task_and_name(metric)
            nested.setdefault(task, {})[name] = value
        return Evaluation(
            step=state.step,
            epoch=min(self.round + 1, self.num_rounds) if self.num_rounds else done,
            budget_used=done,
            seconds=state.train_seconds,
            metrics=nested,
            decisions={},
            examples_per_second=None,
            train_loss=state.take_mean_loss() if state.num_losses else math.nan,
            index=state.num_evaluations,
            rates=self.meter.summary(),
        )

    # Methods of `BaseRun`

    def _load(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, state = checkpoint, checkpoint.state
        self.round, self._reported_step = state["round"], state["progress"]["step"]
        self.is_watched = state.get("is_watched", False)  # not in earlier versions
        self._steps_of_amp.update(state.get("steps_of_amp", ()))

    def _weights(self) -> dict[str, Tensor]:
        return dict(self.modules.state_dict())

    def _training_state(self) -> dict[str, Any]:
        kept = {name: _state_of(one) for name, one in self.kept.items()}
        facts = {"is_watched": self.is_watched, "steps_of_amp": sorted(self._steps_of_amp)}
        return {"kept": kept, "round": self.round, "random_states": all_states(), **facts}

    def _save(self, best: Mapping[str, Any] | None = None, *, at_end: bool = False) -> None:
        """Write a checkpoint: inside a round the best weights alone, between rounds also the state."""
        del at_end
        if self.keeps:
            self._is_better = self._is_better or best is not None
            super()._save(best, at_end=best is not None)

    def _keep_best(self, best: Evaluation) -> bool:
        return not self.keeps or super()._keep_best(best)

    def _optimizer_facts(self) -> dict[str, Any]:
        optimizers = [one for one in self.kept.values() if isinstance(one, torch.optim.Optimizer)]
        return state_facts([state for one in optimizers for state in one.state.values()])

    def _budget_used(self) -> float:
        return self._done


def _state_of(one: Any, name: str = "") -> Any:
    """Return the state of an object for a checkpoint. Raises InputError for an object without one."""
    if isinstance(one, torch.Generator):
        return one.get_state()
    if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
        raise InputError(
            f"run.keep: `{name}` must have `state_dict` and `load_state_dict`, or be a torch.Generator, but "
            f"it is a {type(one).__name__}."
        )
    return one.state_dict()


def _restore(name: str, one: Any, checkpoint: Checkpoint) -> None:
    if isinstance(one, nn.Module):
        named = ((key.partition("."), value) for key, value in checkpoint.weights.items())
        one.load_state_dict({inner: value for (owner, _, inner), value in named if owner == name})
    elif isinstance(one, torch.Generator):
        one.set_state(checkpoint.state["kept"][name])
    else:
        one.load_state_dict(checkpoint.state["kept"][name])
