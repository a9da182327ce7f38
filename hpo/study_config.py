"""A study: what is searched for, on which data, with which model, how long, and what each trial may vary.

`load_study` reads it from a study file. Everything that can be known to be wrong without data, model or
device is refused here, all of it at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from hpo.distributions import CategoricalDistribution, Distribution, FloatDistribution, parse_search_space
from hpo.errors import StudyFileError, did_you_mean
from hpo.precision import AmpConfig
from hpo.study_file import Problem, problems_of, read_study_file, refused, show, validation_error
from hpo.trial_settings import BUDGETS, LOSS_WEIGHT, Encoder, Section, Switch, TrialSettings

TASK_KINDS = (
    "single_label",
    "multi_label",
    "token_classification",
    "span_extraction",
    "span_per_label",
    "regression",
)
SMALLER_IS_BETTER = ("peak_memory_bytes", "mae")
TRIAL_MEASURES = (
    "score",
    "train_examples_per_second",
    "train_tokens_per_second",
    "evaluation_examples_per_second",
    "peak_memory_bytes",
)
"""What an objective may name besides `<task>/<metric>`."""


def _study_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise ValueError(f"must be letters, digits, `.`, `_` and `-`, at most 100, but got {show(name)}.")
    return name


def _path(value: Any, info: ValidationInfo) -> Any:
    """A path of a study file is relative to that file."""
    if not isinstance(value, (str, Path)) or not str(value).strip():
        raise ValueError(f"must be a path, but got {show(value)}.")
    folder = (info.context or {}).get("folder", Path())
    return Path(folder, Path(value).expanduser()).absolute()


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, Mapping) else value


StudyName = Annotated[str, AfterValidator(_study_name)]
StudyPath = Annotated[Path, BeforeValidator(_path)]
Count = Annotated[int, Field(ge=1)]


class ObjectiveConfig(Section):
    """What a trial is judged by. A list of these makes a study with several objectives."""

    metric: str = Field(
        "score",
        description="`score` (mean of the tasks' primary metrics), `<task>/<metric>` such as "
        "`criteria/f1_micro`, `train_examples_per_second`, `train_tokens_per_second`, "
        "`evaluation_examples_per_second` or `peak_memory_bytes`.",
    )
    direction: Literal["maximize", "minimize"] = Field("maximize", description="Which way is better.")

    @model_validator(mode="after")
    def _check(self) -> ObjectiveConfig:
        if "/" not in self.metric and self.metric not in TRIAL_MEASURES:
            hint = did_you_mean(self.metric, TRIAL_MEASURES)
            raise refused(
                ("metric",), f"unknown metric {show(self.metric)}; one of a task is `task/name`.{hint}"
            )
        if self.metric.rsplit("/")[-1] in SMALLER_IS_BETTER and self.direction == "maximize":
            raise refused(("direction",), f"must be `minimize` for {show(self.metric)}: smaller is better.")
        return self


class _Choice(Section):
    """A named algorithm of Optuna with its options; each name takes some of the options."""

    OPTIONS: ClassVar[dict[str, tuple[str, ...]]]
    name: str

    @model_validator(mode="after")
    def _check_options(self) -> _Choice:
        allowed = self.OPTIONS[self.name]
        takes = f"{self.name} takes {', '.join(allowed)}." if allowed else f"{self.name} takes none."
        problems = [
            Problem((option,), f"is not an option of {self.name}; {takes}")
            for option in type(self).model_fields
            if option not in ("name", "seed", *allowed) and getattr(self, option) is not None
        ]
        if problems:
            raise validation_error(problems)
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The options that the study gives, as keyword arguments of Optuna's class."""
        return self.model_dump(exclude={"name", "seed"}, exclude_none=True)


class SamplerConfig(_Choice):
    """Which configuration is tried next. Options left out are Optuna's defaults."""

    OPTIONS: ClassVar[dict[str, tuple[str, ...]]] = {
        "tpe": ("n_startup_trials", "n_ei_candidates", "multivariate", "constant_liar"),
        "gp": ("n_startup_trials", "deterministic_objective"),
        "cmaes": ("n_startup_trials", "sigma0", "popsize"),
        "nsga2": ("population_size", "mutation_prob", "crossover_prob", "swapping_prob"),
        "random": (),
        "grid": (),
        "qmc": ("qmc_type", "scramble"),
    }
    name: Literal["tpe", "gp", "cmaes", "nsga2", "random", "grid", "qmc"] = Field(
        "tpe", description="Optuna's sampler."
    )
    seed: int = Field(42, ge=0, lt=2**31, description="Seed; worker number n adds n.")
    n_startup_trials: Annotated[int, Field(ge=0)] | None = Field(
        None, description="tpe, gp, cmaes: random trials before the sampler learns."
    )
    n_ei_candidates: Count | None = Field(None, description="tpe: candidates compared for one suggestion.")
    multivariate: Switch | None = Field(None, description="tpe: model the settings together.")
    constant_liar: Switch | None = Field(None, description="tpe: keep parallel workers apart.")
    deterministic_objective: Switch | None = Field(None, description="gp: results have no noise.")
    sigma0: Annotated[float, Field(gt=0)] | None = Field(None, description="cmaes: first step size.")
    popsize: Annotated[int, Field(ge=2)] | None = Field(None, description="cmaes: trials in a generation.")
    population_size: Annotated[int, Field(ge=2)] | None = Field(
        None, description="nsga2: trials in a generation."
    )
    mutation_prob: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="nsga2: chance that a setting mutates."
    )
    crossover_prob: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="nsga2: chance that two parents are crossed."
    )
    swapping_prob: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="nsga2: chance that a setting comes from the other parent."
    )
    qmc_type: Literal["sobol", "halton"] | None = Field(None, description="qmc: the sequence.")
    scramble: Switch | None = Field(None, description="qmc: scramble the sequence.")


class PrunerConfig(_Choice):
    """When a trial stops early. Steps are evaluations; options left out are Optuna's defaults."""

    OPTIONS: ClassVar[dict[str, tuple[str, ...]]] = {
        "hyperband": ("min_resource", "max_resource", "reduction_factor"),
        "asha": ("min_resource", "reduction_factor", "min_early_stopping_rate"),
        "median": ("n_startup_trials", "n_warmup_steps", "interval_steps", "n_min_trials"),
        "percentile": ("percentile", "n_startup_trials", "n_warmup_steps", "interval_steps", "n_min_trials"),
        "patient": ("patience", "min_delta"),
        "none": (),
    }
    name: Literal["hyperband", "asha", "median", "percentile", "patient", "none"] = Field(
        "none", description="Optuna's pruner; `none` with several objectives."
    )
    min_resource: Count | None = Field(None, description="hyperband, asha: evaluations of the first rung.")
    max_resource: Count | None = Field(None, description="hyperband: evaluations of a whole trial.")
    reduction_factor: Annotated[int, Field(ge=2)] | None = Field(
        None, description="hyperband, asha: one of so many trials goes on."
    )
    min_early_stopping_rate: Annotated[int, Field(ge=0)] | None = Field(
        None, description="asha: rungs left out at the start."
    )
    percentile: Annotated[float, Field(ge=0, le=100)] | None = Field(
        None, description="percentile: the best so many percent of trials go on. Default 25."
    )
    n_startup_trials: Annotated[int, Field(ge=0)] | None = Field(
        None, description="median, percentile: trials that are never pruned."
    )
    n_warmup_steps: Annotated[int, Field(ge=0)] | None = Field(
        None, description="median, percentile: evaluations without pruning."
    )
    interval_steps: Count | None = Field(None, description="median, percentile: evaluations between checks.")
    n_min_trials: Count | None = Field(None, description="median, percentile: trials needed to compare with.")
    patience: Annotated[int, Field(ge=0)] | None = Field(
        None, description="patient: evaluations without improvement before the trial stops. Default 2."
    )
    min_delta: Annotated[float, Field(ge=0)] | None = Field(
        None, description="patient: smallest change that counts as improvement."
    )

    @property
    def options(self) -> dict[str, Any]:
        required: dict[str, dict[str, Any]] = {
            "percentile": {"percentile": 25.0},
            "patient": {"patience": 2},
        }
        return required.get(self.name, {}) | super().options


class FilesConfig(Section):
    """One file for each split, where they do not have the usual names."""

    train: StudyPath | None = Field(None, description="Training split.")
    validation: StudyPath | None = Field(None, description="Validation split.")
    test: StudyPath | None = Field(None, description="Test split.")


class ColumnsConfig(Section):
    """Which column holds what (csv, parquet, hub)."""

    id: str | None = Field(None, description="Column with a unique id; left out, the row's number.")
    text: str = Field("text", description="Column with the text.")
    labels: dict[str, str] = Field(default_factory=dict, description="Task name to column of labels.")
    spans: dict[str, str] = Field(
        default_factory=dict, description="Span or task name to column of spans, as `[[start, end], ...]`."
    )


class HubConfig(Section):
    """A data set of the Hugging Face hub."""

    name: str = Field(description="Id of the data set, or a local folder that `datasets` loads.")
    config: str | None = Field(None, description="Configuration of the data set.")
    revision: str | None = Field(None, description="Commit, tag or branch.")
    splits: dict[Literal["train", "validation", "test"], str] = Field(
        default_factory=dict, description="Split here to split there; left out, the same names."
    )


class LimitsConfig(Section):
    """At most so many examples of a split."""

    train: Count | None = Field(None, description="Training split.")
    validation: Count | None = Field(None, description="Validation split.")
    test: Count | None = Field(None, description="Test split.")


class SyntheticConfig(Section):
    """Generated clinical-style posts with criteria and evidence."""

    num_train: Count = Field(2000, description="Training examples.")
    num_validation: Count = Field(300, description="Validation examples.")
    num_test: Count = Field(300, description="Test examples.")
    seed: int = Field(0, ge=0, description="Seed of the generator.")
    min_sentences: Count = Field(2, description="Sentences of the shortest posts.")
    max_sentences: Count = Field(
        6, description="Sentences of the longest posts; more where evidence needs it."
    )
    label_noise: float = Field(0.02, ge=0, le=1, description="Chance that a criterion's label is missed.")

    @model_validator(mode="after")
    def _check_sentences(self) -> SyntheticConfig:
        if self.min_sentences > self.max_sentences:
            came = f"{self.min_sentences} and {self.max_sentences}"
            raise refused(("min_sentences",), f"`min_sentences <= max_sentences` must hold, but got {came}.")
        return self


class DataConfig(Section):
    """The data set."""

    SOURCE_KEYS: ClassVar[dict[str, tuple[str, ...]]] = {
        "synthetic": ("synthetic",),
        "jsonl": ("path", "files", "tasks"),
        "csv": ("path", "files", "tasks", "columns"),
        "parquet": ("path", "files", "tasks", "columns"),
        "hub": ("hub", "tasks", "columns"),
    }
    source: Literal["synthetic", "jsonl", "csv", "parquet", "hub"] = Field(
        description="Where the examples come from."
    )
    path: StudyPath | None = Field(
        None, description="Folder with `train`, `validation` and `test` files (jsonl, csv, parquet)."
    )
    files: FilesConfig = Field(default_factory=FilesConfig, description="Files with other names.")
    tasks: Path | dict[str, Any] | None = Field(
        None,
        description="The tasks: a path, or `{task: {kind: ..., classes: [...]}}` here. Left out, the "
        "`tasks.json` in `path`.",
    )
    columns: ColumnsConfig = Field(default_factory=ColumnsConfig, description="Columns (csv, parquet, hub).")
    hub: HubConfig | None = Field(None, description="Data set of the hub.")
    synthetic: SyntheticConfig = Field(default_factory=SyntheticConfig, description="Sizes and seed.")
    limits: LimitsConfig = Field(default_factory=LimitsConfig, description="Use only a part.")
    validation_fraction: float = Field(
        0.1, gt=0, lt=1, description="Share of training examples for validation when there is no such split."
    )
    test_fraction: float = Field(
        0.0, ge=0, lt=1, description="Share of training examples for testing when there is no such split."
    )
    long_text: Literal["truncate", "window"] = Field(
        "truncate", description="A text over `max_length`: cut it, or cover it with overlapping windows."
    )
    stride: int = Field(64, ge=0, description="Tokens that neighbouring windows share.")
    pair_segments: Annotated[tuple[str, str], Field(strict=False)] | None = Field(
        None, description="Two named segments of the text, encoded as a pair."
    )

    @field_validator("tasks", mode="before")
    @classmethod
    def _check_tasks(cls, value: Any, info: ValidationInfo) -> Any:
        """Tasks in the study file get the form of a `tasks.json`: `{"tasks": {name: task}}`."""
        if value is None or isinstance(value, (str, Path)):
            return None if value is None else _path(value, info)
        if not isinstance(value, Mapping):
            raise refused((), f"must be a path or a mapping of task names to tasks, but got {show(value)}.")
        wrapped = isinstance(value.get("tasks"), Mapping) and "kind" not in value["tasks"]
        tasks, above = (value["tasks"], ("tasks",)) if wrapped else (value, ())
        problems = [] if tasks else [Problem(above, "there must be at least one task.")]
        for name, task in tasks.items():
            if not isinstance(task, Mapping):
                problems.append(Problem((*above, name), f"must be a mapping with `kind`, got {show(task)}."))
            elif task.get("kind") not in TASK_KINDS:
                kinds = ", ".join(TASK_KINDS)
                message = (
                    f"unknown kind {show(task['kind'])}.{did_you_mean(str(task['kind']), TASK_KINDS)}"
                    if "kind" in task
                    else f"must be given: one of {kinds}."
                )
                problems.append(Problem((*above, name, "kind"), message))
        if problems:
            raise validation_error(problems)
        return dict(value) if wrapped else {"tasks": dict(value)}

    @model_validator(mode="after")
    def _check_source(self) -> DataConfig:
        problems = []
        own = set(chain.from_iterable(self.SOURCE_KEYS.values()))
        for key in sorted(own - set(self.SOURCE_KEYS[self.source])):
            if getattr(self, key) == type(self).model_fields[key].get_default(call_default_factory=True):
                continue
            users = ", ".join(source for source, keys in self.SOURCE_KEYS.items() if key in keys)
            problems.append(Problem((key,), f"is read with source {users}, but the source is {self.source}."))
        if "path" in self.SOURCE_KEYS[self.source]:
            if self.path is None and self.files.train is None:
                problems.append(
                    Problem(("path",), f"must be given for {self.source}, or else `files.train`.")
                )
            elif self.path is None and self.tasks is None:
                problems.append(
                    Problem(("tasks",), "must be given where there is no `path` with a tasks.json.")
                )
        if self.source == "hub":
            missing = [key for key in ("hub", "tasks") if getattr(self, key) is None]
            problems += [Problem((key,), "must be given for source hub.") for key in missing]
        if self.validation_fraction + self.test_fraction >= 1:
            problems.append(
                Problem(("test_fraction",), "validation and test must leave a part for training.")
            )
        if problems:
            raise validation_error(problems)
        return self


class ModelConfig(Section):
    """The encoder."""

    encoder: Encoder = Field(
        "minilm",
        description="`minilm` (comes with the package), a hub id, a local folder, or a mapping with the "
        "config of a fresh encoder: `model_type`, that type's keys, and `tokenizer`.",
    )
    revision: str | None = Field(None, description="Commit, tag or branch on the hub.")
    trust_remote_code: Switch = Field(False, description="Run the Python code that comes with the encoder.")


class CompatConfig(Section):
    """Bounds of the check that a precision works with this model, on a dummy batch against fp32."""

    enabled: Switch = Field(True, description="Check before training.")
    degraded_logits_relative_error: float = Field(
        0.1, gt=0, description="`degraded` above this error of a head's logits."
    )
    incompatible_logits_relative_error: float = Field(
        0.5, gt=0, description="`incompatible` above this error of a head's logits."
    )
    degraded_gradient_cosine: float = Field(
        0.95, ge=-1, le=1, description="`degraded` below this cosine between the gradients."
    )
    incompatible_gradient_cosine: float = Field(
        0.5, ge=-1, le=1, description="`incompatible` below this cosine between the gradients."
    )

    @model_validator(mode="after")
    def _check_order(self) -> CompatConfig:
        if self.degraded_logits_relative_error > self.incompatible_logits_relative_error:
            raise refused(
                ("degraded_logits_relative_error",), "must be <= `incompatible_logits_relative_error`."
            )
        if self.degraded_gradient_cosine < self.incompatible_gradient_cosine:
            raise refused(("degraded_gradient_cosine",), "must be >= `incompatible_gradient_cosine`.")
        return self


class EvaluationConfig(Section):
    """When and how a trial is evaluated on the validation split."""

    per_epoch: Count = Field(
        1, description="Evaluations in each of the trial's `epochs`; in the whole trial with another budget."
    )
    per_trial: Count | None = Field(
        None,
        description="Evaluations in the whole trial, spread evenly over its budget; goes before `per_epoch`.",
    )
    batch_tokens: Count = Field(8192, description="Tokens of one batch, padding included.")


class CheckpointConfig(Section):
    """What is kept of a trial."""

    top_k: Annotated[int, Field(ge=0)] = Field(
        3, description="Best trials of a study that keep their weights."
    )
    every_seconds: float = Field(30.0, gt=0, description="Seconds between checkpoints of a running trial.")


class StudyConfig(Section):
    """A study."""

    name: StudyName = Field(description="Name of the study in the database.")
    objective: Annotated[tuple[ObjectiveConfig, ...], Field(strict=False), BeforeValidator(_as_list)] = Field(
        (ObjectiveConfig(),), description="What is optimised; a list of them for several objectives."
    )
    sampler: SamplerConfig = Field(SamplerConfig(), description="Which configuration is tried next.")
    pruner: PrunerConfig = Field(PrunerConfig(), description="When a trial stops early.")
    n_trials: Count = Field(20, description="Trials of the study, over all workers.")
    timeout: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Seconds after which a worker starts no further trial."
    )
    max_retries: Annotated[int, Field(ge=0)] = Field(
        1, description="How often a `failed` trial is tried again; other outcomes never are."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="`auto` takes CUDA where there is one."
    )
    data: DataConfig = Field(description="The data set.")
    model: ModelConfig = Field(ModelConfig(), description="The encoder.")
    training: TrialSettings = Field(TrialSettings(), description="Settings that are the same in all trials.")
    amp: AmpConfig = Field(AmpConfig(), description="Mixed precision and loss scaling.")
    compat: CompatConfig = Field(CompatConfig(), description="Check that a precision works before training.")
    evaluation: EvaluationConfig = Field(
        EvaluationConfig(), description="Evaluation on the validation split."
    )
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="What is kept of a trial.")
    search_space: dict[str, Distribution] = Field(
        default_factory=dict,
        validate_default=True,
        description="Settings that are searched, each with its distribution.",
    )
    path: Path = Field(Path("study.yaml"), exclude=True, description="The study file; not a key of it.")

    @property
    def fixed(self) -> TrialSettings:
        """The settings of `training:`; those that it does not give have their defaults."""
        return self.training

    def definition(self) -> dict[str, Any]:
        """The study as JSON, as the database keeps it; `StudyConfig.model_validate` reads it again."""
        given_only = ("model", "training", "amp")
        dumped = self.model_dump(mode="json", exclude={"path", *given_only})
        return dumped | {
            key: getattr(self, key).model_dump(mode="json", exclude_unset=True) for key in given_only
        }

    @field_validator("objective")
    @classmethod
    def _check_objectives(cls, objectives: tuple[ObjectiveConfig, ...]) -> tuple[ObjectiveConfig, ...]:
        if not objectives:
            raise refused((), "there must be at least one objective.")
        metrics = [objective.metric for objective in objectives]
        for index, metric in enumerate(metrics):
            if metric in metrics[:index]:
                raise refused((index, "metric"), f"{show(metric)} is there twice. Keep one.")
        return objectives

    @field_validator("sampler")
    @classmethod
    def _check_sampler(cls, sampler: SamplerConfig, info: ValidationInfo) -> SamplerConfig:
        if sampler.name == "cmaes" and len(info.data.get("objective", ())) > 1:
            raise refused(("name",), "cmaes takes one objective. Use tpe, gp or nsga2.")
        return sampler

    @field_validator("pruner")
    @classmethod
    def _check_pruner(cls, pruner: PrunerConfig, info: ValidationInfo) -> PrunerConfig:
        if pruner.name != "none" and len(info.data.get("objective", ())) > 1:
            raise refused(("name",), "must be `none` with several objectives: Optuna cannot prune by them.")
        return pruner

    @field_validator("training")
    @classmethod
    def _check_training(cls, training: TrialSettings, info: ValidationInfo) -> TrialSettings:
        if "encoder" in training.model_fields_set and "encoder" in _given("model", info):
            raise refused(("encoder",), "is given too as `model.encoder`. Keep one.")
        return training

    @field_validator("amp")
    @classmethod
    def _check_amp(cls, amp: AmpConfig, info: ValidationInfo) -> AmpConfig:
        if twice := sorted(amp.model_fields_set & _given("training", info)):
            raise refused((twice[0],), f"is given too as `training.{twice[0]}`. Keep one.")
        return amp

    @field_validator("search_space", mode="before")
    @classmethod
    def _check_search_space(cls, raw: Any, info: ValidationInfo) -> dict[str, Distribution]:
        space, problems = parse_search_space(raw)
        if isinstance(raw, Mapping):
            problems += _fixed_and_searched(raw, info)
        problems += _sampler_problems(space, info)
        problems += _stride_problems(space, info)
        if problems:
            raise validation_error(problems)
        return space


def _given(section: str, info: ValidationInfo) -> set[str]:
    """The keys that the study gives in `section`, also where the section itself is not valid."""
    if section in info.data:
        model = info.data[section]
        keys, loss_weight = set(model.model_fields_set), getattr(model, "loss_weight", {})
    else:
        raw = (info.context or {}).get("content", {}).get(section)
        keys = set(raw) if isinstance(raw, Mapping) else set()
        loss_weight = raw["loss_weight"] if "loss_weight" in keys else {}
    return keys | {f"{LOSS_WEIGHT}{task}" for task in loss_weight or ()}


def _fixed_and_searched(space: Mapping[str, Any], info: ValidationInfo) -> Iterator[Problem]:
    for section in ("training", "model", "amp"):
        for name in space:
            if name in _given(section, info):
                yield Problem((name,), f"is fixed too, as `{section}.{name}`. Fix it or search it, not both.")
    searched = [budget for budget in BUDGETS if budget in space]
    fixed = [budget for budget in BUDGETS if budget in _given("training", info) and budget not in searched]
    if len(searched) > 1 or (searched and fixed):
        both = " and ".join([*searched, *(f"training.{budget}" for budget in fixed)])
        yield Problem((searched[0],), f"a trial has one budget, but this study gives {both}. Keep one.")


def _sampler_problems(space: Mapping[str, Distribution], info: ValidationInfo) -> Iterator[Problem]:
    sampler = info.data["sampler"].name if "sampler" in info.data else None
    if sampler == "cmaes":
        numeric = [
            name
            for name, distribution in space.items()
            if not isinstance(distribution, CategoricalDistribution)
            and distribution.low < distribution.high
            and not distribution.when
        ]
        if len(numeric) < 2:
            came = " and ".join(numeric) or "none"
            yield Problem(
                (), f"cmaes needs two float or int settings without `when`, but has {came}. Use tpe."
            )
    if sampler != "grid":
        return
    num_combinations = 1
    for name, distribution in space.items():
        if distribution.when:
            yield Problem((name, "when"), "a grid combines all values: `when` would run some of them twice.")
        if isinstance(distribution, FloatDistribution) and distribution.step is None:
            yield Problem((name, "step"), "must be given for a grid; or list the values as `choices`.")
        else:
            num_combinations *= len(distribution.grid())
    if info.data.get("n_trials", 0) > num_combinations:
        yield Problem(
            (), f"the grid has {num_combinations} combinations, fewer than `n_trials`. Lower `n_trials`."
        )


def _stride_problems(space: Mapping[str, Distribution], info: ValidationInfo) -> Iterator[Problem]:
    data, training, searched = info.data.get("data"), info.data.get("training"), space.get("max_length")
    if data is None or training is None or data.long_text != "window":
        return
    if isinstance(searched, CategoricalDistribution):
        shortest = min(searched.choices)
    else:
        shortest = searched.low if searched else training.max_length
    if data.stride > shortest // 2:
        yield Problem(
            ("max_length",) if searched else (),
            f"`data.stride` must be at most half of `max_length`, but is {data.stride} of {shortest}.",
        )


def load_study(name_or_path: str | Path, studies_dir: Path | None = None) -> StudyConfig:
    """The study called `name_or_path` in `studies/`, or in the YAML file of that path.

    `studies/` is the one in the working folder, else the one of the project. Raises StudyFileError, which
    lists every problem of the file.
    """
    path = _find(name_or_path, studies_dir)
    file = read_study_file(path)
    content = file.content
    context = {"folder": path.parent, "content": content}
    problems = []
    if "path" in content:
        known = [key for key in StudyConfig.model_fields if key != "path"]
        problems.append(Problem(("path",), f"there is no such key.{did_you_mean('path', known)}"))
    try:
        study = StudyConfig.model_validate({**content, "path": path}, context=context)
    except ValidationError as error:
        problems += problems_of(error, StudyConfig, content)
    if problems or file.problems:
        raise file.error(problems)
    return study


def _find(name_or_path: str | Path, studies_dir: Path | None) -> Path:
    given = Path(name_or_path)
    if given.suffix in (".yaml", ".yml") or len(given.parts) != 1:
        return given.expanduser()
    folders = [studies_dir] if studies_dir else [Path("studies"), Path(__file__).parents[1] / "studies"]
    folders = list({folder.resolve(): folder for folder in reversed(folders)}.values())[::-1]
    for folder in folders:
        if (folder / f"{given}.yaml").is_file():
            return folder / f"{given}.yaml"
    known = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    hint = did_you_mean(str(given), known) if known else ""
    listed = f" Studies: {', '.join(known)}." if "Known" not in hint else ""
    places = " and ".join(str(folder) for folder in folders)
    raise StudyFileError(f"there is no study {show(str(given))} in {places}.{hint}{listed}")
