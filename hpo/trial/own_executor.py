"""The executor of a study whose own code trains (`@hpo.trial`), and the settings of its trials."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpo.code import errors_of_code
from hpo.config.resolved_study import ResolvedStudy
from hpo.config.search_space import decode, lowest
from hpo.config.study_config import StudyConfig
from hpo.config.trial_settings import OWN_LOOP_SETTINGS, TrialSettings
from hpo.device import EnergyCounter
from hpo.errors import InputError, TrialEnd
from hpo.extensions import CALLBACKS, TRIAL, TRIALS
from hpo.lost_device import lost_device_raised
from hpo.memory import is_out_of_memory
from hpo.precision.environment import environment_overrides
from hpo.precision.table import PRECISION, resolve, support
from hpo.training.distributed import world_size
from hpo.trial.executor import NO_CALLBACKS, Executor
from hpo.trial.own_loop import Run
from hpo.trial.own_trial import Checked, OwnConfig, OwnParts, OwnTrial, Params
from hpo.trial.telemetry import Callbacks, TrialRecorder


def build_executor(resolved: ResolvedStudy, runs_dir: Path, *, checks_values: bool = True) -> Executor:
    """Return the executor for a study with or without a training loop of its own."""
    executor = OwnLoopExecutor if resolved.config.has_own_loop else Executor
    return executor(resolved, runs_dir, checks_values=checks_values)


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
        """Do nothing: there is only one process."""

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


def build_own_parts(
    resolved: ResolvedStudy, params: Mapping[str, Any], note: Callable[..., None] = lambda **_: None
) -> OwnParts:
    """Resolve the settings and the precision of a trial, and record the precision with `note`.

    Raises TrialEnd if the precision cannot run here.
    """
    study, device = resolved.config, resolved.device
    fixed = study.training.model_dump(exclude_unset=True)
    own = fixed.pop("option", {})
    values = {**fixed, **own, **decode(study.search_space, params)}
    known = TrialSettings.model_validate({key: values[key] for key in OWN_LOOP_SETTINGS if key in values})
    requested = known.fp_precision or resolved.preset_precision
    amp = resolved.amp
    if known.init_scale is not None:
        amp = amp.model_copy(update={"init_scale": known.init_scale})
    note(precision={"requested": requested, "effective": None, "support": support(requested, device).level})
    resolution = resolve(requested, device, amp)
    note(precision=asdict(resolution), environment=environment_overrides())
    services = known.model_dump(include={*OWN_LOOP_SETTINGS}) | {PRECISION: requested}
    config = OwnConfig(Params({**values, **services}), known.seed, known.max_grad_norm, amp)
    return OwnParts(study, device, config, resolution)
