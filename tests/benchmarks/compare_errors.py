"""Error rates of `hpo compare`, by simulated studies whose true differences are known.

    python tests/benchmarks/compare_errors.py [--studies 2000] [--seed 0]

Prints Markdown tables. A score is configuration + seed + noise of the run (standard deviation 0.5 points,
margin 0.5), and the studies are decided by the functions of `hpo.compare`, a whole cell at a time; a test
holds that to the verdicts that studies get one by one. A cell has one question, but its levels are those of
a comparison that asks both, so that the errors of the two questions together are at most their sum.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise, product
from typing import get_args

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from hpo.compare.answers import Question
from hpo.compare.estimate import Estimate, paired_estimate, tuned_estimate
from hpo.compare.race import probabilities_best, survivors
from hpo.compare.sequential import Plan
from hpo.non_inferiority import signs

Array = NDArray[np.float64]
Shape = tuple[int, ...]

QUESTIONS = get_args(Question)
SIGMA = 0.5
"""Standard deviation of a run's noise, in points."""
LOGNORMAL_SHAPE = 0.8
NUM_DRAWS = 4000
"""Of the posterior of a race."""
CALIBRATION_EDGES = (0, 0.05, 0.2, 0.5, 0.8, 0.95, 1)


def gaussian(rng: Generator, shape: Shape) -> Array:
    return rng.standard_normal(shape)


def heavy_tailed(rng: Generator, shape: Shape) -> Array:
    """Student's t with 3 degrees of freedom."""
    return rng.standard_t(3, shape) / 3**0.5


def rare_losses(rng: Generator, shape: Shape) -> Array:
    """Skewed to the left: runs are alike but for some that lose much (exponential; skewness -2)."""
    return 1 - rng.exponential(size=shape)


def lognormal(rng: Generator, shape: Shape) -> Array:
    """Skewed to the left: minus a centred lognormal (skewness -3.7)."""
    mean = np.exp(LOGNORMAL_SHAPE**2 / 2)
    return (mean - rng.lognormal(0, LOGNORMAL_SHAPE, shape)) / (mean * np.expm1(LOGNORMAL_SHAPE**2) ** 0.5)


def unequal(rng: Generator, shape: Shape) -> Array:
    """The first configuration's noise is three times that of the others."""
    return rng.standard_normal(shape) * np.where(np.arange(shape[1]) == 0, 3, 1)[:, None]


@dataclass(frozen=True)
class Noise:
    """The noise of a run under fp32 and under the precision, in units of `SIGMA`."""

    name: str
    fp32: Callable[[Generator, Shape], Array]
    precision: Callable[[Generator, Shape], Array]
    ratio: float = 1.0
    """Standard deviation under the precision, in units of that under fp32."""
    step: float = 0.0
    """Scores are multiples of this many points; 0: they are not rounded."""


NOISES = (
    Noise("Gaussian", gaussian, gaussian),
    Noise("t with 3 df", heavy_tailed, heavy_tailed),
    Noise("exponential", rare_losses, rare_losses),
    Noise("lognormal", lognormal, lognormal),
    Noise("in steps of 1 point", gaussian, gaussian, step=1.0),
    Noise("unequal, 3 to 1", gaussian, gaussian, 3.0),
    Noise("rare losses", gaussian, rare_losses, 3.0),
)


@dataclass(frozen=True)
class Cell:
    question: str
    noise: Noise
    num_precisions: int
    """fp32 among them."""
    max_seeds: int
    num_configurations: int

    @property
    def plan(self) -> Plan:
        """As `hpo compare` decides: both questions of every precision share the error."""
        num_comparisons = len(QUESTIONS) * (self.num_precisions - 1)
        return Plan(max_seeds=self.max_seeds, num_comparisons=num_comparisons)


@dataclass(frozen=True)
class Outcomes:
    """[studies, precisions] at the look that counts."""

    verdict: Array
    low: Array
    high: Array
    num_seeds: Array


def draw_scores(cell: Cell, difference: float, num_studies: int, rng: Generator) -> tuple[Array, Array]:
    """[studies, precisions, configurations, seeds] under each precision, and under fp32 with one precision.

    The effect of the seed is the same for both runs of a pair, and independent between configurations.
    """
    shape = (num_studies, cell.num_precisions - 1, cell.num_configurations, cell.max_seeds)
    alone = (num_studies, 1, *shape[2:])
    seed = SIGMA * rng.standard_normal(alone)
    reference = seed + SIGMA * cell.noise.fp32(rng, alone)
    if cell.question == "tuned":
        seed = SIGMA * rng.standard_normal(shape)
    scores = difference + seed + SIGMA * cell.noise.ratio * cell.noise.precision(rng, shape)
    if step := cell.noise.step:
        return np.round(scores / step) * step, np.round(reference / step) * step
    return scores, reference


def decide_studies(cell: Cell, scores: Array, reference: Array) -> Outcomes:
    """What `judge_paired` and `judge_tuned` say of each, for scores that are all there."""
    verdict, low, high, num_seeds = (np.zeros(scores.shape[:2]) for _ in range(4))
    for num, level in zip(cell.plan.looks, cell.plan.levels, strict=True):
        undecided = verdict == 0
        below, above = estimate(cell, scores[..., :num], reference[..., :num]).interval(level)
        low, high = np.where(undecided, below, low), np.where(undecided, above, high)
        num_seeds[undecided] = num
        verdict = np.where(undecided, signs(low, high, cell.plan.margin), verdict)
    return Outcomes(verdict, low, high, num_seeds)


def estimate(cell: Cell, scores: Array, reference: Array) -> Estimate:
    return (
        paired_estimate(scores - reference)
        if cell.question == "paired"
        else tuned_estimate(scores, reference)
    )


def fixed_verdicts(cell: Cell, scores: Array, reference: Array) -> Array:
    """Of a t test with `max_seeds` alone."""
    found = estimate(cell, scores, reference)
    found = replace(found, third_cumulant=np.zeros_like(found.third_cumulant))
    return signs(*found.interval(cell.plan.alpha / cell.plan.num_comparisons), cell.plan.margin)


@dataclass(frozen=True)
class ErrorRates:
    """Shares of studies: errors are those in which a precision has it, coverage where all intervals hold."""

    cell: Cell
    worse_without_loss: float
    worse_at_margin: float
    as_good_at_margin: float
    coverage: float
    """The smaller of that without a true difference and that at a true loss of the margin."""
    decided: float
    """Share of precisions that get a verdict when there is no true difference."""
    as_good_fixed: float
    decided_fixed: float
    """Of the fixed design: one t test of `max_seeds` with all of the error."""
    trials: float
    """Trials when there is no true difference, as a share of those of the fixed design."""


def error_rates(cell: Cell, num_studies: int, seed: int = 0) -> ErrorRates:
    rng = np.random.default_rng(seed)
    plan = cell.plan
    equal_scores = draw_scores(cell, 0.0, num_studies, rng)
    loss_scores = draw_scores(cell, -plan.margin, num_studies, rng)
    equal, loss = decide_studies(cell, *equal_scores), decide_studies(cell, *loss_scores)
    covered = [
        float(((found.low <= truth) & (truth <= found.high)).all(axis=1).mean())
        for found, truth in ((equal, 0.0), (loss, -plan.margin))
    ]
    # fp32's seeds serve all precisions
    num_trials = equal.num_seeds.sum(axis=1) + equal.num_seeds.max(axis=1)
    return ErrorRates(
        cell=cell,
        worse_without_loss=float((equal.verdict < 0).any(axis=1).mean()),
        worse_at_margin=float((loss.verdict < 0).any(axis=1).mean()),
        as_good_at_margin=float((loss.verdict > 0).any(axis=1).mean()),
        coverage=min(covered),
        decided=float((equal.verdict != 0).mean()),
        as_good_fixed=float((fixed_verdicts(cell, *loss_scores) > 0).any(axis=1).mean()),
        decided_fixed=float((fixed_verdicts(cell, *equal_scores) != 0).mean()),
        trials=float(num_trials.mean()) / (cell.max_seeds * cell.num_precisions),
    )


@dataclass(frozen=True)
class RaceCell:
    noise: str
    spread: float
    """Standard deviation of the configurations' true means, in points."""
    num_configurations: int
    max_seeds: int


RACE_NOISES: dict[str, Callable[[Generator, Shape], Array]] = {
    "Gaussian": gaussian,
    "t with 3 df": heavy_tailed,
    "exponential": rare_losses,
    "lognormal": lognormal,
    "unequal, 3 to 1": unequal,
}


@dataclass(frozen=True)
class RaceRates:
    """Over studies; `said` and `was_best` hold the calibration of each configuration's probability."""

    cell: RaceCell
    best_dropped: float
    one_left: float
    coverage: float
    """Share of configurations whose interval of the mean on new seeds, hence of selection bias, holds."""
    trials: float
    """As a share of all configurations with `max_seeds`."""
    said: Array
    was_best: Array


def race_rates(cell: RaceCell, num_studies: int, seed: int = 0) -> RaceRates:
    rng = np.random.default_rng(seed)
    shape = (num_studies, cell.num_configurations, cell.max_seeds)
    truth = cell.spread * rng.standard_normal(shape[:2])
    seeds = SIGMA * rng.standard_normal((num_studies, 1, cell.max_seeds))
    scores = truth[..., None] + seeds + SIGMA * RACE_NOISES[cell.noise](rng, shape)
    running, num_seeds = race_studies(cell, scores)
    best = truth.argmax(axis=1)
    seen = np.where(np.arange(cell.max_seeds) < num_seeds[..., None], scores, np.nan)
    said = np.array([probabilities_best(values, NUM_DRAWS) for values in seen])
    plan = Plan(max_seeds=cell.max_seeds)
    covered = np.zeros(shape[:2], dtype=bool)
    for num, level in zip(plan.looks, plan.levels, strict=True):
        low, high = paired_estimate(scores[..., None, :num]).interval(level)
        covered |= (num_seeds == num) & (low <= truth) & (truth <= high)
    return RaceRates(
        cell=cell,
        best_dropped=float(1 - running[np.arange(num_studies), best].mean()),
        one_left=float((running.sum(axis=1) == 1).mean()),
        coverage=float(covered.mean()),
        trials=float(num_seeds.sum() / (num_studies * cell.num_configurations * cell.max_seeds)),
        said=said.ravel(),
        was_best=(np.arange(cell.num_configurations) == best[:, None]).ravel(),
    )


def race_studies(cell: RaceCell, scores: Array) -> tuple[NDArray[np.bool_], Array]:
    """What `run_race` leaves in each race, and how many seeds count for each configuration."""
    plan = Plan(max_seeds=cell.max_seeds, num_comparisons=cell.num_configurations - 1)
    running = np.ones(scores.shape[:2], dtype=bool)
    num_seeds = np.zeros(scores.shape[:2])
    for num, level in zip(plan.looks, plan.levels, strict=True):
        open_ = running & (running.sum(axis=1, keepdims=True) > 1)
        num_seeds[open_] = num
        running = np.where(open_, survivors(scores[..., :num], running, level), running)
    return running, num_seeds


def calibration(rates: Sequence[RaceRates]) -> Iterator[tuple[float, float]]:
    """By the probability said: its mean, and the share of those configurations that were the best."""
    said = np.concatenate([one.said for one in rates])
    was_best = np.concatenate([one.was_best for one in rates])
    for low, high in pairwise(CALIBRATION_EDGES):
        inside = (said >= low) & ((said < high) | (high == 1))
        yield (
            (float(said[inside].mean()), float(was_best[inside].mean())) if inside.any() else (np.nan, np.nan)
        )


def percent(share: float, num: int) -> str:
    """With the half width of a binomial 95 % interval (Agresti & Coull)."""
    centre = (share * num + 2) / (num + 4)
    return f"{100 * share:.1f} ± {196 * (centre * (1 - centre) / (num + 4)) ** 0.5:.1f}"


def comparison_rows(rates: Sequence[ErrorRates], num_studies: int) -> Iterator[Sequence[str]]:
    yield (
        "question", "noise", "precisions", "configurations", "seeds", "worse, no loss", "worse, loss 0.5",
        "as good, loss 0.5", "t test", "coverage", "decided", "t test", "trials",
    )  # fmt: skip
    for one in rates:
        cell = one.cell
        yield (
            cell.question,
            cell.noise.name,
            *map(str, (cell.num_precisions, cell.num_configurations, cell.max_seeds)),
            percent(one.worse_without_loss, num_studies),
            percent(one.worse_at_margin, num_studies),
            percent(one.as_good_at_margin, num_studies),
            f"{100 * one.as_good_fixed:.1f}",
            percent(one.coverage, num_studies),
            f"{100 * one.decided:.0f}",
            f"{100 * one.decided_fixed:.0f}",
            f"{100 * one.trials:.0f}",
        )


def summary_rows(rates: Sequence[ErrorRates]) -> Iterator[Sequence[str]]:
    """The worst cell of each question and noise; what is decided, and trials, with the most seeds."""
    yield (
        "question", "noise", "worse, no loss", "worse, loss 0.5", "as good, loss 0.5", "t test", "coverage",
        "decided", "t test", "trials",
    )  # fmt: skip
    longest = max(one.cell.max_seeds for one in rates)
    for key, group in groupby(rates, lambda one: (one.cell.question, one.cell.noise.name)):
        cells = list(group)
        long = [one for one in cells if one.cell.max_seeds == longest]
        yield (
            *key,
            f"{100 * max(one.worse_without_loss for one in cells):.1f}",
            f"{100 * max(one.worse_at_margin for one in cells):.1f}",
            f"{100 * max(one.as_good_at_margin for one in cells):.1f}",
            f"{100 * max(one.as_good_fixed for one in cells):.1f}",
            f"{100 * min(one.coverage for one in cells):.1f}",
            span(one.decided for one in long),
            span(one.decided_fixed for one in long),
            span(one.trials for one in long),
        )


def race_rows(rates: Sequence[RaceRates], num_studies: int) -> Iterator[Sequence[str]]:
    yield "noise", "spread", "configurations", "seeds", "best dropped", "one left", "coverage", "trials"
    for one in rates:
        cell = one.cell
        yield (
            cell.noise,
            *map(str, (cell.spread, cell.num_configurations, cell.max_seeds)),
            percent(one.best_dropped, num_studies),
            f"{100 * one.one_left:.0f}",
            f"{100 * one.coverage:.1f}",
            f"{100 * one.trials:.0f}",
        )


def race_summary_rows(rates: Sequence[RaceRates]) -> Iterator[Sequence[str]]:
    """The worst cell of each noise, then how often those were best that were said to be so."""
    names = [f"{100 * low:g} to {100 * high:g}" for low, high in pairwise(CALIBRATION_EDGES)]
    yield "noise", "best dropped", "coverage", "one left", "trials", *names
    longest = max(one.cell.max_seeds for one in rates)
    for noise, group in groupby(rates, lambda one: one.cell.noise):
        cells = list(group)
        long = [one for one in cells if one.cell.max_seeds == longest]
        yield (
            noise,
            f"{100 * max(one.best_dropped for one in cells):.1f}",
            f"{100 * min(one.coverage for one in cells):.1f}",
            span(one.one_left for one in long),
            span(one.trials for one in long),
            *(f"{100 * said:.1f}: {100 * was:.1f}" for said, was in calibration(cells)),
        )


def span(shares: Iterable[float]) -> str:
    low, *_, high = sorted(shares)
    return f"{100 * low:.0f} to {100 * high:.0f}"


def print_table(title: str, rows: Iterable[Sequence[str]]) -> None:
    print(f"\n{title}\n")
    for index, row in enumerate(rows):
        print("| " + " | ".join(row) + " |")
        if not index:
            print("| " + " | ".join("---" for _ in row) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--studies", type=int, default=2000, help="simulated studies a cell")
    parser.add_argument("--seed", type=int, default=0)
    num, seed = vars(parser.parse_args()).values()
    cells = product(QUESTIONS, NOISES, (2, 3, 5), (3, 5, 8, 12, 20), (1, 3))
    rates = [error_rates(Cell(*cell), num, seed) for cell in cells]
    print_table(f"Verdicts, {num} studies a cell, % ± 95 % binomial", comparison_rows(rates, num))
    print_table("Verdicts, %: the worst cell; decided and trials with 20 seeds", summary_rows(rates))
    race_cells = product(RACE_NOISES, (0.1, 0.5, 1.0), (2, 3, 5), (5, 20))
    races = [race_rates(RaceCell(*cell), num, seed) for cell in race_cells]
    print_table(f"Races, {num} studies a cell, %", race_rows(races, num))
    print_table(
        "Races: the worst cell; one left and trials with 20 seeds; probability said: share that was best",
        race_summary_rows(races),
    )


if __name__ == "__main__":
    main()
