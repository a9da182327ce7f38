"""Error rates of verdicts, by simulated studies whose true losses are known.

    python tests/benchmarks/verdict_errors.py [--studies 2000] [--seed 0] [--cell NAME ...] [--processes 2]

Each study draws truths and predictions of a reference and of another model, and plants a loss in the other
one. `hpo.compare_predictions` judges the first 3, 6 and 12 runs in turn, as `hpo compare` does, and a
study counts as `as good` or `worse` if it says so at any of these looks. The planted losses share no code
with the product. Prints a Markdown table with the share of each verdict and its 95 % interval.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.stats import binomtest

import hpo

LOOKS = (3, 6, 12)
ERROR = 0.025
Run = list[Any] | None


@dataclass(frozen=True)
class Study:
    """Drawn predictions of as many runs as the largest look needs."""

    truths: list[Any]
    reference: list[Run]
    other: list[Run]


@dataclass(frozen=True)
class Cell:
    """One situation."""

    name: str
    task: dict[str, Any]
    draw: Callable[[Generator, int], Study]
    loss: float
    """True loss in points."""
    looks: Sequence[int] = LOOKS
    margin: float = 0.5
    is_exempt: bool = field(default=False)
    """Whether the sentence states the condition under which the verdict holds."""

    @property
    def wrong(self) -> tuple[str, ...]:
        """The verdicts that are errors."""
        as_good = ("as_good",) if self.loss >= self.margin else ()
        return as_good + (("worse",) if self.loss <= self.margin else ())


def classes(num: int) -> list[str]:
    return [f"c{index}" for index in range(num)]


def labels(num: int, metric: str) -> dict[str, Any]:
    return {"kind": "single_label", "classes": classes(num), "primary_metric": metric}


SPANS = {"kind": "token_classification", "span_names": ["a"], "primary_metric": "span_f1"}


def wrong_class(truth_N: NDArray[Any], num: int, rng: Generator) -> NDArray[Any]:
    return (truth_N + rng.integers(1, num, len(truth_N))) % num


@dataclass(frozen=True)
class Accuracy:
    """Classes with a common error rate, flips of each run, and a loss in the other model.

    `flips` is the share of rows whose correctness a run changes. `loss` is lost at random in each run, `rows`
    is the share of the population that is lost in all runs, `collapses` the share of runs that lose 20
    points, `nan` the share of runs without predictions on either side.
    """

    num_rows: int = 1000
    num_classes: int = 4
    labelled: int | None = None
    flips: float = 0.01
    spread: float = 0.2
    loss: float = 0.0
    rows: float = 0.0
    collapses: float = 0.0
    nan: float = 0.0
    same_rows: bool = False

    def __call__(self, rng: Generator, num_runs: int) -> Study:
        num, K = self.labelled or self.num_rows, self.num_classes
        truth_N = rng.integers(0, K, num)
        base_N = rng.random(num) < 0.85
        lost_N = rng.random(num) < self.rows
        tends_N = rng.random(num) < 2 * self.flips
        sides: dict[str, list[Run]] = {"reference": [], "other": []}
        for _ in range(num_runs):
            for side, runs in sides.items():
                if self.same_rows:
                    flipped_N = tends_N & (rng.random(num) < 0.5)
                else:
                    flipped_N = rng.random(num) < self.flips
                right_N = base_N ^ flipped_N
                share = abs(rng.normal(0, self.spread)) / 100 if self.spread else 0.0
                right_N &= rng.random(num) >= share
                if side == "other":
                    drop = 0.2 if rng.random() < self.collapses else self.loss / 100
                    # a share of all rows, whether or not they were right
                    right_N &= rng.random(num) >= drop / 0.85
                    right_N &= ~lost_N
                predicted_N = np.where(right_N, truth_N, wrong_class(truth_N, K, rng))
                is_nan = rng.random() < self.nan
                rest = [None] * (self.num_rows - num)
                runs.append(
                    None if is_nan else [*map("c{}".format, predicted_N.tolist()), *["c0"] * len(rest)]
                )
        truths = [*map("c{}".format, truth_N.tolist()), *[None] * (self.num_rows - num)]
        return Study(truths, sides["reference"], sides["other"])


@dataclass(frozen=True)
class RareClass:
    """Balanced classes and one rare class, of which the other model loses a share of the rows.

    The rare class makes up `rare` of `num_rows` in the population. Predictions are right but for `errors`.
    """

    num_classes: int
    rare: int
    lost: float
    num_rows: int = 1000
    errors: float = 0.02
    is_lost_in_all_runs: bool = True

    def __call__(self, rng: Generator, num_runs: int) -> Study:
        K = self.num_classes
        share = self.rare / self.num_rows
        p_K = np.array([share, *[(1 - share) / (K - 1)] * (K - 1)])
        truth_N = rng.choice(K, self.num_rows, p=p_K)
        lost_N = (truth_N == 0) & (rng.random(self.num_rows) < self.lost)
        base_N = rng.random(self.num_rows) >= self.errors
        sides: dict[str, list[Run]] = {"reference": [], "other": []}
        for _ in range(num_runs):
            for side, runs in sides.items():
                right_N = base_N ^ (rng.random(self.num_rows) < 0.002) if num_runs > 1 else base_N
                if side == "other":
                    right_N = right_N & ~lost_N
                predicted_N = np.where(right_N, truth_N, wrong_class(truth_N, K, rng))
                runs.append([*map("c{}".format, predicted_N.tolist())])
        return Study([*map("c{}".format, truth_N.tolist())], sides["reference"], sides["other"])


@dataclass(frozen=True)
class Spans:
    """One span in a share of the texts; the other model misses a share of the spans in all runs."""

    with_spans: int
    missed: float
    num_rows: int = 1000
    errors: float = 0.05

    def __call__(self, rng: Generator, num_runs: int) -> Study:
        has_N = rng.random(self.num_rows) < self.with_spans / self.num_rows
        base_N = rng.random(self.num_rows) >= self.errors
        missed_N = rng.random(self.num_rows) < self.missed
        found: dict[str, list[Run]] = {"reference": [], "other": []}
        for _ in range(num_runs):
            for side, runs in found.items():
                right_N = base_N ^ (rng.random(self.num_rows) < 0.005)
                if side == "other":
                    right_N = right_N & ~missed_N
                runs.append([self.spans(has, right) for has, right in zip(has_N, right_N, strict=True)])
        return Study([self.spans(has, True) for has in has_N], found["reference"], found["other"])

    @staticmethod
    def spans(has: bool, right: bool) -> dict[str, Any]:
        return {"a": [[0, 3]] if right else [[0, 2]]} if has else {}


def learned_nothing(rng: Generator, num_runs: int) -> Study:
    """Predictions that do not depend on the text, nearly the same in all runs; 50 rows are labelled."""
    truth_N, guess_N = rng.integers(0, 3, (2, 50))
    runs: list[list[Run]] = [[], []]
    for _ in range(num_runs):
        for side in runs:
            guess = np.where(rng.random(50) < 0.01, rng.integers(0, 3, 50), guess_N)
            side.append([*map("c{}".format, guess.tolist()), *["c0"] * 950])
    return Study([*map("c{}".format, truth_N.tolist()), *[None] * 950], *runs)


@dataclass(frozen=True)
class Exact:
    """A cell whose loss in macro F1 is measured on a large sample of the same population."""

    draw: Any

    def loss(self, metric: str) -> float:
        from sklearn.metrics import f1_score

        rng = np.random.default_rng(12345)
        big = type(self.draw)(**{**self.draw.__dict__, "num_rows": 400_000, "rare": self.draw.rare * 400})
        study = big(rng, 1)
        reference, other = study.reference[0], study.other[0]
        average = {"f1_macro": "macro"}[metric]
        score = [f1_score(study.truths, one, average=average) for one in (reference, other)]
        return 100 * float(score[0] - score[1])


def cells() -> list[Cell]:
    accuracy, macro = labels(4, "accuracy"), labels(4, "f1_macro")
    one = (1,)
    rare = {
        "macro F1, 20 classes, a class of 5 rows loses 20 %": (20, RareClass(20, 5, 0.2), LOOKS),
        "macro F1, 10 classes, a class of 5 rows loses 15 %": (10, RareClass(10, 5, 0.15), LOOKS),
        "one model each: macro F1, 10 classes, a class of 3 rows loses 30 %": (
            10,
            RareClass(10, 3, 0.3),
            one,
        ),
    }
    made = [
        Cell("no difference, 1,000 rows", accuracy, Accuracy(), 0.0),
        Cell("no difference, 3,000 rows", accuracy, Accuracy(3000), 0.0),
        Cell("no difference, macro F1, 3,000 rows", macro, Accuracy(3000), 0.0),
        Cell("no difference, the same rows flip, 3,000 rows", accuracy, Accuracy(3000, same_rows=True), 0.0),
        Cell("loss of 0.5 in all runs and rows, 1,000 rows", accuracy, Accuracy(loss=0.5), 0.5),
        Cell("loss of 0.5 in all runs and rows, 3,000 rows", accuracy, Accuracy(3000, loss=0.5), 0.5),
        Cell("loss of 0.5, the same rows flip, 3,000 rows", accuracy, Accuracy(3000, loss=0.5, same_rows=True), 0.5),
        Cell("loss of 0.6 % of the rows, 1,000 rows", accuracy, Accuracy(rows=0.005 / 0.85), 0.5),
        Cell("loss of 0.6 % of the rows, 3,000 rows", accuracy, Accuracy(3000, rows=0.005 / 0.85), 0.5),
        Cell("loss of 0.6 % of the rows, no flips, 3,000 rows", accuracy, Accuracy(3000, rows=0.005 / 0.85, flips=0.0, spread=0.0), 0.5),
        Cell("50 of 1,000 rows labelled, 1 % lost", accuracy, Accuracy(labelled=50, rows=0.01 / 0.85, flips=0.002), 1.0),
        Cell("50 of 1,000 rows labelled, 2 % lost", accuracy, Accuracy(labelled=50, rows=0.02 / 0.85, flips=0.002), 2.0),
        *(
            Cell(name, labels(num, "f1_macro"), draw, Exact(draw).loss("f1_macro"), looks)
            for name, (num, draw, looks) in rare.items()
        ),
        Cell("span F1, spans in 50 of 1,000 texts, 2 % missed", SPANS, Spans(50, 0.02), 1.9),
        Cell("span F1, spans in 100 of 1,000 texts, 2 % missed", SPANS, Spans(100, 0.02), 1.9),
        Cell("one run in twenty loses 20 points", accuracy, Accuracy(collapses=0.05), 1.0, is_exempt=True),
        Cell("NaN in 10 % of the runs of both, 50 runs", accuracy, Accuracy(nan=0.1), 0.0, looks=(9, 19, 50)),
        Cell("NaN in 20 % of the runs of both, 50 runs", accuracy, Accuracy(nan=0.2), 0.0, looks=(9, 19, 50)),
        Cell("learned nothing, 50 of 1,000 rows labelled", labels(3, "f1_macro"), learned_nothing, 0.0, is_exempt=True),
        Cell("one model each: loss of 0.6 % of the rows, 3,000 rows", accuracy, Accuracy(3000, rows=0.005 / 0.85, spread=0.0), 0.5, looks=one),
        Cell("one model each: no difference, 10,000 rows", accuracy, Accuracy(10000, flips=0.005, spread=0.0), 0.0, looks=one),
    ]  # fmt: skip
    return made


def verdict_of(cell: Cell, seed: Sequence[int]) -> str:
    """The first verdict that a study is given."""
    study = cell.draw(np.random.default_rng(seed), max(cell.looks))
    for num in cell.looks:
        found = hpo.compare_predictions(
            cell.task, study.truths, study.reference[:num], study.other[:num], margin=cell.margin
        )
        if found.verdict != "not_shown":
            return found.verdict
        if found.reason:  # more runs do not help
            break
    return "not_shown"


def rates(cell: Cell, num_studies: int, seed: int, map_: Callable[..., Any] = map) -> dict[str, int]:
    """The number of studies with each verdict."""
    seeds = [(seed, study) for study in range(num_studies)]
    found = list(map_(partial(verdict_of, cell), seeds))
    return {name: found.count(name) for name in ("as_good", "worse")}


def _share(count: int, num: int) -> str:
    low, high = binomtest(count, num).proportion_ci(method="wilson")
    return f"{100 * count / num:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--studies", type=int, default=2000, help="simulated studies per cell")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cell", nargs="*", help="cells whose names contain one of these")
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    print("| situation | true loss | as good | worse | error |\n| --- | --- | --- | --- | --- |")
    with ProcessPoolExecutor(asked.processes) as pool:
        for cell in cells():
            if asked.cell and not any(part in cell.name for part in asked.cell):
                continue
            found = rates(cell, asked.studies, asked.seed, partial(pool.map, chunksize=10))
            wrong = max(found[name] for name in cell.wrong)
            above = binomtest(wrong, asked.studies, ERROR, alternative="greater").pvalue < 0.01
            error = "exempt" if cell.is_exempt else "above 2.5 %" if above else "within 2.5 %"
            shares = [_share(found[name], asked.studies) for name in ("as_good", "worse")]
            print("| " + " | ".join([cell.name, f"{cell.loss:.2f}", *shares, error]) + " |", flush=True)


if __name__ == "__main__":
    main()
