"""Results of an earlier study as a prior: what `learn_from` shows the sampler.

TPE and GP are shown the earlier trials beside the study's own, as if these had been tried here. Values of two
studies do not compare, so an earlier trial is shown as having ended like the own one of the same rank, or a
rank worse: no number of the earlier study is ever used.

How alike the two studies are decides how often: in at most every second trial, by `likeness`. The others are
drawn without the prior, so that it can mislead those alone. It is left as soon as the trials that were drawn
with it rank behind these. Only the innermost sampler sees it: what was infeasible elsewhere, or tried there
already, says nothing here.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import optuna
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpo.config.known import fitting
from hpo.config.limits import MEASURED_METRICS
from hpo.config.search_space import SearchSpace, suggest
from hpo.device import DeviceInfo
from hpo.study.sampling.device_sampler import WrapperSampler
from hpo.study.sampling.earlier import SOURCE_ATTR, ranked
from hpo.study.sampling.feasible_sampler import is_infeasible
from hpo.study.sampling.promotion import ORIGIN_ATTR, origin_of
from hpo.study.store.optuna_internals import StudyView, storage_of, trial_id_of
from hpo.study.store.schema import studies

if TYPE_CHECKING:
    from hpo.config.study_config import StudyConfig
    from hpo.study.store.storage import Storage

MAX_SHOWN = 100
"""So many earlier trials are shown, evenly over their ranks."""
MIN_COMPARED = 3
"""So many trials with and without the prior must have ended before they are compared."""
OTHER_METRIC, OTHER_ENCODER, OTHER_DATA, OTHER_DEVICE = 0.5, 0.5, 0.5, 0.8
"""Factors of `likeness`."""

_logger = logging.getLogger(__name__)


def learn_from(
    sampler: BaseSampler, storage: Storage, config: StudyConfig, space: SearchSpace, device_kind: str
) -> None:
    """Show the innermost of a worker's samplers the results of the study that `config.learn_from` names.

    Args:
        space: what the worker draws from.
    """
    name = config.learn_from
    assert name is not None
    assert isinstance(sampler, WrapperSampler)
    if not storage.has_study(name):
        _logger.warning("learn_from: the study `%s` is gone; the search goes on without it.", name)
        return
    study = storage.load_study(name)
    trials = earlier_trials(study, space, config.sampler.seed)
    same_data = storage.stored(name, studies.c.data) == storage.stored(config.name, studies.c.data)
    kinds = {
        DeviceInfo.from_facts(facts).kind
        for trial in study.get_trials(deepcopy=False)
        if (facts := trial.user_attrs.get("telemetry", {}).get("device"))
    }
    weight = likeness(
        storage.read_definition(name),
        config.definition(),
        same_data=same_data,
        same_device=device_kind in kinds,
    )
    _logger.info("learn_from: %d trials of `%s`, weight %.2f.", len(trials), name, weight)
    if trials and weight:
        sampler.wrap_innermost(lambda inner: PriorSampler(inner, trials, f"learnt from {name}", weight))


def likeness(
    earlier: Mapping[str, Any], now: Mapping[str, Any], *, same_data: bool, same_device: bool
) -> float:
    """How much the results of one study say of another, from 0 to 1, by their definitions."""
    metrics, encoders = set(), []
    for definition in (earlier, now):
        metrics.add(definition["objective"][0]["metric"])
        encoders.append(definition["training"].get("encoder") or definition["model"]["encoder"])
    if metrics & {*MEASURED_METRICS} and (len(metrics) > 1 or not same_device):
        return 0.0
    differs = (len(metrics) > 1, encoders[0] != encoders[1], not same_data, not same_device)
    factors = (OTHER_METRIC, OTHER_ENCODER, OTHER_DATA, OTHER_DEVICE)
    return math.prod(itertools.compress(factors, differs))


def earlier_trials(study: Study, space: SearchSpace, seed: int) -> list[FrozenTrial]:
    """The trials of an earlier study as they could have been in this one, the best first.

    One with a value that is not in `space` is left out. A setting that was not searched there is drawn at
    random, so that it says nothing.
    """
    last = {origin_of(trial.number, trial.user_attrs): trial for trial in study.get_trials(deepcopy=False)}
    taken = []
    for trial in ranked(last.values(), study.direction):
        params = {name: value for name, value in trial.params.items() if name in space}
        if params and fitting(space, params) == params:
            taken.append(params)
    drawn = optuna.create_study(sampler=RandomSampler(seed=seed))
    shown = []
    for params in taken[:: math.ceil(len(taken) / MAX_SHOWN)] if taken else ():
        drawn.enqueue_trial(params)
        one = drawn.ask()
        suggest(space, one)
        shown.append(create_trial(value=0.0, params=one.params, distributions=one.distributions))
    return shown


class PriorSampler(WrapperSampler):
    """Shows its sampler `earlier` trials too, the best first, in the share `weight` / 2 of the trials.

    Such a trial has the `source`.
    """

    def __init__(
        self, sampler: BaseSampler, earlier: Sequence[FrozenTrial], source: str, weight: float
    ) -> None:
        super().__init__(sampler)
        self._earlier = earlier
        self._source = source
        self._weight = weight

    def view(self, study: Study, trial: FrozenTrial) -> Study:
        trials = [one for one in study.get_trials(deepcopy=False) if one.state != TrialState.FAIL]
        share = self._weight / 2
        is_due = math.ceil(len(trials) * share) > math.ceil((len(trials) - 1) * share)
        if not is_due or "fixed_params" in trial.system_attrs or not self._helps(study, trials):
            return study
        storage_of(study).set_trial_user_attr(trial_id_of(trial), SOURCE_ATTR, self._source)
        return StudyView(study, lambda: self._with_earlier(study, trials))

    def _helps(self, study: Study, trials: Sequence[FrozenTrial]) -> bool:
        """Whether trials that were drawn with the prior do not rank behind those that were drawn without."""
        order = ranked(trials, study.direction)
        order += [trial for trial in trials if trial.state.is_finished() and is_infeasible(trial)]
        sources = [one.user_attrs.get(SOURCE_ATTR) for one in order if ORIGIN_ATTR not in one.user_attrs]
        with_prior, without = (
            [rank for rank, source in enumerate(sources) if source == one] for one in (self._source, None)
        )
        if min(len(with_prior), len(without)) < MIN_COMPARED:
            return True
        return fmean(with_prior) <= fmean(without)

    def _with_earlier(self, study: Study, trials: list[FrozenTrial]) -> list[FrozenTrial]:
        own, shown = ranked(trials, study.direction), []
        worse = -1.0 if study.direction == StudyDirection.MAXIMIZE else 1.0
        for rank, trial in enumerate(map(copy.copy, self._earlier)):
            trial.values = [worse * rank]
            if own:
                like = own[min(rank * len(own) // len(self._earlier) + 1, len(own) - 1)]
                trial.state, trial.values = like.state, like.values
                trial.intermediate_values, trial.system_attrs = like.intermediate_values, {}
                for name, value in like.constraints.items():
                    trial.set_constraint(name, value)
            shown.append(trial)
        return shown + trials
