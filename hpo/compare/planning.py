"""Choice of a comparison's trials: the best `top` configurations of the study, each under every precision
with the same seeds. A setting that `when` left out of a configuration has its default.

The question `configurations` trains each in the effective precision of its trial. Every precision is compared
with the same error. A precision with a verdict gets no more trials.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpo.config.choices import CONFIGURATIONS, MOST_SEEDS, Question
from hpo.config.comparison import (
    REFERENCE,
    SEED,
    SETTINGS,
    VALUES,
    ComparedConfiguration,
    ComparisonConfig,
    checked_precision,
)
from hpo.config.limits import MEASURED_METRICS
from hpo.config.search_space import decode
from hpo.config.study_checks import trial_problems
from hpo.config.study_config import StudyConfig
from hpo.config.trial_config import build_trial_config
from hpo.config.trial_settings import setting_of
from hpo.errors import InputError
from hpo.evaluation.contributions import unit_of
from hpo.precision.table import BASE_PRECISION, PRECISION, PRECISIONS
from hpo.study.reading.study_record import StudyRecord, TrialRecord, choosable_trials, nearest_message
from hpo.study.sampling.fronts import loss_signs
from hpo.trial.objectives import quality_objective

FIRST_SEED = 1_000_000
"""First new seed, unless the search has had one of those that may follow."""
DEFAULTS: Mapping[str, Any] = {"top": 3, "seeds": 3, "max_seeds": None, "margin": 0.5}
MOST_RUNS = 36
"""Runs of each precision with the default of `max_seeds`: those of all configurations."""


@dataclass(frozen=True)
class Request:
    """Options of `hpo compare`; None: as the comparison was begun, or the default."""

    question: Question = "precisions"
    precisions: tuple[str, ...] | None = None
    top: int | None = None
    seeds: int | None = None
    max_seeds: int | None = None
    margin: float | None = None
    anyway: bool = False
    """Train also where no precision can be shown to be as good."""

    @property
    def setting(self) -> str:
        return SETTINGS[self.question]

    def with_precisions(self, runnable: Sequence[str]) -> Request:
        """Use the canonical names of the precisions, fp32 first; by default all `runnable` ones."""
        if self.question == CONFIGURATIONS:
            return self
        try:
            names = [checked_precision(self.setting, name) for name in self.precisions or runnable]
        except ValueError as error:
            raise InputError(f"--precisions: {error}") from None
        return replace(self, precisions=tuple(dict.fromkeys([REFERENCE, *names])))


def plan_comparison(
    record: StudyRecord, config: StudyConfig, request: Request, token: str
) -> ComparisonConfig:
    """Choose the trials of a comparison. `token` is the study's.

    Raises:
        InputError: there is no complete trial, or no margin for a metric that is not in points.
    """
    setting, ranked = request.setting, ranked_trials(record)
    is_judged = request.question != CONFIGURATIONS
    best = [trial for trial in ranked if not is_judged or not _obstacle(config, trial, setting)]
    if not best:
        raise InputError(_no_trial_message(record, config, ranked, setting))
    metric = quality_objective(config.objective).metric
    if is_judged and request.margin is None and unit_of(metric) != "points":
        raise InputError(f"--margin must be given: {metric} is in {unit_of(metric)}, where no default fits.")
    if is_judged and {REFERENCE} >= {*(request.precisions or ())}:
        raise InputError(
            f"A comparison needs another precision than {REFERENCE}, but --precisions names none, or this "
            "device runs none as it is. Compare on one that does, or, for the scores alone, search with "
            "`amp.allow_emulated: true`, which makes the others count as precisions that work."
        )
    given = {option: getattr(request, option) for option in DEFAULTS}
    options = {name: DEFAULTS[name] if value is None else value for name, value in given.items()}
    if not is_judged:
        options["max_seeds"] = options["seeds"]
    names = sorted((config.search_space.keys() | {PRECISION}) - {setting, SEED})
    settings = {trial.number: _settings(config, trial, names) for trial in best}
    if is_judged:
        dependent = {name for name, searched in config.search_space.items() if setting in searched.when}
        configurations = tuple(_shared_configurations(best, settings, dependent, options["top"]))
        precisions = request.precisions or ()
    else:
        configurations = tuple(
            ComparedConfiguration(trial=one.number, params=settings[one.number], precision=_precision(one))
            for one in best[: options["top"]]
        )
        precisions = tuple(dict.fromkeys(one.precision for one in configurations))
    if options["max_seeds"] is None:
        options["max_seeds"] = max(options["seeds"], math.ceil(MOST_RUNS / len(configurations)))
    if options["seeds"] > options["max_seeds"]:
        raise InputError("--seeds must be <= --max-seeds, but got {seeds} and {max_seeds}.".format(**options))
    used = {trial.params.get(SEED, config.training.seed) for trial in record.trials}
    num_seeds = len(configurations) * MOST_SEEDS
    starts = itertools.count(FIRST_SEED, num_seeds)
    return ComparisonConfig(
        study=record.name,
        study_token=token,
        question=request.question,
        precisions=precisions,
        configurations=configurations,
        first_seed=next(one for one in starts if used.isdisjoint(range(one, one + num_seeds))),
        num_seeds=dict.fromkeys(precisions, options["seeds"]),
        test_seen="" if is_judged else _test_seen(record),
        **options,
    )


def refuse_options(names: Sequence[str]) -> None:
    """Raise InputError for options without a meaning for the question `configurations`."""
    if names:
        options = " and no ".join(f"--{name.replace('_', '-')}" for name in names)
        raise InputError(
            f"--configurations takes no {options}: each configuration is trained in its own precision, on "
            "`--seeds` new seeds, without a verdict. Leave it out."
        )


def _no_trial_message(
    record: StudyRecord, config: StudyConfig, ranked: Sequence[TrialRecord], setting: str
) -> str:
    if ranked:
        obstacle = _obstacle(config, ranked[0], setting)
        return f"--over {setting}: no complete trial of `{record.name}` can have another. {obstacle}"
    return nearest_message(record) or (
        f"A comparison needs complete trials, but the study `{record.name}` has none yet. Run it first."
    )


def _test_seen(record: StudyRecord) -> str:
    """The reasons why scores on test were seen before; empty: they were not."""
    evaluated = ", ".join(str(trial.number) for trial in record.trials if "test" in trial.detailed)
    seen = {
        "the search scored its trials on test": any(t.telemetry.get("test_metrics") for t in record.trials),
        f"test has a detailed evaluation of trial {evaluated}": evaluated,
        "`hpo compare` used test": any(one.get("split") == "test" for one in record.comparisons.values()),
    }
    return ", and ".join(reason for reason, is_true in seen.items() if is_true)


def _shared_configurations(
    best: Sequence[TrialRecord],
    settings: Mapping[int, dict[str, Any]],
    dependent: Container[str],
    top: int,
) -> Iterator[ComparedConfiguration]:
    """The best configurations for all precisions.

    Trials that differ in precision alone, or in settings that depend on it (`when`), have one configuration,
    named after the best of them. Each dependent setting has the value of its best trial.

    Args:
        settings: the searched settings by the number of the trial, without the precision and the seed.
        dependent: names of settings with a condition on the precision.
    """
    groups: dict[str, list[TrialRecord]] = {}
    for trial in best:
        shared = {name: value for name, value in settings[trial.number].items() if name not in dependent}
        groups.setdefault(json.dumps(shared, sort_keys=True), []).append(trial)
    for group in list(groups.values())[:top]:
        params = dict(settings[group[0].number])
        for trial in reversed(group):
            params |= {name: settings[trial.number][name] for name in params if name in trial.params}
        yield ComparedConfiguration(trial=group[0].number, params=params)


def ranked_trials(record: StudyRecord) -> list[TrialRecord]:
    """Return the complete trials within the study's limits, the best first; each configuration once.

    The first objective of quality decides, else the first objective.
    """
    names = record.metric_names
    index = next((index for index, name in enumerate(names) if name not in MEASURED_METRICS), 0)
    sign = loss_signs(record.directions)[index]
    ranked = sorted(
        choosable_trials(record), key=lambda trial: (sign * (trial.values or ())[index], trial.number)
    )
    chosen: dict[str, TrialRecord] = {}
    for trial in ranked:
        params = {name: value for name, value in trial.params.items() if name != SEED}
        chosen.setdefault(json.dumps(params | {PRECISION: _precision(trial)}, sort_keys=True), trial)
    return list(chosen.values())


def effective_value(trial: TrialRecord, setting: str) -> str | None:
    """Return the effective value of a precision; None: the trial ended before it was known."""
    if setting == PRECISION:
        return trial.attributes.get("fp_precision_effective")
    value: str | None = (trial.telemetry.get(setting) or {}).get("effective")
    return value


def _precision(trial: TrialRecord) -> str:
    return str(effective_value(trial, PRECISION))


def _settings(config: StudyConfig, trial: TrialRecord, names: Sequence[str]) -> dict[str, Any]:
    """The value of each searched setting, with defaults for those that `when` left out."""
    defaults = build_trial_config(config, trial.params, REFERENCE)
    given = {**decode(config.search_space, trial.params), PRECISION: _precision(trial)}
    return {name: given[name] if name in given else setting_of(defaults, name) for name in names}


def _obstacle(config: StudyConfig, trial: TrialRecord, setting: str) -> str:
    """The reason why a trial cannot have another value of a precision than fp32; empty: it can."""
    computed = _precision(trial)
    if setting == BASE_PRECISION and PRECISIONS[computed].changes_weights:
        return f"{computed} decides itself how all weights are stored."
    settings = build_trial_config(config, trial.params, REFERENCE)
    other = settings.model_copy(update={setting: VALUES[setting][1]})
    return next((str(problem) for problem in trial_problems(other)), "")
