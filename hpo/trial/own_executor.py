"""Runs the trials of a study whose own code trains them (`@hpo.trial`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpo.code import errors_of_code
from hpo.config.resolved_study import ResolvedStudy
from hpo.config.search_space import lowest
from hpo.config.study_config import StudyConfig
from hpo.device import EnergyCounter
from hpo.errors import InputError, TrialEnd
from hpo.extensions import CALLBACKS, TRIAL, TRIALS
from hpo.lost_device import lost_device_raised
from hpo.memory import is_out_of_memory
from hpo.precision.table import PRECISION
from hpo.training.distributed import world_size
from hpo.trial.callbacks import Callbacks
from hpo.trial.executor import NO_CALLBACKS, Executor
from hpo.trial.own_loop import Run
from hpo.trial.own_parts import build_own_parts
from hpo.trial.own_trial import Checked, OwnTrial
from hpo.trial.telemetry import TrialRecorder


def build_executor(resolved: ResolvedStudy, runs_dir: Path) -> Executor:
    """Return the executor for a study with or without a training loop of its own."""
    return (OwnLoopExecutor if resolved.config.has_own_loop else Executor)(resolved, runs_dir)


class OwnLoopExecutor(Executor):
    """Runs trials of a study with its own training loop on one device."""

    def _load(self) -> None:
        if world_size() > 1:
            raise InputError(
                "a study with its own training loop (`@hpo.trial`) must run each trial in one process, but "
                f"torchrun started {world_size()}. Start `hpo run --workers {world_size()}` instead."
            )
        own = [name for name in CALLBACKS if CALLBACKS.hash_of(name) in self.study.code.values()]
        if own:
            raise InputError(
                f"the callback `{own[0]}` needs the training loop of hpo, but the study's code has its own "
                "(`@hpo.trial`). Call it there."
            )
        self._train = TRIALS[TRIAL].make

    @property
    def fingerprint(self) -> str:
        return ""

    def fit_pruner(self) -> tuple[StudyConfig, str]:
        is_given = "pruner.name" in self.study.given
        return self.study, "it is set in the study file" if is_given else "the study's own code trains"

    def _trial(
        self,
        params: Mapping[str, Any],
        recorder: TrialRecorder,
        callbacks: Callbacks,
        counter: EnergyCounter | None,
    ) -> OwnTrial:
        parts = build_own_parts(self.resolved, params, recorder.note)
        return OwnTrial(parts, lambda trial: self._train(Run(trial)), recorder, callbacks, counter)

    def _check_ranks(self, params: Mapping[str, Any]) -> None:
        """Do nothing: there is one process."""

    def check_study(self) -> None:
        """Run the training function in fp32, up to its first step, before the study is stored.

        Raises InputError, and DeviceLostError where this process has lost its GPU.
        """
        params = lowest(self.study.search_space) | {PRECISION: "fp32"}
        trial = self._trial(params, TrialRecorder(), NO_CALLBACKS, None)
        trial.checks_only = True
        with lost_device_raised(self.device):
            try:
                with errors_of_code():
                    trial.run(None, "")
            except Checked:
                return
            except TrialEnd as end:
                raise InputError(f"the training function cannot run in fp32: {end}") from end
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):  # another device may have more memory
                    raise
