"""Runs the trials of one study on one device.

    resolve precision -> tokens -> model -> compatibility check -> train / evaluate -> TrialResult

Every end of a trial becomes a `TrialResult`. An error that concerns more than the trial is raised: bad data,
a full disk, a lost lease, a lost GPU.
"""

import gc
import itertools
import logging
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from hpo.code import code_in_use, errors_of_code, name_code, use_code
from hpo.config.limits import ENERGY, broken_limits, check_energy, violations
from hpo.config.resolved_study import ResolvedStudy, resolve_study
from hpo.config.search_space import SearchSpace, decode, lowest
from hpo.config.study_config import StudyConfig
from hpo.config.trial_settings import (
    AUTO,
    MODEL_SETTINGS,
    OWN_LOOP_SETTINGS,
    TrialSettings,
)
from hpo.data.dataset import DataSet
from hpo.device import DeviceInfo, EnergyCounter, limit_threads, probe_device
from hpo.device_time import busy_text
from hpo.errors import BrokenEncoderError, CodeError, InputError, ModelError, RunError, TrialEnd
from hpo.extensions import CALLBACKS, TRIAL, TRIALS, is_own, metrics_of
from hpo.lost_device import lost_device_raised, raise_if_lost
from hpo.memory import disable_malloc_trim, is_out_of_memory, reset_peak_memory
from hpo.models.encoder import is_causal
from hpo.models.model_parts import set_float32_parts
from hpo.models.multitask import MultitaskModel
from hpo.outcome import Outcome, Progress, TrialResult
from hpo.precision.amp import MixedPrecision
from hpo.precision.environment import environment_overrides, refuse_overrides
from hpo.precision.table import BASE_PRECISION, PRECISION, AmpConfig, resolve, support
from hpo.tasks.kind import Task, kind_of
from hpo.training.checkpoint import CheckpointMirror
from hpo.training.compilation import drop_compiled
from hpo.training.distributed import announce, check_same, is_distributed, next_task, rank, world_size
from hpo.training.metrics import score
from hpo.training.optim import own_schedule
from hpo.trial.base_run import RATED_STEPS, BaseRun
from hpo.trial.compat import CompatibilityCache
from hpo.trial.measure import Side, work_of
from hpo.trial.objectives import check_metric_values, check_names, limited_values
from hpo.trial.own_loop import Run
from hpo.trial.own_parts import OwnConfig, OwnParts, Params
from hpo.trial.own_trial import Checked, OwnTrial
from hpo.trial.parts import TrialLoader, build_trial
from hpo.trial.run import TrialRun
from hpo.trial.telemetry import Callbacks, TrialRecorder, device_facts
from hpo.trial.user_callbacks import make_callbacks, watcher_of_steps

_logger = logging.getLogger(__name__)

NO_CALLBACKS = Callbacks()
FAULTS_OF_MODELS = (RuntimeError, MemoryError, LookupError, ValueError, TypeError, AttributeError)
"""Exceptions of other libraries' models that do not fit the settings."""
CAUSAL = "In this %s a token sees only the text before it, but %s may need the text after it.%s"


class Executor:
    """Runs trials of one study on one device; `loader` keeps data and tokens from trial to trial.

    Raises DataError if the study's data cannot be used, InputError if no task has a metric of its objective,
    or if the environment makes a precision of the device untrue.

    Args:
        checks_values: score right predictions on validation (`check_metric_values`). False: the study was
            checked before.
    """

    def __init__(
        self,
        resolved: ResolvedStudy,
        runs_dir: Path,
        compatibility_cache: CompatibilityCache | None = None,
        *,
        checks_values: bool = True,
    ) -> None:
        self.resolved = resolved
        self._checks_values = checks_values
        device = resolved.device
        self.runs_dir = runs_dir
        refuse_overrides(device.type)
        self.tasks: tuple[Task, ...] = ()
        self._load()
        self.cache = compatibility_cache
        self._num_started = 0
        self._compiles = False
        raise_if_lost(device)  # before a trial is claimed
        if device.type == "cpu":
            disable_malloc_trim()
            limit_threads(device)
        if device.type == "cuda":  # 1.0: this process may have run a study with less
            torch.cuda.set_per_process_memory_fraction(self.amp.memory_fraction or 1.0, device.index)
        # Compiled kernels are kept between trials and runs, unless the user has a folder for them already.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str((runs_dir / "cache" / "inductor").resolve()))

    def _load(self) -> None:
        """Load the data, and check the study against them."""
        study = self.study
        self.loader = TrialLoader(self.resolved, self.runs_dir)
        self.dataset, self.tasks = self.loader.dataset, self.loader.tasks
        check_names(study, self.tasks, self.dataset.splits)
        if self._checks_values:
            check_metric_values(study, self.dataset)

    @property
    def fingerprint(self) -> str:
        """Hash of the data; empty for a study whose own code loads them."""
        return self.dataset.fingerprint

    @property
    def study(self) -> StudyConfig:
        return self.resolved.config

    @property
    def device(self) -> DeviceInfo:
        return self.resolved.device

    @property
    def amp(self) -> AmpConfig:
        return self.resolved.amp

    def trial_folder(self, study_token: str, number: int) -> Path:
        """Return the folder of a trial's checkpoints."""
        folder = self.study.checkpoint.folder_of(self.study.name, study_token, self.runs_dir)
        return folder / f"trial-{number:05d}"

    def run(
        self,
        params: Mapping[str, Any],
        folder: Path | None,
        resume_key: str,
        callbacks: Callbacks = NO_CALLBACKS,
        *,
        shared_device: bool = False,
        mirror: CheckpointMirror | None = None,
    ) -> TrialResult:
        """Run one trial with `params` to its outcome.

        `folder` holds its checkpoints (None: it keeps none). Checkpoints of another `resume_key` stay there
        unused. `mirror` shares them with other workers. `shared_device` is recorded: others use it too.

        Raises InputError and RunError if the cause concerns more than this trial, such as a lost GPU.
        """
        recorder = TrialRecorder()

        def train() -> tuple[float, ...]:
            return self._trial(params, recorder, callbacks, counter).run(folder, resume_key, mirror)

        with lost_device_raised(self.device):  # also while the facts of the ended trial are read
            self._check_ranks(params)
            self._collect_garbage()
            counter = EnergyCounter(self.device, shared=shared_device, num_ranks=world_size())
            check_energy(self.study.named_metrics, counter)
            recorder.follow(lambda: {"energy_missing": counter.missing})
            recorder.note(device=device_facts(self.device, shared_device, self.amp.memory_fraction))
            reset_peak_memory(self.device)
            callbacks.on_progress(Progress(part="check"))
            try:
                return self._with_record(self._end_of(train), recorder)
            finally:
                if self._compiles:
                    drop_compiled(self.device)

    def _trial(
        self, params: Mapping[str, Any], recorder: TrialRecorder, callbacks: Callbacks, counter: EnergyCounter
    ) -> BaseRun:
        """Build a trial. Raises TrialEnd if it cannot run here."""
        parts = build_trial(self.resolved, params, self.loader, recorder.note)
        self._compiles = parts.compile is not None
        return TrialRun(parts, recorder, callbacks, self.cache, counter)

    def _check_ranks(self, params: Mapping[str, Any]) -> None:
        """Announce the trial to the other ranks, and check that all have the same data and device."""
        study, device = self.study, self.device
        announce((study.definition(), [each.location for each in code_in_use(study.code)], dict(params)))
        check_same(
            {
                "kind of device": (device.type, device.gpu_architecture, sorted(device.cpu_features)),
                "PyTorch": device.torch_version,
                "data": self.dataset.fingerprint,
            }
        )

    def _end_of(self, train: Callable[[], tuple[float, ...]]) -> TrialResult:
        """Train, and return the end without its record."""
        try:
            with lost_device_raised(self.device):
                return TrialResult(Outcome.COMPLETE, values=train())
        except TrialEnd as end:
            return TrialResult(end.outcome, str(end))
        except ModelError as error:
            # If the study searches settings of the model, an impossible combination ends this trial only.
            is_broken = isinstance(error, BrokenEncoderError)
            if not self.study.search_space.keys() & ({"encoder"} if is_broken else {*MODEL_SETTINGS}):
                raise
            return TrialResult(Outcome.INVALID if is_broken else Outcome.INCOMPATIBLE, str(error))
        except (InputError, RunError) as error:
            if isinstance(error, CodeError) and not is_distributed():  # there, perhaps on one rank only
                return TrialResult(Outcome.INVALID, str(error))
            raise
        except Exception as error:
            if is_distributed():
                # The other ranks may wait for this one: torchrun ends them all.
                raise RunError(f"rank {rank()} failed: {type(error).__name__}: {error}") from error
            outcome = Outcome.OOM if is_out_of_memory(error) else Outcome.FAILED
            reason = f"{type(error).__name__}: {error}"
            return TrialResult(outcome, reason, traceback=traceback.format_exc())

    def _with_record(self, end: TrialResult, recorder: TrialRecorder) -> TrialResult:
        """Return the end with its record, and its violation of each limit of the study."""
        limits, telemetry = self.study.constraints, recorder.telemetry()
        limited = limited_values(limits, telemetry, self.tasks)
        if busy := busy_text(telemetry.get("device_time")):
            recorder.note(device=telemetry["device"] | {"shared": True})
            busy = f"The device was {busy}. Speeds and seconds of the trial count that time."
            limited |= {name: None for name in limited if name.startswith(("train_", "evaluation_"))}
        if end.outcome == Outcome.COMPLETE:
            reasons = filter(None, (broken_limits(limits, limited), telemetry.get("stopped_early"), busy))
            end = replace(end, reason=" ".join(reasons))
        elif telemetry.get("num_steps", 0) < RATED_STEPS:  # its speed is that of the warm-up
            limited |= {name: None for name in limited if name.startswith("train_")}
        if end.outcome == Outcome.PRUNED and busy:
            end = replace(end, reason=f"{end.reason} {busy}")
        return recorder.complete(replace(end, constraints=violations(limits, limited)))

    def _collect_garbage(self) -> None:
        gc.collect()  # cycles, such as the model of a trial that failed
        # The collector skips objects of imports; the first trial imports more.
        if self._num_started < 2:
            gc.freeze()
        self._num_started += 1

    def check_study(self) -> None:
        """Check the study's data, tokenizers, models and heads before it is stored.

        Both splits are tokenised. For each encoder, and each choice from the study's own code, a small batch
        goes through model and loss in fp32, forward and backward. Other searched settings take their lowest
        value or first choice. Only the cache of tokens remains.

        Raises InputError, and DeviceLostError if this process has lost its GPU.
        """
        space = self.study.search_space
        lowest_values = lowest(space) | {PRECISION: "fp32", BASE_PRECISION: "fp32"}
        # A combination that cannot be built ends one trial, as long as there may be others.
        others = {name: value for name, value in lowest_values.items() if name not in MODEL_SETTINGS}
        with lost_device_raised(self.device):
            self._check_own_metrics()
            for named in _to_check(space):
                try:
                    self._check_parts(lowest_values | named)
                except ModelError:
                    if not space.keys() & (set(MODEL_SETTINGS) - named.keys()):
                        raise
                    self._check_parts(others | named)

    def _check_own_metrics(self) -> None:
        """Call the metrics of the study's own code with equal predictions; they may be undefined there."""
        for task in self.tasks:
            if metrics_of(task.kind) and task.level == "sequence":
                rows = [row for row in self.dataset.splits["validation"] if task.name in row.annotated]
                with errors_of_code(), warnings.catch_warnings(action="ignore"):
                    score(task, [kind_of(task).truth(rows[0])] * len(rows), rows)

    def _check_parts(self, params: Mapping[str, Any]) -> None:
        refused = "the model cannot be built"
        try:
            with errors_of_code():
                parts = build_trial(self.resolved, params, self.loader)
                self._check_float32_parts(parts.model, params.get("encoder"))
                callbacks = make_callbacks(parts.config, self.study.code)
            if ENERGY in self.study.named_metrics and (name := watcher_of_steps(callbacks)):
                raise InputError(
                    f"The callback `{name}` has `on_step`, so {ENERGY}, which needs steps without "
                    "interruption, cannot be measured. Use `on_evaluation`, or leave that metric out."
                )
            amp = MixedPrecision(parts.resolution.precision, parts.config.amp, self.device)
            encoder = parts.config.encoder
            shown = f"the encoder {encoder if isinstance(encoder, str) else 'of this config'}"
            refused = f"{shown} cannot run a batch of this study's data"
            with errors_of_code():
                side = Side(parts.model, amp, work_of(parts, parts.batch(2, 1)), is_reference=True)
                broken = side.run().broken()
            if broken and self.study.compat.enabled:
                raise ModelError(
                    f"{shown}, its heads and the loss must give finite numbers, but the {broken} of a batch "
                    "of this study's data are not finite, in fp32 and before any training; first: "
                    f"{side.origin()['first_nonfinite'] or 'not known'}."
                )
            _warn_if_causal(parts.model)
            with errors_of_code():
                parts.prepare()
                if schedule := own_schedule(parts.config.schedule, parts.config.option):
                    schedule(0.5)
        except FAULTS_OF_MODELS as error:
            if is_out_of_memory(error):
                return  # another device may have more memory
            raise ModelError(f"{refused}: {type(error).__name__}: {error}") from error

    def _check_float32_parts(self, model: MultitaskModel, encoder: Any) -> None:
        """Raise ModelError if a searched part is not in the model of an encoder that it is searched with."""
        searched = self.study.search_space.get("fp32_parts")
        if searched and encoder in searched.when.get("encoder", (encoder,)):
            for names in getattr(searched, "choices", ()):
                if names != AUTO:
                    set_float32_parts(model, names)


def _warn_if_causal(model: MultitaskModel) -> None:
    by_token = [task for task in model.tasks if task.level == "token"]
    if by_token and is_causal(model.encoder):
        first = {marked for task in by_token if (marked := kind_of(task).at_first_token)}
        more = f" The first token, where `{'`, `'.join(first)}` is marked, knows nothing of the text."
        names = ", ".join(task.name for task in by_token)
        _logger.warning(CAUSAL, type(model.encoder).__name__, names, more if first else "")


def _to_check(space: SearchSpace) -> Iterator[dict[str, Any]]:
    """Yield the settings to check: each encoder with and without an adapter, and choices from own code."""
    encoders, adapters, targets = (
        [{name: value} for value in getattr(space.get(name), "choices", ())] or [{}]
        for name in ("encoder", "adapter", "lora_targets")
    )
    kinds = {one.get("adapter", "none") != "none": one for one in reversed(adapters)}
    for encoder, kind in itertools.product(encoders, kinds.values()):
        for target in [{}] if kind == {"adapter": "none"} else targets:
            yield {**encoder, **kind, **target, **({"freeze_layers": 0} if kind else {})}
    for name in space.keys() - {"encoder"}:
        yield from ({name: one} for one in getattr(space[name], "choices", ()) if is_own(name, one))


def follow(runs_dir: Path) -> None:
    """Train each trial of rank 0 together with it, until it has no more."""
    executor, known = None, None
    while (task := next_task()) is not None:
        definition, sources, params = task
        trial_definition = {
            key: value for key, value in definition.items() if key not in ("n_trials", "timeout")
        }
        if executor is None or trial_definition != known:
            for source in sources:
                name_code(source)
            use_code(definition["code"], "Rank 0")
            study = StudyConfig.model_validate(definition)
            resolved = resolve_study(study, probe_device(study.device))
            executor, known = Executor(resolved, runs_dir), trial_definition
        executor.run(params, None, "")


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
        self.dataset = DataSet((), {}, fingerprint="")
        self._train = TRIALS[TRIAL].make

    def _trial(
        self,
        params: Mapping[str, Any],
        recorder: TrialRecorder,
        callbacks: Callbacks,
        counter: EnergyCounter | None,
    ) -> OwnTrial:
        parts = build_own_parts(self.resolved, params, recorder.note)
        return OwnTrial(parts, lambda trial: self._train(Run(trial)), recorder, callbacks, counter)

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
