"""A study as the sampler of one worker sees it, whose trials end at once, as a script says."""

import math
from collections.abc import Callable
from typing import Any

import optuna
from optuna.trial import TrialState

from hpo.config.limits import FEASIBLE, violations
from hpo.config.search_space import suggest
from hpo.outcome import Outcome
from hpo.study.sampling.samplers import build_sampler

Params = dict[str, Any]


def best_at_1e_4(params: Params) -> float:
    return 1.0 - abs(math.log10(params["learning_rate"]) + 4.0)


class ScriptedStudy:
    """The study of `config`, which workers with the same `storage` share.

    Args:
        script: what comes of a trial with these parameters: a value for each objective, or an outcome.
        measured: what a trial with these parameters measures, for the study's limits.
        pruner: sees nine evaluations of each trial that completes, and stops none.
        options: of `build_sampler`.
    """

    def __init__(
        self,
        config: Any,
        script: Callable[[Params], Any] = best_at_1e_4,
        *,
        measured: Callable[[Params], dict[str, Any]] = lambda _: {},
        storage: optuna.storages.BaseStorage | None = None,
        pruner: optuna.pruners.BasePruner | None = None,
        **options: Any,
    ) -> None:
        self.space = config.search_space
        self.script = script
        self.limits, self.measured = config.constraints, measured
        self.pruner = pruner
        self.study = optuna.create_study(
            study_name="s",
            storage=storage,
            directions=[objective.direction for objective in config.objective],
            sampler=build_sampler(config.sampler, config.search_space, **options),
            pruner=pruner,
            load_if_exists=True,
        )

    @property
    def trials(self) -> list[optuna.trial.FrozenTrial]:
        return self.study.trials

    @property
    def params(self) -> list[Params]:
        return [trial.params for trial in self.trials]

    def run(self, n_trials: int = 1, **given: Any) -> list[Params]:
        """Run trials, with parameters that are `given` by hand, and return the parameters of each."""
        drawn = []
        for _ in range(n_trials):
            if given:
                self.study.enqueue_trial(given)
            trial, params = self.ask()
            self.end(trial, self.script(params))
            drawn.append(params)
        return drawn

    def ask(self) -> tuple[optuna.Trial, Params]:
        trial = self.study.ask()
        return trial, suggest(self.space, trial)

    def end(self, trial: optuna.Trial, ended: Any, **attributes: Any) -> None:
        """Tell the study how a trial ended, as a worker does."""
        for name, value in violations(self.limits, self.measured(trial.params)).items():
            trial.set_constraint(name, value)
        if not isinstance(ended, str):
            for step in range(1, 10) if self.pruner else ():
                trial.report(ended * step, step)
                trial.should_prune()  # the first call makes the brackets of Hyperband
            self.study.tell(trial, ended)
            return
        for key, value in {"outcome": ended, **attributes}.items():
            trial.set_user_attr(key, value)
        if Outcome(ended).infeasible:
            trial.set_constraint(FEASIBLE, 1.0)
        self.study.tell(trial, state=TrialState[Outcome(ended).optuna_state])
