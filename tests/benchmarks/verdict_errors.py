"""Error rates of verdicts, by simulated studies whose true losses are known.

    python tests/benchmarks/verdict_errors.py [--studies 2000] [--seed 0] [--cell NAME ...] [--processes 2]

Each study draws truths and predictions of a reference and of another model, and plants a loss in the other
one. `hpo.compare_predictions` judges the first 3, 6 and 12 runs in turn, as `hpo compare` does, and a
study counts as `as good` or `worse` if it says so at any of these looks. The planted losses share no code
with the product. Prints a Markdown table with the share of each verdict and its 95 % interval.
"""

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.stats import binomtest
from sklearn.metrics import f1_score

import hpo
from hpo.evaluation.contributions import scored
from hpo.evaluation.verdict import Question, Verdict, facts_of, judge
from hpo.tasks.example import Example
from hpo.tasks.kind import Task
from hpo.training.metrics import row_statistics

LOOKS = (3, 6, 12)
ERROR = 0.025
RIGHT = 0.85
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
    is_exempt: bool = False
    """Whether the sentence states the condition under which the verdict holds."""
    has_learned: bool = True
    """Whether any verdict can be right."""

    @property
    def wrong(self) -> tuple[str, ...]:
        """The verdicts that are errors."""
        if not self.has_learned:
            return ("as_good", "worse")
        as_good = ("as_good",) if self.loss >= self.margin else ()
        return as_good + (("worse",) if self.loss <= self.margin else ())

    def judge(self, study: Study, num: int) -> Verdict:
        sides = study.reference[:num], study.other[:num]
        return hpo.compare_predictions(self.task, study.truths, *sides, margin=self.margin)


@dataclass(frozen=True)
class ScoreCell(Cell):
    """A cell of the mean over two tasks, whose rows are pairs: what `hpo deploy` judges."""

    def judge(self, study: Study, num: int) -> Verdict:  # noqa: ARG002
        tasks = [Task(name, "single_label", tuple(classes(4)), primary="accuracy") for name in ("t", "u")]
        examples = []
        for n, pair in enumerate(study.truths):
            labels_ = {name: truth for name, truth in zip("tu", pair, strict=True) if truth is not None}
            examples.append(Example(str(n), "", labels_, {}, annotated=frozenset(labels_)))
        asked = Question("score", self.margin)
        statistics = [
            {
                task.name: row_statistics(task, [pair[place] for pair in run], examples)
                for place, task in enumerate(tasks)
            }
            for run in (study.reference[0] or [], study.other[0] or [])
        ]
        runs = [scored(one, "score") for one in statistics]
        return judge(asked, runs[:1], runs[1:], facts_of(statistics[0], asked))


@dataclass(frozen=True)
class TwoTasks:
    """Two tasks of one model each. The first is labelled in 50 of 1,000 rows and loses a share of them."""

    lost: float

    def __call__(self, rng: Generator, num_runs: int) -> Study:  # noqa: ARG002
        few = Accuracy(labelled=50, rows=self.lost, flips=0.0, spread=0.0)(rng, 1)
        many = Accuracy(flips=0.0, spread=0.0)(rng, 1)
        pairs = [
            list(zip(*both, strict=True))
            for both in (
                (few.truths, many.truths),
                (few.reference[0] or [], many.reference[0] or []),
                (few.other[0] or [], many.reference[0] or []),
            )
        ]
        return Study(pairs[0], [pairs[1]], [pairs[2]])


def classes(num: int) -> list[str]:
    return [f"c{index}" for index in range(num)]


def labels(num: int, metric: str) -> dict[str, Any]:
    return {"kind": "single_label", "classes": classes(num), "primary_metric": metric}


SPANS = {"kind": "token_classification", "span_names": ["a"], "primary_metric": "span_f1"}


def wrong_class(truth_N: NDArray[Any], num: int, rng: Generator) -> NDArray[Any]:
    return (truth_N + rng.integers(1, num, len(truth_N))) % num


@dataclass(frozen=True)
class Accuracy:
    """Classes that the reference gets right in 85 % of the rows.

    A run of the other model flips `flips` of the rows, half of them for the better, and moves by its seed
    (`spread`, standard deviation in points). `loss` points are lost in rows that each run draws anew, `rows`
    is the share of all rows that is lost in all runs, `collapses` the share of runs that lose 20 points,
    `nan` the share of runs without predictions on either side.
    """

    num_rows: int = 1000
    num_classes: int = 4
    labelled: int | None = None
    flips: float = 0.02
    spread: float = 0.2
    loss: float = 0.0
    rows: float = 0.0
    collapses: float = 0.0
    nan: float = 0.0
    same_rows: bool = False

    def __call__(self, rng: Generator, num_runs: int) -> Study:
        num, K = self.labelled or self.num_rows, self.num_classes
        truth_N = rng.integers(0, K, num)
        base_N = rng.random(num) < RIGHT
        always_N = base_N & (rng.random(num) < self.rows / RIGHT)
        tends_N = self.flipped(base_N, 2 * self.flips, 0.0, rng)
        reference: list[Run] = []
        other: list[Run] = []
        for _ in range(num_runs):
            shift = rng.normal(0, self.spread) / 100
            if self.same_rows:
                flipped_N = (tends_N & (rng.random(num) < 0.5)) ^ self.flipped(base_N, 0.0, shift, rng)
            else:
                flipped_N = self.flipped(base_N, self.flips, shift, rng)
            drop = self.loss / 100 + 0.2 * (rng.random() < self.collapses)
            lost_N = always_N | (base_N & (rng.random(num) < drop / RIGHT))
            reference.append(self.run(truth_N, base_N, rng))
            other.append(self.run(truth_N, (base_N ^ flipped_N) & ~lost_N, rng))
        truths = [*map("c{}".format, truth_N.tolist()), *[None] * (self.num_rows - num)]
        return Study(truths, reference, other)

    @staticmethod
    def flipped(base_N: NDArray[Any], share: float, shift: float, rng: Generator) -> NDArray[Any]:
        """Rows that change: `share` of all, half of them for the better, and `shift` more for the better."""
        better, worse = share / 2 + max(shift, 0.0), share / 2 + max(-shift, 0.0)
        return rng.random(len(base_N)) < np.where(base_N, worse / RIGHT, better / (1 - RIGHT))

    def run(self, truth_N: NDArray[Any], right_N: NDArray[Any], rng: Generator) -> Run:
        if rng.random() < self.nan:
            return None
        predicted_N = np.where(right_N, truth_N, wrong_class(truth_N, self.num_classes, rng))
        return [*map("c{}".format, predicted_N.tolist()), *["c0"] * (self.num_rows - len(truth_N))]


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


@dataclass(frozen=True)
class LearnedNothing:
    """Predictions that do not depend on the text, nearly the same in all runs."""

    labelled: int
    num_rows: int

    def __call__(self, rng: Generator, num_runs: int) -> Study:
        num = self.labelled
        truth_N, guess_N = rng.integers(0, 3, (2, num))
        runs: list[list[Run]] = [[], []]
        for _ in range(num_runs):
            for side in runs:
                guess = np.where(rng.random(num) < 0.01, rng.integers(0, 3, num), guess_N)
                side.append([*map("c{}".format, guess.tolist()), *["c0"] * (self.num_rows - num)])
        return Study([*map("c{}".format, truth_N.tolist()), *[None] * (self.num_rows - num)], *runs)


def macro_f1_loss(draw: RareClass) -> float:
    """Measure the loss in points on a large sample of the same population."""
    big = replace(draw, num_rows=400_000, rare=draw.rare * 400)
    study = big(np.random.default_rng(12345), 1)
    reference, other = (
        f1_score(study.truths, one[0], average="macro") for one in (study.reference, study.other)
    )
    return 100 * float(reference - other)


def cells() -> list[Cell]:
    accuracy, macro = labels(4, "accuracy"), labels(4, "f1_macro")
    one, many = (1,), (9, 19, 50)
    few = {"labelled": 50, "flips": 0.002}
    alike = {"rows": 0.005, "spread": 0.0}
    lost = "loss of 0.5 % of the rows"
    same_rows, many_rows = Accuracy(loss=0.5, same_rows=True), Accuracy(10_000, flips=0.005, spread=0.0)
    score = "one model each: mean of two tasks, one labelled in 50 rows loses 2 %"

    def rare(name: str, num_classes: int, rows: int, lost: float, looks: Sequence[int] = LOOKS) -> Cell:
        draw = RareClass(num_classes, rows, lost)
        return Cell(name, labels(num_classes, "f1_macro"), draw, macro_f1_loss(draw), looks)

    def nothing(num: int, num_rows: int) -> Cell:
        name = f"learned nothing, {num:,} of {num_rows:,} rows labelled"
        return Cell(name, labels(3, "f1_macro"), LearnedNothing(num, num_rows), 0.0, has_learned=False)

    return [
        Cell("no difference, 1,000 rows", accuracy, Accuracy(), 0.0),
        Cell("no difference, macro F1, 1,000 rows", macro, Accuracy(), 0.0),
        Cell("no difference, the same rows flip, 1,000 rows", accuracy, Accuracy(same_rows=True), 0.0),
        Cell("loss of 0.5 in all runs and rows, 1,000 rows", accuracy, Accuracy(loss=0.5), 0.5),
        Cell("loss of 0.5, the same rows flip, 1,000 rows", accuracy, same_rows, 0.5),
        Cell(f"{lost}, 1,000 rows", accuracy, Accuracy(rows=0.005), 0.5),
        Cell(f"{lost}, no flips, 1,000 rows", accuracy, Accuracy(flips=0.0, **alike), 0.5),
        Cell("50 of 1,000 rows labelled, 1 % lost", accuracy, Accuracy(rows=0.01, **few), 1.0),
        Cell("50 of 1,000 rows labelled, 2 % lost", accuracy, Accuracy(rows=0.02, **few), 2.0),
        rare("macro F1, 20 classes, a class of 5 rows loses 20 %", 20, 5, 0.2),
        rare("macro F1, 10 classes, a class of 5 rows loses 15 %", 10, 5, 0.15),
        rare("one model each: macro F1, 10 classes, a class of 3 rows loses 30 %", 10, 3, 0.3, one),
        Cell("span F1, spans in 50 of 1,000 texts, 2 % missed", SPANS, Spans(50, 0.02), 1.9),
        Cell("span F1, spans in 100 of 1,000 texts, 2 % missed", SPANS, Spans(100, 0.02), 1.9),
        Cell("one run in twenty loses 20 points", accuracy, Accuracy(collapses=0.05), 1.0, is_exempt=True),
        Cell("NaN in 10 % of the runs of both, 50 runs", accuracy, Accuracy(200, nan=0.1), 0.0, many),
        Cell("NaN in 20 % of the runs of both, 50 runs", accuracy, Accuracy(200, nan=0.2), 0.0, many),
        nothing(50, 1000),
        nothing(3000, 3000),
        ScoreCell(score, {}, TwoTasks(0.02), 1.0, one),
        Cell(f"one model each: {lost}, 3,000 rows", accuracy, Accuracy(3000, **alike), 0.5, one),
        Cell("one model each: no difference, 10,000 rows", accuracy, many_rows, 0.0, one),
        Cell("no difference, 3,000 rows", accuracy, Accuracy(3000), 0.0),
    ]


def verdict_of(cell: Cell, seed: Sequence[int]) -> str:
    """The first verdict that a study is given."""
    study = cell.draw(np.random.default_rng(seed), max(cell.looks))
    for num in cell.looks:
        found = cell.judge(study, num)
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
