"""The configuration of a study: objective, data, model, budget, fixed settings and search space.

`load_study` reads a study file. One error lists all mistakes that show without data, model or device.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from hpo.code import is_class_name, unknown_names_allowed
from hpo.config.choices import TrackerName
from hpo.config.comparison import ComparisonConfig
from hpo.config.data_config import DataConfig
from hpo.config.definition import given_keys, known_keys, ordered_like, refuse_changes
from hpo.config.first import EarlierResults, First, parse_first
from hpo.config.limits import MEASURED_METRICS, Limits, ObjectiveConfig, as_tuple
from hpo.config.sampler_config import PrunerConfig, SamplerConfig
from hpo.config.search_space import Distribution, parse_search_space
from hpo.config.sections import (
    BUDGET_TRIALS,
    MAX_TRIALS,
    BudgetConfig,
    CheckpointConfig,
    CompatConfig,
    EvaluationConfig,
    ModelConfig,
)
from hpo.config.study_checks import (
    fixed_and_searched,
    grid_problems,
    measures_parts,
    own_loop_definition,
    own_loop_problems,
    sampling_problems,
    study_problems,
)
from hpo.config.study_file import (
    CheckedSection,
    Problem,
    code_of,
    find_study_file,
    problems_of,
    read_study_file,
    refuse,
    show,
    study_name,
)
from hpo.config.trial_settings import BUDGETS, DEFAULT_EPOCHS, Positive, TrialSettings
from hpo.errors import InputError, StorageError
from hpo.extensions import NO_DATA, has_own_loop, own_loop_of
from hpo.precision.table import PRECISION, AmpConfig
from hpo.section import Count, Section, Switch, Whole


def default_pruner(study: Mapping[str, Any]) -> PrunerConfig:
    """Return the default pruner of a study with these validated keys.

    It is `none` for a searched budget: at a rung, trials of different budgets do not compare.
    """
    metrics = {objective.metric for objective in study["objective"]}
    if metrics <= {*MEASURED_METRICS} or study["search_space"].keys() & BUDGETS:
        return PrunerConfig(name="none")
    return PrunerConfig(name="promote")


def _data_or_own_loop(given: Any) -> Any:
    """Require the section `data`, except in a study with its own training loop."""
    if given is None and has_own_loop():
        return DataConfig(source=NO_DATA)  # type: ignore[arg-type]
    if given is None:
        raise ValueError("must be given.")
    return given


class StudyConfig(CheckedSection):
    """A study."""

    path: Path = Field(Path("study.yaml"), exclude=True)
    """The study file. Not a key."""
    given: Annotated[frozenset[str], Field(strict=False)] = Field(frozenset(), exclude=True)
    """Keys of the study file. Not a key."""
    comparison: ComparisonConfig | None = Field(None, exclude=True)
    """Plan of a comparison by `hpo compare`. Not a key."""
    name: Annotated[str, AfterValidator(study_name)]
    """Name of the study in the database."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Texts for a tracker to show with each run, by name: `{team: search, ticket: "7"}`."""
    code: dict[str, str] = Field(default_factory=dict, title="text or list")
    """Your own code, with kinds of tasks, poolings, losses, ...: a `.py` file beside this one, a module or an
    entry point of an installed package, or a list of them."""
    objective: Annotated[tuple[ObjectiveConfig, ...], Field(strict=False), BeforeValidator(as_tuple)] = (
        ObjectiveConfig(),
    )
    """Metric to optimise, or a list of several."""
    constraints: Limits = Field(default_factory=dict)
    """Limits for the best trial, by metric: `{peak_memory_bytes: {max: 8.0e9}}`."""
    sampler: SamplerConfig = Field(default_factory=SamplerConfig)
    """Choice of the next configuration."""
    budget: BudgetConfig | None = None
    """Limit of the study's device time: `{hours: 4}`."""
    n_trials: Annotated[Count, Field(le=MAX_TRIALS)] = Field(
        default_factory=lambda study: BUDGET_TRIALS if study.get("budget") else 20
    )
    """Number of trials, over all workers. A grid ends after its last combination. Default: 20, or with a
    `budget` as many as fit, at most 1000."""
    timeout: Positive | None = None
    """Seconds until a worker stops starting trials."""
    stall_seconds: Positive = 3600.0
    """Longest time without a training step, and at least 20 times the slowest step. Then the worker ends its
    process."""
    max_retries: Annotated[Whole, Field(ge=0)] = 1
    """Number of retries of a `failed` trial. Other outcomes are not retried."""
    tracker: TrackerName | None = None
    """Tracker in which `hpo run` shows the trials, like `hpo track --follow`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the trials. `auto` uses CUDA if available."""
    data: Annotated[DataConfig, BeforeValidator(_data_or_own_loop)] = Field(None, validate_default=True)
    """The data set. Leave it out if the `code` has a training loop (`@hpo.trial`)."""
    model: ModelConfig = ModelConfig()
    """The encoder."""
    training: TrialSettings = TrialSettings()
    """Settings with the same value in all trials."""
    amp: AmpConfig = AmpConfig()
    """Mixed precision and loss scaling."""
    compat: CompatConfig = CompatConfig()
    """Check of the precision before training."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation on the validation split."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints and kept weights."""
    search_space: dict[str, Distribution] = Field(default_factory=dict, validate_default=True)
    """Searched settings, each with its distribution."""
    first: tuple[dict[str, Any], ...] | EarlierResults = ()
    """Configurations to try before the sampler draws any."""
    portfolio: Switch = True
    """Also try configurations of published fine-tuning, in at most a tenth of the trials, rounded up, if
    `tpe`, `gp` or `nsga2` searches the learning rate of pretrained encoders."""
    pruner: PrunerConfig = Field(default_factory=default_pruner)
    """Early end of trials. Default: `promote`; or `none` if no objective is a metric of the model, if the
    trials' budget is searched, or if a start costs too much of a whole trial (counted in rows when the study
    is made). `hpo plan` shows the choice."""

    @property
    def has_own_loop(self) -> bool:
        """Return True if the study's own code trains its trials (`@hpo.trial`)."""
        return self.data.source == NO_DATA

    @property
    def named_metrics(self) -> tuple[str, ...]:
        return (*(objective.metric for objective in self.objective), *self.constraints)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Import paths of the sampler and the pruner, if they are classes."""
        return tuple(one.name for one in (self.sampler, self.pruner) if is_class_name(one.name))

    @property
    def directions(self) -> tuple[Literal["minimize", "maximize"], ...]:
        return tuple(objective.direction for objective in self.objective)

    @property
    def space_hash(self) -> str:
        """Hash of the search space, independent of the order of the settings."""
        space = json.dumps(self.definition()["search_space"], sort_keys=True)
        return hashlib.sha256(space.encode()).hexdigest()[:16]

    @property
    def precisions(self) -> tuple[str, ...]:
        """Choices of `fp_precision`, or its fixed value; () if the preset decides."""
        if searched := self.search_space.get(PRECISION):
            return tuple(searched.grid())
        return (self.training.fp_precision,) if self.training.fp_precision else ()

    @property
    def num_trials(self) -> int:
        """Largest number of trials: `n_trials`, or the combinations of a smaller grid."""
        if self.sampler.name != "grid" or self.comparison is not None:
            return self.n_trials
        return int(min(self.n_trials, math.prod(one.size for one in self.search_space.values())))

    @property
    def drawing_sampler(self) -> SamplerConfig:
        """Sampler with the seed of the first worker. After an earlier study, only `qmc` and `grid` repeat
        configurations."""
        if not isinstance(self.first, EarlierResults):
            return self.sampler
        seed = random.Random(f"{self.sampler.seed} after {self.first.study}").getrandbits(30)
        return self.sampler.model_copy(update={"seed": seed})

    def definition(self) -> dict[str, Any]:
        """Return the study as JSON for the database; `stored_study` reads it.

        It has all keys, `given` (the keys of the file) and `folder` (the base of relative encoders).
        """
        dumped = self.model_dump(mode="json")
        dumped["data"] = self.data.read_by(dumped["data"])
        budgets = [dumped["training"][budget] for budget in BUDGETS]
        if budgets == [None, None, None] and not self.search_space.keys() & BUDGETS:
            dumped["training"]["epochs"] = DEFAULT_EPOCHS
        if self.has_own_loop:
            dumped = own_loop_definition(dumped)
        if self.comparison is not None:
            dumped["comparison"] = self.comparison.model_dump(mode="json")
        return dumped | {"given": sorted(self.given), "folder": str(self.path.parent.absolute())}

    def with_values(self, **values: Any) -> StudyConfig:
        """Return the study with `values` of top-level keys, as if they were in its file."""
        return self.model_copy(update={**values, "given": self.given | values.keys()})

    def resumed(self, stored: Mapping[str, Any]) -> StudyConfig:
        """Return the study with its keys in the order of `stored`, its definition.

        Of its values only the pruner, or its first rung, is used, if the data decided about it.

        Raises:
            StudyChangedError: the two differ, and the results depend on the difference.
            StorageError: `stored` is no definition.
        """
        try:
            now = self._with_stored_pruner(stored).definition()
            refuse_changes(self.name, stored, now)
        except (LookupError, TypeError, AttributeError) as error:
            raise StorageError(_not_valid(self.name, f"{type(error).__name__}: {error}")) from error
        return StudyConfig.model_validate({**ordered_like(stored, now), "path": self.path})

    def _with_stored_pruner(self, stored: Mapping[str, Any]) -> StudyConfig:
        """Return the study with the pruner, or the first rung, that its data decided about."""
        pruner, before, given = self.pruner, stored.get("pruner", {}), stored["given"]
        if "pruner" not in given:
            return self
        if "pruner.name" not in given and "pruner.name" not in self.given:
            return self.with_values(pruner=PrunerConfig.model_validate(before))
        if pruner.starts is not None or pruner.name != before["name"]:
            return self
        return self.with_values(pruner=pruner.model_copy(update={"starts": before["starts"]}))

    @model_validator(mode="wrap")
    @classmethod
    def _take_names_of_code(cls, content: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        code = content.get("code", {}) if isinstance(content, Mapping) else {}
        with unknown_names_allowed(code), own_loop_of(content):
            return handler(content)

    @model_validator(mode="before")
    @classmethod
    def _note_given_keys(cls, content: Any) -> Any:
        if not isinstance(content, Mapping):
            return content
        if "given" in content:  # a definition
            keys = {key: value for key, value in content.items() if key != "folder"}
            return {"path": Path(str(content.get("folder", "")), "study.yaml"), **keys}
        return {**content, "given": frozenset(given_keys(cls, content)) - {"path"}}

    @field_validator("objective")
    @classmethod
    def _check_objectives(cls, objectives: tuple[ObjectiveConfig, ...]) -> tuple[ObjectiveConfig, ...]:
        if not objectives:
            raise ValueError("there must be at least one objective.")
        metrics = [objective.metric for objective in objectives]
        for index, metric in enumerate(metrics):
            if metric in metrics[:index]:
                refuse(Problem((index, "metric"), f"{show(metric)} is there twice. Keep one."))
        return objectives

    @field_validator("pruner")
    @classmethod
    def _check_takes_objectives(cls, pruner: PrunerConfig, info: ValidationInfo) -> PrunerConfig:
        if pruner.name not in ("promote", "none") and len(info.data.get("objective", ())) > 1:
            refuse(Problem(("name",), "must be `promote` or `none` with several objectives."))
        return pruner

    @field_validator("training", "amp")
    @classmethod
    def _check_given_once(cls, settings: Section, info: ValidationInfo) -> Section:
        other = "model" if info.field_name == "training" else "training"
        for name in type(settings).model_fields:
            if {f"{info.field_name}.{name}", f"{other}.{name}"} <= info.data.get("given", set()):
                refuse(Problem((name,), f"is given too as `{other}.{name}`. Keep one."))
        return settings

    @field_validator("search_space", mode="before")
    @classmethod
    def _check_search_space(cls, raw: Any, info: ValidationInfo) -> dict[str, Distribution]:
        space, problems = parse_search_space(raw)
        if isinstance(raw, Mapping):
            problems += fixed_and_searched(tuple(map(str, raw)), info.data.get("given", ()))
        is_planned = info.data.get("comparison") is not None
        if "sampler" in info.data and info.data["sampler"].name == "grid" and not is_planned:
            problems += grid_problems(space)
        refuse(*problems)
        return space

    @field_validator("first", mode="before")
    @classmethod
    def _check_first(cls, raw: Any, info: ValidationInfo) -> First:
        return parse_first(raw, info.data["search_space"]) if "search_space" in info.data else ()

    def problems(self) -> Iterator[Problem]:
        if has_own_loop():
            yield from own_loop_problems(self.given, self.named_metrics)
            return
        first = self.objective[0].metric
        if self.evaluation.patience is not None and first in MEASURED_METRICS:
            message = f"needs a first objective that is a metric of the model, but it is {first}."
            yield Problem(("evaluation", "patience"), message)
        if self.comparison is None:  # its configurations have run before
            yield from study_problems(self.training, self.search_space)
            yield from sampling_problems(self.data, self.training, self.search_space)
        if not self.compat.enabled and measures_parts(self.training, self.search_space):
            yield Problem(("compat", "enabled"), "must be true, because `fp32_parts: auto` makes this check.")
        searched = self.search_space.get("max_length")
        shortest = min(searched.grid()) if searched else self.training.max_length
        stride = self.data.stride
        if stride is not None and self.data.long_text == "window" and stride > shortest // 2:
            message = f"must be at most half of `max_length`, but is {stride} of {shortest}."
            yield Problem(("data", "stride"), message)


def load_study(name_or_path: str | Path) -> StudyConfig:
    """Return the study of a name or path. Raises StudyFileError with every problem of the file."""
    path = find_study_file(Path(name_or_path))
    file = read_study_file(path)
    study, problems = _checked(file.content, path, str(path))
    if study is None or problems or file.problems:
        raise file.error(problems)
    return study


def study_of(content: Mapping[str, Any]) -> StudyConfig:
    """Return the study of a mapping with the keys of a study file. Raises InputError with every problem.

    Paths are relative to the working folder.
    """
    study, problems = _checked(content, Path.cwd() / "study.yaml", "The study of this mapping")
    if study is None or problems:
        raise InputError("\n".join(map(str, problems)))
    return study


def _checked(content: Mapping[str, Any], path: Path, who: str) -> tuple[StudyConfig | None, list[Problem]]:
    """Return the study of the keys of a study file, None if it is not valid, and the problems."""
    no_keys = {"path": " Did you mean `data.path`?", "given": "", "comparison": " `hpo compare` makes it."}
    keys = {key: value for key, value in content.items() if key not in no_keys}
    problems = [
        Problem((key,), f"there is no such key.{hint}") for key, hint in no_keys.items() if key in content
    ]
    try:
        keys |= {**code_of(keys, path.parent, who), "path": path}
        return StudyConfig.model_validate(keys, context={"folder": path.parent}), problems
    except ValidationError as error:
        return None, problems + problems_of(error, StudyConfig)


def stored_study(name: str, definition: Mapping[str, Any]) -> StudyConfig:
    """Return the study of a definition in the database. Raises StorageError if it is not valid."""
    try:
        study = StudyConfig.model_validate(known_keys(StudyConfig, definition, definition["given"]))
    except ValidationError as error:
        lines = "\n".join(map(str, problems_of(error, StudyConfig)))
        raise StorageError(_not_valid(name, lines)) from None
    except (LookupError, TypeError, AttributeError) as error:
        raise StorageError(_not_valid(name, f"{type(error).__name__}: {error}")) from error
    if study.name != name:
        raise StorageError(f"The database's definition of the study {show(name)} is of {show(study.name)}.")
    return study


def _not_valid(name: str, why: str) -> str:
    return f"The database's definition of the study {show(name)} is not valid:\n{why}"
