"""The configuration of one trial: fixed settings of its study, suggested settings, and defaults."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpo.config.search_space import decode
from hpo.config.study_checks import trial_problems
from hpo.config.study_config import StudyConfig
from hpo.config.study_file import Problem, parse_yaml_value, problems_of, show
from hpo.config.trial_settings import (
    BUDGETS,
    DEFAULT_EPOCHS,
    WITH_FREE_PART,
    Encoder,
    PrecisionName,
    TrialSettings,
    setting_value,
)
from hpo.errors import InputError
from hpo.extensions import ENCODERS
from hpo.precision.table import PRECISION, AmpConfig


class TrialConfig(TrialSettings):
    """The complete settings of one trial. Exactly one budget is not None."""

    fp_precision: PrecisionName
    """Requested precision, by its canonical name."""
    encoder: Encoder
    """Encoder of the study. A folder is absolute."""
    amp: AmpConfig
    """`amp` of the study, with the `init_scale` of this trial."""

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        yield from trial_problems(self)


def build_trial_config(
    study: StudyConfig, params: Mapping[str, Any], default_precision: str, amp: AmpConfig | None = None
) -> TrialConfig:
    """Return the configuration of a trial with `params`.

    Args:
        study: the study, whose `training` has the fixed settings.
        params: values by setting, such as `loss_weight.<task>`, also as Optuna stores them.
        default_precision: precision for a study that neither fixes nor searches one.
        amp: the study's `amp` with its preset applied. Default: `study.amp`.

    Raises InputError for a wrong value.
    """
    settings = study.training.model_dump(exclude_unset=True)
    if any(params.get(budget) is not None for budget in BUDGETS):
        settings = {name: value for name, value in settings.items() if name not in BUDGETS}
    settings |= settings.pop("option", {})
    for prefix, field in WITH_FREE_PART.items():
        settings |= {f"{prefix}{task}": value for task, value in settings.pop(field, {}).items()}
    settings |= decode(study.search_space, params)
    if all(settings.get(budget) is None for budget in BUDGETS):
        settings["epochs"] = DEFAULT_EPOCHS
    settings[PRECISION] = settings.get(PRECISION) or default_precision
    encoder = settings.get("encoder") or study.model.encoder
    settings["encoder"] = _absolute_encoder(encoder, study.path.parent)
    try:
        checked = TrialConfig.model_validate(settings | {"amp": amp or study.amp})
    except ValidationError as error:
        raise InputError("\n".join(map(str, problems_of(error)))) from None
    changes: dict[str, Any] = {} if checked.init_scale is None else {"init_scale": checked.init_scale}
    if checked.fp32_parts:  # else these parts would compute in TF32
        changes["tf32"] = False
    return checked.model_copy(update={"amp": checked.amp.model_copy(update=changes)})


def encoders_of(study: StudyConfig) -> list[str | dict[str, Any]]:
    """Return the fixed encoder, then the searched encoders. Folders are absolute."""
    choices = getattr(study.search_space.get("encoder"), "choices", ())
    fixed = study.training.encoder or study.model.encoder
    return [_absolute_encoder(encoder, study.path.parent) for encoder in (fixed, *choices)]


def _absolute_encoder(encoder: str | Mapping[str, Any], folder: Path) -> str | dict[str, Any]:
    """Return an encoder with absolute paths for an encoder or tokenizer in a folder beside the study file."""
    if isinstance(encoder, Mapping):
        if not isinstance(encoder.get("tokenizer"), str):
            return dict(encoder)
        return {**encoder, "tokenizer": _absolute_encoder(encoder["tokenizer"], folder)}
    path = Path(folder, Path(encoder).expanduser())
    return str(path.resolve()) if path.is_dir() and encoder not in ENCODERS else encoder


def parse_params(given: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    """Return the settings of a mapping, or of texts `name=value` with values in YAML.

    Raises InputError with every problem.
    """
    if not isinstance(given, Mapping | Sequence):
        raise InputError(f"The settings must be a mapping, or texts NAME=VALUE, but got {show(given)}.")
    params: dict[str, Any] = {}
    problems = []
    for one in [given] if isinstance(given, str) else given:
        text = str(one)
        name, equals, value = text.partition("=")
        name = name.strip()
        if not isinstance(given, Mapping) and not (name and equals):
            problems.append(f"{text}: must be written as NAME=VALUE.")
        elif name in params:
            problems.append(f"{text}: {name} is given twice.")
        else:
            try:
                found = given[one] if isinstance(given, Mapping) else parse_yaml_value(value)
                params[name] = setting_value(name, found)
            except ValueError as error:
                params[name] = None
                problems.append(f"{text}: {error}")
    if len([budget for budget in BUDGETS if params.get(budget) is not None]) > 1:
        problems.append(f"A trial has one budget: give one of {', '.join(BUDGETS)}.")
    if problems:
        raise InputError("\n".join(problems))
    if params.get("encoder") is not None:
        params["encoder"] = _absolute_encoder(params["encoder"], Path.cwd())
    return params
