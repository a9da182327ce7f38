"""Chooses what a comparison trains: the best `top` configurations of the study, each under every precision
with the same seeds. A setting that `when` left out of a configuration has its default. The question
`configurations` trains each in the precision that its trial really had.

All precisions are compared, each with the same error. A precision that has its verdict gets no more trials.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpo.config.choices import CONFIGURATIONS, Question
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
from hpo.study.reading.study_record import choosable_trials, nearest_told
from hpo.study.sampling.fronts import loss_signs
from hpo.trial.objectives import quality_objective

if TYPE_CHECKING:
    from hpo.study.reading.study_record import StudyRecord, TrialRecord

FIRST_SEED = 1_000_000
"""Seeds from here on are new ones, unless the search has had such."""


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
    def setting(self) -> str:
        return SETTINGS[self.question]

    def checked(self, runnable: Sequence[str]) -> Request:
        """With the canonical names of the precisions, fp32 ahead; left out, those that are `runnable`."""
        if self.question == CONFIGURATIONS:
            return self
        try:
            given = [checked_precision(self.setting, name) for name in self.precisions or runnable]
        except ValueError as error:
            raise InputError(f"--precisions: {error}") from None
        return replace(self, precisions=tuple(dict.fromkeys([REFERENCE, *given])))


DEFAULTS: Mapping[str, Any] = {"top": 3, "seeds": 3, "max_seeds": 12, "margin": 0.5}


def plan_comparison(
    record: StudyRecord, config: StudyConfig, request: Request, token: str
) -> ComparisonConfig:
    """Choose what is compared. `token` is the study's. Raises InputError where it has no complete trial, or
    where no margin is given for a metric that is not in points."""
    setting, ranked = request.setting, by_rank(record)
    has_own = request.question == CONFIGURATIONS
    best = [trial for trial in ranked if has_own or not _why_not(config, trial, setting)]
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
    if not has_own and request.margin is None and unit_of(decides) != "points":
        raise InputError(
            f"--margin must be given: {decides} is in {unit_of(decides)}, where no default fits."
        )
    asked = {option: DEFAULTS[option] if value is None else value for option, value in given.items()}
    if not has_own and {REFERENCE} >= {*(request.precisions or ())}:
        raise InputError(
            f"A comparison needs another precision than {REFERENCE}, but --precisions names none, or this "
            "device runs none as it is. Compare on one that does, or, for the scores alone, search with "
            "`amp.allow_emulated: true`, which makes the others count as precisions that work."
        )
    if has_own:
        asked["max_seeds"] = asked["seeds"]
    if asked["seeds"] > asked["max_seeds"]:
        raise InputError("--seeds must be <= --max-seeds, but got {seeds} and {max_seeds}.".format(**asked))
    names = sorted((config.search_space.keys() | {PRECISION}) - {setting, SEED})
    settings = {trial.number: _settings_of(config, trial, names) for trial in best}
    own = {name for name, searched in config.search_space.items() if setting in searched.when}
    if has_own:
        configurations = tuple(
            ComparedConfiguration(trial=one.number, params=settings[one.number], precision=precision_of(one))
            for one in best[: asked["top"]]
        )
        precisions = tuple(dict.fromkeys(one.precision for one in configurations))
    else:
        configurations = tuple(_compared(best, settings, own, asked["top"]))
        precisions = request.precisions or ()
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
        num_seeds=dict.fromkeys(precisions, asked["seeds"]),
        margin=asked["margin"],
        test_seen=_test_seen(record) if has_own else "",
    )


Settings = Mapping[int, dict[str, Any]]
"""What is searched but what is compared and the seed, by the number of the trial."""


def refuse_options(names: Sequence[str]) -> None:
    """Raise InputError for options that the question `configurations` does not take."""
    if names:
        options = " and no ".join(f"--{name.replace('_', '-')}" for name in names)
        raise InputError(
            f"--configurations takes no {options}: each configuration is trained in its own precision, on "
            "`--seeds` new seeds, without a verdict. Leave it out."
        )


def _test_seen(record: StudyRecord) -> str:
    """How scores on test were seen before now, for a sentence. Empty: they were not."""
    evaluated = ", ".join(str(trial.number) for trial in record.trials if "test" in trial.detailed)
    seen = {
        "the search scored its trials on test": any(t.telemetry.get("test_metrics") for t in record.trials),
        f"test has a detailed evaluation of trial {evaluated}": evaluated,
        "`hpo compare` used test": any(one.get("split") == "test" for one in record.comparisons.values()),
    }
    return ", and ".join(how for how, is_so in seen.items() if is_so)


def _compared(
    best: Sequence[TrialRecord], settings: Settings, own: Container[str], top: int
) -> Iterator[ComparedConfiguration]:
    """The best configurations. Trials that differ in precision alone have one configuration, by the better of
    them. So have trials that differ in settings `own` to a precision (`when`): each setting has its best
    trial's value.
    """
    groups: dict[str, list[TrialRecord]] = {}
    for trial in best:
        shared = {name: value for name, value in settings[trial.number].items() if name not in own}
        groups.setdefault(json.dumps(shared, sort_keys=True), []).append(trial)
    for group in list(groups.values())[:top]:
        params = dict(settings[group[0].number])
        for trial in reversed(group):
            params |= {name: settings[trial.number][name] for name in params if name in trial.params}
        yield ComparedConfiguration(trial=group[0].number, params=params)


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
