"""How often a search that stops as a better result is improbable would have found one, on tables of curves.

    python tests/benchmarks/search_stops.py FOLDER [--policy NAME] [--trials 80] [--rule NAME] [--chance 0.05]

Searches of the tables of `search_tables.py`, each of so many trials. When a rule first says that the chance
of a better one is at most p, those that have begun end without others; if the rule still says so, that is
where the search would have stopped. It was wrong if the search that goes on finds one that is better by more
than 0.05 of the regret. Saved is the share of the compute; of searches that do not stop it is 0.

The rules: `ours` is what `stop_when_unlikely` asks, `share` the share of the trials to come alone. Optuna's
evaluators look at complete trials, every fourth time, from 20 on: `regret bound` and `EMMR` stop where the
gap is at most p times the improvement that matters to ours, so that by Markov's inequality a greater one has
at most the chance p; `median error` is EMMR as Optuna's documentation stops by it, whatever p.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import optuna
from curves import load
from optuna.study import StudyDirection
from optuna.terminator import EMMREvaluator, MedianErrorEvaluator, RegretBoundEvaluator
from optuna.trial import FrozenTrial, TrialState
from search_tables import POLICIES, Search

from hpo.study.claims.chance import LITTLE, chance_of_better, num_begun

Rule = Callable[[Sequence[FrozenTrial], int], float]
"""The chance of a better one by the trials so far, and how many are to come."""


def _of_optuna(evaluator: type[EMMREvaluator | RegretBoundEvaluator], *, by_error: bool = False) -> Rule:
    def chance(trials: Sequence[FrozenTrial], _: int) -> float:
        complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
        if len(complete) < 20 or len(complete) % 4:  # Gaussian processes take long
            return 1.0
        gap = evaluator(seed=0).evaluate(complete, StudyDirection.MINIMIZE)
        if by_error:
            error = MedianErrorEvaluator(EMMREvaluator(seed=0)).evaluate(complete, StudyDirection.MINIMIZE)
            return float(gap >= error)
        losses_N = np.array([trial.value for trial in complete], dtype=float)
        return float(gap / (LITTLE * (np.median(losses_N) - losses_N.min())))

    return chance


RULES: dict[str, Rule] = {
    "ours": lambda trials, to_come: chance_of_better(trials, 1.0, to_come),
    "share": lambda trials, to_come: to_come / (num_begun(trials) + to_come),
    "regret bound": _of_optuna(RegretBoundEvaluator),
    "EMMR": _of_optuna(EMMREvaluator),
    "median error": _of_optuna(EMMREvaluator, by_error=True),
}


class StoppingSearch(Search):
    def search(self, num_trials: int, rule: Rule, p: float) -> Search | None:
        """Begin so many trials; return the search as it would have stopped, if it would."""
        stopped: Search | None = None
        to_come = num_trials
        while self._step(may_begin=to_come > 0):
            trials = self.study.get_trials(deepcopy=False)
            to_come = num_trials - num_begun(trials)
            if to_come and stopped is None and rule(trials, to_come) <= p:
                ended = self._ended()
                if rule(ended.study.get_trials(deepcopy=False), to_come) <= p:
                    stopped = ended
        return stopped

    def _step(self, *, may_begin: bool) -> bool:
        promotion, paused = self.policy.promotion, self.paused | ({None} if may_begin else set())
        if promotion and (going_on := promotion.going_on(self.study.get_trials(deepcopy=False), paused)):
            self._go_on(going_on[0])
            return True
        if may_begin:
            self._start()
        return may_begin

    def _ended(self) -> Search:
        """A copy in which those that have begun have ended."""
        copy = StoppingSearch(self.policy, self.curves, 0)
        copy.study.add_trials(self.study.get_trials(deepcopy=False))
        copy.spent, copy.row_of = self.spent, {**self.row_of}
        copy.paused, copy.ended = {*self.paused}, [*self.ended]
        while copy._step(may_begin=False):
            pass
        return copy


def judged(search: StoppingSearch, num_trials: int, rule: Rule, p: float) -> tuple[bool, bool, float]:
    """Whether a search stopped, whether it was wrong, and what it saved."""
    stopped = search.search(num_trials, rule, p)
    if stopped is None:
        return False, False, 0.0
    before, after = stopped.regret_at(math.inf), search.regret_at(math.inf)
    return True, before - after > 0.05, 1 - stopped.spent / search.spent


def line(searches: Sequence[tuple[bool, bool, float]]) -> str:
    num_stopped, num_wrong = (sum(one[index] for one in searches) for index in (0, 1))
    saved = np.array([one[2] for one in searches])
    low, high = np.quantile(saved, (0.25, 0.75))
    return (
        f"{num_stopped:4} of {len(searches)} stopped, {num_wrong:3} of them wrong "
        f"({num_wrong / max(1, num_stopped):.2f}), saved {saved.mean():.2f} ({low:.2f} to {high:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--policy", choices=list(POLICIES), default="default")
    parser.add_argument("--trials", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--rule", choices=list(RULES), default="ours")
    parser.add_argument("--chance", type=float, default=0.05)
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    of_all = []
    for path in sorted(given.folder.glob("*.npz")):
        curves = load(path)
        searches = [StoppingSearch(POLICIES[given.policy], curves, seed) for seed in range(given.seeds)]
        of_table = [judged(search, given.trials, RULES[given.rule], given.chance) for search in searches]
        print(f"{path.stem:32}{line(of_table)}", flush=True)
        of_all += of_table
    print(f"{'all':32}{line(of_all)}")


if __name__ == "__main__":
    main()
