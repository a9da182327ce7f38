"""Find the choices to blame for infeasible trials.

A choice that never worked is blamed when `MIN_INFEASIBLE_TRIALS` trials with it were infeasible. The choice
with the most of them comes first and explains its trials, so that a batch size is not blamed for a precision.

One failure suffices if the trial itself shows the cause: the device lacks the precision, or the broken step
is finite when it is repeated in fp32. It does not suffice if other trials of the precision trained beyond
this step. Then something else is involved, such as a high learning rate.

A precision may become NaN late in a trial, so only a COMPLETE trial clears it. Any other failure is refuted
by each trial with the choice and training to a rung.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from hpo.config.limits import FEASIBLE
from hpo.outcome import Outcome, concerns_precision
from hpo.precision.table import BASE_PRECISION, PRECISION
from hpo.study.sampling.promotion import rungs_of

MIN_INFEASIBLE_TRIALS = 3
"""Number of infeasible trials, without a feasible one, for blaming a choice."""

Choice = tuple[str, Any]


class _Failure(NamedTuple):
    suspects: tuple[Choice, ...]
    is_proven: bool  # true if there is one suspect, and the trial shows its guilt
    is_late: bool  # true if it may have trained for long: only a COMPLETE trial clears its precision
    rung: float  # last rung of the trial; 0: none


class Failures:
    """The blamed choices of a study. An ended trial is added once and for all."""

    def __init__(self) -> None:
        self._failures: Counter[_Failure] = Counter()
        self.completed: set[Choice] = set()
        """Choices of COMPLETE trials."""
        self._reached: dict[Choice, float] = {}
        self.num_trials = 0
        self.num_tried: Counter[Choice] = Counter()
        """Number of ended trials with each choice."""

    def add_ended(self, trial: FrozenTrial) -> None:
        """Add an ended trial. A FAILed trial does not count."""
        if trial.state not in (TrialState.COMPLETE, TrialState.PRUNED):
            return
        chosen = choices_of(trial)
        self.num_trials += 1
        self.num_tried.update(chosen)
        if is_infeasible(trial):
            self._failures[_failure(trial, chosen)] += 1
        if trial.state == TrialState.COMPLETE:
            self.completed.update(chosen)
        _note_rung(self._reached, trial, chosen)

    def blamed(self, unfinished: Iterable[FrozenTrial] = ()) -> set[Choice]:
        """Return the choices to blame. `unfinished`: running and paused trials."""
        reached = dict(self._reached)
        for trial in unfinished:
            _note_rung(reached, trial, choices_of(trial))
        counts = [(self._weights(one, reached), number) for one, number in self._failures.items()]
        all_blamed: set[Choice] = set()
        while blame := _blame(counts):
            all_blamed.add(blame)
            counts = [(weights, number) for weights, number in counts if blame not in weights]
        return all_blamed

    def _weights(self, failure: _Failure, reached: dict[Choice, float]) -> dict[Choice, int]:
        weights = {}
        for choice in failure.suspects:
            is_late = failure.is_late and choice[0] in (PRECISION, BASE_PRECISION)
            if choice in self.completed or (choice in reached and not is_late):
                continue
            is_enough = failure.is_proven and reached.get(choice, 0.0) <= failure.rung
            weights[choice] = MIN_INFEASIBLE_TRIALS if is_enough else 1
        return weights


def is_infeasible(trial: FrozenTrial) -> bool:
    """Return true if the configuration cannot work. Breaking a limit of the study is not infeasible."""
    return trial.constraints.get(FEASIBLE, 0.0) > 0


def choices_of(trial: FrozenTrial) -> list[Choice]:
    return [
        (name, value)
        for name, value in trial.params.items()
        if isinstance(trial.distributions[name], CategoricalDistribution)
    ]


def _note_rung(reached: dict[Choice, float], trial: FrozenTrial, chosen: Iterable[Choice]) -> None:
    rung = max(rungs_of(trial.user_attrs), default=0.0)
    if not rung and (is_infeasible(trial) or not trial.state.is_finished()):
        return
    for choice in chosen:
        reached[choice] = max(reached.get(choice, 0.0), rung)


def _failure(trial: FrozenTrial, chosen: Iterable[Choice]) -> _Failure:
    attributes = trial.user_attrs
    outcome, telemetry = attributes.get("outcome", ""), attributes.get("telemetry", {})
    suspects, is_proven = [*chosen], False
    precision = (PRECISION, trial.params.get(PRECISION))
    is_fp32 = telemetry.get("precision", {}).get("effective") == "fp32"
    heals = False if is_fp32 else telemetry.get("finite_in_fp32")
    if not concerns_precision(outcome, telemetry) or (outcome == Outcome.NONFINITE and heals is False):
        suspects = [choice for choice in suspects if choice != precision]
    elif outcome == Outcome.UNSUPPORTED:
        base = telemetry.get("base_precision", {})
        if base.get("effective", "") is None:
            precision = (BASE_PRECISION, trial.params.get(BASE_PRECISION))
        is_proven = precision in suspects
    elif outcome == Outcome.NONFINITE:
        is_proven = heals is True and precision in suspects
    rung = max(rungs_of(attributes), default=0.0)
    return _Failure(
        (precision,) if is_proven else tuple(suspects), is_proven, outcome == Outcome.NONFINITE, rung
    )


def _blame(counts: Iterable[tuple[dict[Choice, int], int]]) -> Choice | None:
    total: Counter[Choice] = Counter()
    for weights, number in counts:
        for choice, weight in weights.items():
            total[choice] += number * weight
    blamed = max(total, key=lambda choice: (total[choice], choice[0] == PRECISION), default=None)
    return blamed if blamed is not None and total[blamed] >= MIN_INFEASIBLE_TRIALS else None
