"""What Optuna's Gaussian process is shown: it looks at COMPLETE trials only.

So it would never learn what is infeasible and propose it again, and learn nothing from what the pruner
stopped. It sees a copy of the study in which such trials are COMPLETE with a value that stands for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpo.study.sampling.device_sampler import WrapperSampler
from hpo.study.sampling.feasible_sampler import is_infeasible


class PrunedAwareSampler(WrapperSampler):
    """Shows its sampler PRUNED trials as COMPLETE.

    One that the pruner stopped has the value of its best evaluation. An infeasible one has the worst of these
    values and those of the COMPLETE trials.
    """

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        trials = study.get_trials(deepcopy=False)
        self._copy = _with_pruned(study, trials)
        numbers = [other.number for other in trials]
        self._copied_trial = self._copy.get_trials(deepcopy=False)[numbers.index(trial.number)]
        super().before_trial(self._copy, self._copied_trial)

    def infer_relative_search_space(self, *_: object) -> dict[str, BaseDistribution]:
        return super().infer_relative_search_space(self._copy, self._copied_trial)

    def sample_relative(
        self, _: Study, __: FrozenTrial, space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return super().sample_relative(self._copy, self._copied_trial, space)


def _with_pruned(study: Study, trials: Sequence[FrozenTrial]) -> Study:
    value_of = {t.number: _values(study, t) for t in trials if not is_infeasible(t)}
    known = [values for values in value_of.values() if values] or [[0.0] * len(study.directions)]
    worst = [
        min(of_objective) if direction == StudyDirection.MAXIMIZE else max(of_objective)
        for direction, of_objective in zip(study.directions, zip(*known, strict=True), strict=True)
    ]
    copy = optuna.create_study(directions=study.directions)
    for t in trials:
        shown = worst if is_infeasible(t) else value_of[t.number]
        copy.add_trial(
            optuna.trial.create_trial(
                state=t.state if shown is None else TrialState.COMPLETE,
                values=shown,
                params=t.params,
                distributions=t.distributions,
            )
        )
    return copy


def _values(study: Study, trial: FrozenTrial) -> list[float] | None:
    """Of a COMPLETE trial its values, of a PRUNED one its best evaluation; None: there is nothing finite."""
    if trial.state == TrialState.COMPLETE:
        return trial.values
    reports = filter(math.isfinite, trial.intermediate_values.values())
    better = max if study.directions[0] == StudyDirection.MAXIMIZE else min
    best = better(reports, default=None) if trial.state == TrialState.PRUNED else None
    return None if best is None else [best]
