"""The study of a comparison in the database.

Nothing is pruned, no precision falls back to another, and no checkpoint outlives its trial.
"""

import logging
from collections.abc import Sequence
from typing import Any

from hpo.compare.planning import Request, plan_comparison, refuse_options
from hpo.config.choices import CONFIGURATIONS
from hpo.config.comparison import REFERENCE, SEED, VALUES, ComparisonConfig
from hpo.config.search_space import encode
from hpo.config.study_config import StudyConfig, stored_study
from hpo.data.dataset import DataSet
from hpo.device import DeviceInfo
from hpo.errors import InputError
from hpo.precision.table import PRECISION, choice_name, lacking_choices
from hpo.study.reading.study_record import StudyRecord
from hpo.study.store.storage import Storage
from hpo.trial.objectives import quality_objective

_logger = logging.getLogger(__name__)

SUFFIXES = {
    "precisions": "-compare",
    "base_precision": "-compare-base",
    "optimizer_state": "-compare-state",
    "configurations": "-compare-configurations",
}
"""Suffix of a comparison's name, by its question."""


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
    """Return the stored comparison, or a new one that is not stored yet.

    Only the number of seeds of a stored comparison may change. After a look at the results, a looser margin
    or other precisions would make the stated errors wrong.

    Args:
        config: the compared study.
        device: a request without precisions compares all those of this device.
        has_test: whether the data have a test split with labels.

    Raises:
        InputError: the request does not fit the study, the stored comparison or the device.
    """
    if config.comparison is not None:
        compared, command = config.comparison.study, config.comparison.command
        raise InputError(f"The study `{record.name}` is itself a comparison, of `{compared}`: {command}")
    if request.question == CONFIGURATIONS:
        others = ("precisions", "margin", "max_seeds")
        refuse_options([name for name in others if getattr(request, name) is not None])
    name, token = comparison_name(record.name, request.question), storage.study_token(record.name)
    if not storage.has_study(name):
        setting = request.setting
        lacking = lacking_choices({setting: VALUES[setting]}, device, config.amp)
        runnable = [value for value in VALUES[setting] if choice_name(setting, value) not in lacking]
        plan = plan_comparison(record, config, request.with_precisions(runnable), token)
        plan = plan.model_copy(update={"device": device.kind})
        study = comparison_study(config, plan, has_test=has_test)
        _refuse_device(study, device, plan, has_begun=False)
        return study
    stored = stored_study(name, storage.read_definition(name))
    stored_plan = stored.comparison
    if stored_plan is None or stored_plan.study_token != token:
        raise InputError(
            f"The study `{name}` is no comparison of the present `{record.name}`: hpo delete {name}"
        )
    _refuse_changes(name, stored_plan, request.with_precisions(()) if request.precisions else request)
    if request.max_seeds is not None:
        present = max(stored_plan.num_seeds.values())
        if request.max_seeds < present:
            _logger.warning("--max-seeds %d: the %d present seeds stay.", request.max_seeds, present)
        stored_plan = stored_plan.model_copy(update={"max_seeds": max(request.max_seeds, present)})
    if storage.trial_counts(name)["done"] < stored.num_trials:
        _refuse_device(stored, device, stored_plan, has_begun=True)
    return with_plan(stored, stored_plan)


def _refuse_device(
    study: StudyConfig, device: DeviceInfo, plan: ComparisonConfig, *, has_begun: bool
) -> None:
    """Raise InputError if `device` cannot run the rest of a comparison."""
    lacking = lacking_choices(plan.needs(), device, study.amp)
    if not (lacks := plan.lacking(device.kind, lacking)):
        return
    compared = [name for name in plan.precisions if choice_name(plan.setting, name) in lacking]
    remedy = "Compare on a device that does."
    if has_begun:
        remedy = f"Continue on a device that does, or start again without its trials: hpo delete {study.name}"
    elif len(compared) == len(lacking) and plan.question != CONFIGURATIONS:
        remedy = f"Leave {', '.join(compared)} out of --precisions, or compare on a device that does."
    reasons = " ".join(dict.fromkeys(lacking.values()))
    raise InputError(
        f"A comparison runs on one kind of device. It needs {', '.join(lacks)}, but this is {device.kind}. "
        f"{reasons} {remedy}"
    )


def _refuse_changes(name: str, plan: ComparisonConfig, request: Request) -> None:
    """Raise InputError for an option that differs from the stored comparison."""
    changed = [
        f"--{option} {_as_option(getattr(plan, option))}"
        for option in ("precisions", "top", "seeds", "margin")
        if (asked := getattr(request, option)) is not None
        and _as_option(asked) != _as_option(getattr(plan, option))
    ]
    if changed:
        raise InputError(
            f"The comparison `{name}` was begun with {' '.join(changed)}, and its trials count only "
            f"for that. Leave it out to continue, or start again without its trials: hpo delete {name}"
        )


def _as_option(value: float | Sequence[str]) -> str:
    """The value of an option on the command line, without the implied fp32."""
    if isinstance(value, int | float):
        return f"{value:g}"
    return ",".join(name for name in value if name != REFERENCE) or REFERENCE


def unlabelled_test_tasks(config: StudyConfig, data: DataSet) -> tuple[str, ...]:
    """Return the tasks of the objective without labels in the test split; none without a test split.

    A comparison then has the scores of the validation split.
    """
    name, is_task, _ = quality_objective(config.objective).metric.partition("/")
    names = [name] if is_task else [task.name for task in data.tasks]
    rows = data.splits.get("test")
    if rows is None:
        return ()
    return tuple(name for name in names if not any(name in row.annotated for row in rows))


def comparison_study(config: StudyConfig, plan: ComparisonConfig, *, has_test: bool) -> StudyConfig:
    """Return the study of the planned trials. `has_test`: its runs are scored on test."""
    definition = config.definition()
    fixed = {PRECISION, plan.setting, SEED}
    training = {name: value for name, value in definition["training"].items() if name not in fixed}
    given = [name for name in definition["given"] if name.rpartition(".")[2] not in fixed]
    space: dict[str, Any] = {
        plan.setting: {"type": "categorical", "choices": plan.precisions},
        SEED: {"type": "int", "low": plan.first_seed, "high": plan.last_seed},
    }
    for name in plan.configurations[0].params:
        values = [configuration.params[name] for configuration in plan.configurations]
        choices = {encode(value): value for value in values}
        space[name] = {"type": "categorical", "choices": tuple(choices.values())}
    return StudyConfig.model_validate(
        {
            **definition,
            "name": comparison_name(plan.study, plan.question),
            "training": training,
            # a device without a precision leaves all trials to others: with `prune` it would use them up
            "amp": {**definition["amp"], "on_unsupported": "skip"},
            "objective": config.objective,
            "constraints": {},  # the configurations meet them, and other precisions are of interest too
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


def with_plan(study: StudyConfig, plan: ComparisonConfig) -> StudyConfig:
    return study.with_values(comparison=plan, n_trials=len(plan.points()))


def with_stored_seeds(storage: Storage, study: StudyConfig) -> StudyConfig:
    """Add the seeds of another running `hpo compare` of the same comparison."""
    assert study.comparison is not None
    if not storage.has_study(study.name):
        return study
    stored = stored_study(study.name, storage.read_definition(study.name)).comparison
    assert stored is not None
    seeds = [study.comparison.num_seeds, stored.num_seeds]
    most = {name: max(one.get(name, 0) for one in seeds) for name in {**seeds[0], **seeds[1]}}
    return with_plan(study, study.comparison.model_copy(update={"num_seeds": most}))
