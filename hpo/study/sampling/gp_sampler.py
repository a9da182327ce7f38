"""What Optuna's Gaussian process is shown: it looks at COMPLETE trials only.

So it would never learn what is infeasible and propose it again, and learn nothing from what the pruner
stopped. It sees a copy of the study in which such trials are COMPLETE with a value that stands for them.
"""

from __future__ import annotations

import math
import statistics
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

    One that the pruner stopped has its best evaluation, and what trials that went on gained after that
    evaluation in the median: an estimate that only the sampler sees. An infeasible one has the worst of these
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
    complete = [t for t in trials if t.state == TrialState.COMPLETE]
    value_of = {t.number: t.values for t in complete} | _expected(study, complete, trials)
    known = list(value_of.values()) or [[0.0] * len(study.directions)]
    worst = [
        min(of_objective) if direction == StudyDirection.MAXIMIZE else max(of_objective)
        for direction, of_objective in zip(study.directions, zip(*known, strict=True), strict=True)
    ]
    copy = optuna.create_study(directions=study.directions)
    for t in trials:
        shown = worst if is_infeasible(t) else value_of.get(t.number)
        copy.add_trial(
            optuna.trial.create_trial(
                state=t.state if shown is None else TrialState.COMPLETE,
                values=shown,
                params=t.params,
                distributions=t.distributions,
            )
        )
    return copy


def _expected(
    study: Study, complete: Sequence[FrozenTrial], trials: Sequence[FrozenTrial]
) -> dict[int, list[float]]:
    """{trial number: value} of what the pruner stopped: its best evaluation and what others gained later."""
    gain_after: dict[int, float] = {}
    expected = {}
    for t in trials:
        if t.state != TrialState.PRUNED or is_infeasible(t) or (step := t.last_step) is None:
            continue
        if step not in gain_after:
            then = ((other.values[0], _best_until(study, other, step)) for other in complete)
            gains = [value - best for value, best in then if best is not None]
            gain_after[step] = statistics.median(gains) if gains else 0.0
        if (best := _best_until(study, t, step)) is not None:
            expected[t.number] = [best + gain_after[step]]
    return expected


def _best_until(study: Study, trial: FrozenTrial, last_step: int) -> float | None:
    """The trial's best evaluation until `last_step`; None without a finite one."""
    reports = [
        value
        for step, value in trial.intermediate_values.items()
        if step <= last_step and math.isfinite(value)
    ]
    better = max if study.directions[0] == StudyDirection.MAXIMIZE else min
    return better(reports, default=None)
