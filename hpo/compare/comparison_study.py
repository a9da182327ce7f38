"""The study that a comparison runs in the database: how it is opened, and how it grows.

Nothing is pruned, no precision falls back to another, and no checkpoint outlives its trial.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpo.compare.planning import Request, plan_comparison, refuse_options
from hpo.config.choices import CONFIGURATIONS
from hpo.config.comparison import REFERENCE, SEED, VALUES, ComparisonConfig
from hpo.config.search_space import encode
from hpo.config.study_config import StudyConfig, stored_study
from hpo.device import DeviceInfo
from hpo.errors import InputError
from hpo.precision.table import PRECISION, choice_name, lacking_choices
from hpo.trial.objectives import quality_objective

if TYPE_CHECKING:
    from hpo.data.dataset import DataSet
    from hpo.study.reading.study_record import StudyRecord
    from hpo.study.store.storage import Storage

SUFFIXES = {
    "precisions": "-compare",
    "base_precision": "-compare-base",
    "optimizer_state": "-compare-state",
    "configurations": "-compare-configurations",
}
"""What the name of a comparison adds to that of its study, by its question."""


def comparison_name(study: str, question: str) -> str:
    return f"{study[: 100 - len(SUFFIXES[question])]}{SUFFIXES[question]}"


def open_comparison(
    storage: Storage,
    record: StudyRecord,
    config: StudyConfig,
    request: Request,
    *,
    device: DeviceInfo,
    has_test: bool,
) -> StudyConfig:
    """The stored comparison, or a new one, which is not stored yet.

    Only the number of seeds of a stored comparison may change. Anybody who has seen the results could choose
    a looser margin or other precisions by them, and the stated errors would not hold.

    Args:
        config: of the study that is compared.
        device: a request without precisions compares all that it runs.
        has_test: whether the data have a test split with labels.

    Raises InputError.
    """
    if config.comparison is not None:
        of, command = config.comparison.study, config.comparison.command
        raise InputError(f"The study `{record.name}` is itself a comparison, of `{of}`: {command}")
    if request.question == CONFIGURATIONS:
        others = ("precisions", "margin", "max_seeds")
        refuse_options([name for name in others if getattr(request, name) is not None])
    name, token = comparison_name(record.name, request.question), storage.study_token(record.name)
    if not storage.has_study(name):
        new = plan_comparison(record, config, request.checked(_runnable(request, device, config)), token)
        new = new.model_copy(update={"device": device.kind})
        begun = comparison_study(config, new, has_test=has_test)
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
    if request.max_seeds is not None:
        plan = plan.model_copy(update={"max_seeds": request.max_seeds})
    if storage.trial_counts(name)["done"] < stored.num_trials:
        _refuse_device(stored, device, plan, has_begun=True)
    return grown(stored, plan)


def _runnable(request: Request, device: DeviceInfo, config: StudyConfig) -> tuple[str, ...]:
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
        if len(compared) == len(lacking) and plan.question != CONFIGURATIONS:
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


def unlabelled_test_tasks(config: StudyConfig, data: DataSet) -> tuple[str, ...]:
    """Tasks of the objective for which no row of the test split is annotated, as in a shared task whose truth
    is held back; a comparison then has the scores of the validation split. None where there is no test split.
    """
    task, of_task, _ = quality_objective(config.objective).metric.partition("/")
    names = [task] if of_task else [one.name for one in data.tasks]
    rows = data.splits.get("test")
    if rows is None:
        return ()
    return tuple(name for name in names if not any(name in row.annotated for row in rows))


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
            "budget": None,
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
