"""The study that a comparison runs in the database: what of a study is compared, and how it grows.

The best `top` configurations of the study, whatever their precision, each under every precision with the same
seeds. In a race, each under its own precision.

Precisions are asked about one after the other, in a fixed sequence: a precision gets no trial before the one
ahead of it is as good. So each question has the whole error, and all `as good` together have it too (Westfall
& Krishen, Journal of Statistical Planning and Inference 2001).

A setting that the search left out of a configuration (`when`) has its default there. Nothing is pruned, no
precision falls back to another, and no checkpoint outlives its trial.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpo.config.comparison import (
    REFERENCE,
    SEED,
    SETTINGS,
    VALUES,
    ComparedConfiguration,
    ComparisonConfig,
    Question,
    checked_precision,
)
from hpo.config.exclusions import trial_problems
from hpo.config.limits import MEASURED_METRICS
from hpo.config.search_space import decode, encode
from hpo.config.study_config import StudyConfig, stored_study
from hpo.config.trial_config import build_trial_config
from hpo.config.trial_settings import setting_of
from hpo.device import DeviceInfo
from hpo.errors import InputError
from hpo.precision.table import BASE_PRECISION, PRECISION, PRECISIONS, choice_name, lacking_choices
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import choosable_trials, nearest_told
from hpo.study.sampling.fronts import loss_signs
from hpo.trial.objectives import quality_objective, unit_of

if TYPE_CHECKING:
    from hpo.data.dataset import DataSet
    from hpo.study.reading.study_record import StudyRecord, TrialRecord
    from hpo.study.store.storage import Storage

SUFFIXES = {
    "precisions": "-compare",
    "configurations": "-race",
    "base_precision": "-compare-base",
    "optimizer_state": "-compare-state",
}
"""What the name of a comparison adds to that of its study, by its question."""
FIRST_SEED = 1_000_000
"""Seeds from here on are new ones, unless the search has had such."""


def comparison_name(study: str, question: str) -> str:
    """The name of a comparison in the database."""
    return f"{study[: 100 - len(SUFFIXES[question])]}{SUFFIXES[question]}"


@dataclass(frozen=True)
class Request:
    """What a user asks of a comparison, by the options of `hpo compare`; None: whatever it was begun with,
    or the default."""

    question: Question = "precisions"
    precisions: tuple[str, ...] | None = None
    top: int | None = None
    seeds: int | None = None
    max_seeds: int | None = None
    margin: float | None = None

    @property
    def is_race(self) -> bool:
        return self.question == "configurations"

    @property
    def setting(self) -> str:
        """Whose values are compared."""
        return SETTINGS[self.question]

    def checked(self, runnable: Sequence[str]) -> Request:
        """With the canonical names of the precisions, fp32 ahead; left out, those that are `runnable`."""
        if self.is_race:
            return self
        try:
            given = [checked_precision(self.setting, name) for name in self.precisions or runnable]
        except ValueError as error:
            raise InputError(f"--precisions: {error}") from None
        return replace(self, precisions=tuple(dict.fromkeys([REFERENCE, *given])))


DEFAULTS: Mapping[str, Any] = {"top": 3, "seeds": 3, "max_seeds": 12, "margin": 0.5}


def open_comparison(
    storage: Storage,
    record: StudyRecord,
    config: StudyConfig,
    request: Request,
    *,
    device: DeviceInfo,
    has_test: bool,
) -> StudyConfig:
    """The comparison that is stored, or a new one, which is not stored yet.

    Of one that is stored nothing can be asked anew but the number of seeds, which may be raised at any look.
    A looser margin, other precisions or configurations would be chosen by somebody who has seen the results,
    and its errors would not be those stated.

    Args:
        config: of the study that is compared.
        device: on which it is begun, or goes on; one that names no precisions has all that this one runs.
        has_test: whether the data have a test split with labels.

    Raises:
        InputError: the study has no complete trial; the stored comparison was begun with other values; an
            option is not one of a race; the study is a comparison; `device` cannot run the trials that are
            left.
    """
    if config.comparison is not None:
        of, command = config.comparison.study, config.comparison.command
        raise InputError(f"The study `{record.name}` is itself a comparison, of `{of}`: {command}")
    if request.is_race and (request.precisions or request.margin is not None):
        raise InputError(
            "--configurations takes neither --precisions nor --margin: each configuration is trained in its "
            "own precision, and the best is found whatever its lead. Leave them out."
        )
    name, token = comparison_name(record.name, request.question), storage.study_token(record.name)
    if not storage.has_study(name):
        new = plan_comparison(record, config, request.checked(_runnable(request, device, config)), token)
        new = new.model_copy(update={"device": device.kind})
        # a race chooses, and what is chosen on test has no test left
        begun = comparison_study(config, new, has_test=has_test and not request.is_race)
        _refuse_device(begun, device, new, has_begun=False)
        return begun
    return _stored(storage, name, record.name, request, device)


def _stored(storage: Storage, name: str, of: str, request: Request, device: DeviceInfo) -> StudyConfig:
    """The comparison `name` of the study `of` as it was begun, with the seeds that are asked for."""
    stored = stored_study(name, storage.read_definition(name))
    plan = stored.comparison
    if plan is None or plan.study_token != storage.study_token(of):
        raise InputError(f"The study `{name}` is no comparison of `{of}` as it is now: hpo delete {name}")
    _refuse_changes(name, plan, request.checked(()) if request.precisions else request)
    if not plan.device:  # of an earlier version, whose trials say it
        facts = [trial.telemetry.get("device") for trial in read_study(storage, name).trials]
        kinds = {DeviceInfo.from_facts(of_trial).kind for of_trial in facts if of_trial}
        if len(kinds) == 1:
            plan = plan.model_copy(update={"device": kinds.pop()})
    if request.max_seeds is not None:
        plan = plan.model_copy(update={"max_seeds": request.max_seeds})
    if storage.slot_counts(name)["done"] < stored.num_slots:
        _refuse_device(stored, device, plan, has_begun=True)
    return grown(stored, plan)


def _runnable(request: Request, device: DeviceInfo, config: StudyConfig) -> tuple[str, ...]:
    """All that can be compared on `device`."""
    setting = request.setting
    lacking = lacking_choices({setting: VALUES[setting]}, device, config.amp)
    return tuple(name for name in VALUES[setting] if choice_name(setting, name) not in lacking)


def _refuse_device(
    study: StudyConfig, device: DeviceInfo, plan: ComparisonConfig, *, has_begun: bool
) -> None:
    """Raise InputError where `device` cannot run what is left of a comparison."""
    lacking = lacking_choices(plan.needs(), device, study.amp)
    if not (lacks := plan.lacking(device.kind, lacking)):
        return
    if has_begun:
        todo = f"Go on on a device that does, or begin anew, without its trials: hpo delete {study.name}"
    else:
        compared = [name for name in plan.precisions if choice_name(plan.setting, name) in lacking]
        todo = "Compare on a device that does."
        if not plan.is_race and len(compared) == len(lacking):
            todo = f"Leave {', '.join(compared)} out of --precisions, or compare on a device that does."
    reasons = " ".join(dict.fromkeys(lacking.values()))
    raise InputError(
        f"All that is compared must run on one kind of device, and needs {', '.join(lacks)}, but this is "
        f"{device.kind}. {reasons} {todo}"
    )


def _refuse_changes(name: str, plan: ComparisonConfig, request: Request) -> None:
    """Raise InputError for an option that is not as the comparison was begun."""
    begun_with: dict[str, float | Sequence[str]] = {
        "precisions": plan.precisions,
        "top": plan.top,
        "seeds": plan.seeds,
        "margin": plan.margin,
    }
    changed = [
        f"--{option} {_typed(value)}"
        for option, value in begun_with.items()
        if (asked := getattr(request, option)) is not None and _typed(asked) != _typed(value)
    ]
    if changed:
        options = " ".join(changed)
        raise InputError(
            f"The comparison `{name}` was begun with {options}, and what its trials tell counts for that "
            f"alone. Leave it out to go on, or begin anew, without its trials: hpo delete {name}"
        )


def _typed(value: float | Sequence[str]) -> str:
    """The value of an option as one types it; fp32 is understood among precisions."""
    if isinstance(value, int | float):
        return f"{value:g}"
    return ",".join(name for name in value if name != REFERENCE) or REFERENCE


def unlabelled_in_test(config: StudyConfig, data: DataSet) -> tuple[str, ...]:
    """Tasks of the objective for which no row of the test split is annotated, as in a shared task whose truth
    is held back; a comparison then has the scores of the validation split. None where there is no test split.
    """
    task, of_task, _ = quality_objective(config.objective).metric.partition("/")
    names = [task] if of_task else [one.name for one in data.tasks]
    rows = data.splits.get("test")
    if rows is None:
        return ()
    return tuple(name for name in names if not any(name in row.annotated for row in rows))


def plan_comparison(
    record: StudyRecord, config: StudyConfig, request: Request, token: str
) -> ComparisonConfig:
    """Choose what is compared. `token` is the study's. Raises InputError where it has no complete trial, or
    where no margin is given for a metric that is not in points."""
    setting, ranked = request.setting, by_rank(record)
    best = [trial for trial in ranked if not _why_not(config, trial, setting)]
    if not best and ranked:
        why = _why_not(config, ranked[0], setting)
        raise InputError(f"--over {setting}: no complete trial of `{record.name}` can have another. {why}")
    if not best:
        none_yet = (
            f"A comparison needs complete trials, but the study `{record.name}` has none yet. Run it first."
        )
        raise InputError(nearest_told(record) or none_yet)
    given = {option: getattr(request, option) for option in DEFAULTS}
    decides = quality_objective(config.objective).metric
    is_race = request.is_race
    if not is_race and request.margin is None and unit_of(decides) != "points":
        raise InputError(
            f"--margin must be given: {decides} is in {unit_of(decides)}, where no default fits."
        )
    asked = {**DEFAULTS, **{option: value for option, value in given.items() if value is not None}}
    if not is_race and {REFERENCE} >= {*(request.precisions or ())}:
        raise InputError(
            f"A comparison needs another precision than {REFERENCE}, but --precisions names none, or this "
            "device runs none as it is. Compare on one that does, or, for the scores alone, search with "
            "`amp.allow_emulated: true`, which makes the others count as precisions that work."
        )
    if asked["seeds"] > asked["max_seeds"]:
        raise InputError("--seeds must be <= --max-seeds, but got {seeds} and {max_seeds}.".format(**asked))
    names = sorted((config.search_space.keys() | {PRECISION}) - {setting, SEED})
    settings = {trial.number: _settings_of(config, trial, names) for trial in best}
    if is_race:
        configurations = tuple(_race(best[: asked["top"]], settings))
    else:
        own = {name for name in names if setting in config.search_space[name].when}
        configurations = tuple(_compared(best, settings, own, request.precisions or (), asked["top"]))
    precisions = tuple(
        dict.fromkeys(name for configuration in configurations for name in configuration.precisions)
    )
    begins = [str(place) for place in range(len(configurations))] if is_race else precisions[:2]
    return ComparisonConfig(
        study=record.name,
        study_token=token,
        question=request.question,
        precisions=precisions,
        configurations=configurations,
        top=asked["top"],
        first_seed=_first_seed(config),
        seeds=asked["seeds"],
        max_seeds=asked["max_seeds"],
        num_seeds=dict.fromkeys(begins, asked["seeds"]),
        margin=asked["margin"],
    )


Settings = Mapping[int, dict[str, Any]]
"""What is searched but what is compared and the seed, by the number of the trial."""


def _race(best: Sequence[TrialRecord], settings: Settings) -> Iterator[ComparedConfiguration]:
    """The best configurations, each under its own precision."""
    for trial in best:
        yield ComparedConfiguration(
            trial=trial.number, params=settings[trial.number], precisions=(precision_of(trial),)
        )


def _compared(
    best: Sequence[TrialRecord],
    settings: Settings,
    own: Container[str],
    precisions: tuple[str, ...],
    top: int,
) -> Iterator[ComparedConfiguration]:
    """The best configurations, each under all `precisions`.

    Trials that differ in precision alone have one configuration, by the better of them. So have those that
    differ in settings `own` to a precision too (`when`): each of these has the value of the best trial that
    searched it.
    """
    groups: dict[str, list[TrialRecord]] = {}
    for trial in best:
        shared = {name: value for name, value in settings[trial.number].items() if name not in own}
        groups.setdefault(json.dumps(shared, sort_keys=True), []).append(trial)
    for group in list(groups.values())[:top]:
        params = dict(settings[group[0].number])
        for trial in reversed(group):
            params |= {name: settings[trial.number][name] for name in params if name in trial.params}
        yield ComparedConfiguration(trial=group[0].number, params=params, precisions=precisions)


def comparison_study(config: StudyConfig, plan: ComparisonConfig, *, has_test: bool) -> StudyConfig:
    """The study that trains what the plan names. `has_test`: whether its runs are scored on test."""
    definition = config.definition()
    fixed = {PRECISION, plan.setting, SEED}
    definition["training"] = {
        name: value for name, value in definition["training"].items() if name not in fixed
    }
    given = [name for name in definition["given"] if name.rpartition(".")[2] not in fixed]
    space: dict[str, Any] = {
        plan.setting: {"type": "categorical", "choices": plan.precisions},
        SEED: {"type": "int", "low": plan.first_seed, "high": plan.last_seed},
    }
    for name in plan.configurations[0].params:
        choices = {
            encode(configuration.params[name]): configuration.params[name]
            for configuration in plan.configurations
        }
        space[name] = {"type": "categorical", "choices": tuple(choices.values())}
    return StudyConfig.model_validate(
        {
            **definition,
            "name": comparison_name(plan.study, plan.question),
            # a device that lacks a precision leaves all trials to others: with `prune` it would use them up
            "amp": {**definition["amp"], "on_unsupported": "skip"},
            "objective": config.objective,
            "constraints": {},  # what is compared meets them, and its other precisions are to be told too
            "first": (),
            "learn_from": None,
            "budget": None,
            "stop_when_unlikely": None,
            "search_space": space,
            "sampler": {"name": "grid"},
            "pruner": {"name": "none"},
            "checkpoint": {**definition["checkpoint"], "top_k": 0},
            "evaluation": {**definition["evaluation"], "test": has_test},
            "n_trials": len(plan.points()),
            "comparison": plan,
            "given": [*given, *(f"comparison.{name}" for name in ("num_seeds", "max_seeds"))],
        }
    )


def grown(study: StudyConfig, plan: ComparisonConfig) -> StudyConfig:
    """The comparison with another plan: with more seeds."""
    return study.with_values(comparison=plan, n_trials=len(plan.points()))


def caught_up(storage: Storage, study: StudyConfig) -> StudyConfig:
    """The comparison with the seeds that another `hpo compare` of it has added meanwhile."""
    assert study.comparison is not None
    if not storage.has_study(study.name):
        return study
    stored = stored_study(study.name, storage.read_definition(study.name)).comparison
    assert stored is not None
    seeds = [study.comparison.num_seeds, stored.num_seeds]
    most = {arm: max(one.get(arm, 0) for one in seeds) for arm in {**seeds[0], **seeds[1]}}
    return grown(study, study.comparison.model_copy(update={"num_seeds": most}))


def by_rank(record: StudyRecord) -> list[TrialRecord]:
    """The complete trials that meet the study's limits by their first objective that says something of the
    model, else by the first; each configuration once, in its best trial."""
    names = record.metric_names
    place = next((place for place, name in enumerate(names) if name not in MEASURED_METRICS), 0)
    sign = loss_signs(record.directions)[place]
    ranked = sorted(
        choosable_trials(record), key=lambda trial: (sign * (trial.values or ())[place], trial.number)
    )
    chosen: dict[str, TrialRecord] = {}
    for trial in ranked:
        chosen.setdefault(configuration_key(trial), trial)
    return list(chosen.values())


def configuration_key(trial: TrialRecord) -> str:
    """The same for trials of one configuration, which differ in their seeds at most."""
    params = {name: value for name, value in trial.params.items() if name != SEED}
    return json.dumps(params | {PRECISION: precision_of(trial)}, sort_keys=True)


def precision_of(trial: TrialRecord) -> str:
    """What it was trained in, which is not what it asked for where it fell back."""
    return str(effective(trial, PRECISION))


def effective(trial: TrialRecord, setting: str) -> str | None:
    """What a trial really had of a precision, and which is not what it asked for where it could not be; None:
    it ended before that was known."""
    if setting == PRECISION:
        return trial.attributes.get("fp_precision_effective")
    found: str | None = (trial.telemetry.get(setting) or {}).get("effective")
    return found


def _settings_of(config: StudyConfig, trial: TrialRecord, names: Sequence[str]) -> dict[str, Any]:
    """The value of each setting that the study searches, with defaults where `when` left one out."""
    settings = build_trial_config(config, trial.params, REFERENCE)
    given = decode(config.search_space, trial.params)
    given = {**given, PRECISION: precision_of(trial)}
    return {name: given[name] if name in given else setting_of(settings, name) for name in names}


def _why_not(config: StudyConfig, trial: TrialRecord, setting: str) -> str:
    """Why a trial cannot have another value of a precision than fp32; empty: it can."""
    computed = precision_of(trial)
    if setting == BASE_PRECISION and PRECISIONS[computed].changes_weights:
        return f"{computed} decides itself how all weights are stored."
    settings = build_trial_config(config, trial.params, REFERENCE)
    other = settings.model_copy(update={setting: VALUES[setting][1]})
    return next((str(problem) for problem in trial_problems(other)), "")


def _first_seed(config: StudyConfig) -> int:
    searched = config.search_space.get(SEED)
    highest = max(searched.grid()) if searched else config.training.seed
    return max(FIRST_SEED, int(highest) + 1)
