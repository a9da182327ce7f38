"""Error rates of verdicts, by simulated studies whose true losses are known.

    python tests/benchmarks/verdict_errors.py [--studies 2000] [--seed 0] [--cell NAME ...] [--processes 2]

Each study draws truths and predictions of a reference and of another model, and plants a loss in the other
one. The engine of `hpo.compare_predictions` judges the first 9, 12, 18, 27 and 36 runs in turn, as `hpo
compare` does with three configurations, and a study counts as `as good` or `worse` if it says so at any of
these looks. The planted losses share no code with the product. A verdict `as good` states a condition on runs
with large losses. It is an error only if the planted losses meet this condition: the column `error` counts
those. Prints a Markdown table with the share of each verdict and its 95 % interval.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.stats import binomtest, lognorm
from sklearn.metrics import f1_score

from hpo.data.tasks import make_tasks, read_task_configs
from hpo.evaluation.contributions import Scored, Statistics, scored
from hpo.evaluation.verdict import Question, Verdict, facts_of, judge
from hpo.tasks.example import Example
from hpo.tasks.kind import Task
from hpo.training.metrics import row_statistics

LOOKS = (9, 12, 18, 27, 36)
COVERED = 2.0
"""Points of a run's loss that the condition of a verdict leaves out, with a margin of 0.5."""
ERROR = 0.025
RIGHT = 0.85
Run = list[Any] | None


@dataclass(frozen=True)
class Study:
    """Drawn predictions of as many runs as the largest look needs."""

    truths: list[Any]
    reference: list[Run]
    other: list[Run]
    groups: NDArray[Any] | None = None


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
    excess: float = 0.0
    """Mean over runs of the losses beyond `COVERED`."""
    has_learned: bool = True
    """Whether any verdict can be right."""

    @property
    def wrong(self) -> tuple[str, ...]:
        """The verdicts that are errors."""
        if not self.has_learned:
            return ("as_good", "worse")
        as_good = ("as_good",) if self.loss >= self.margin else ()
        return as_good + (("worse",) if self.loss <= self.margin else ())

    def verdicts(self, study: Study) -> Iterator[Verdict]:
        """The verdicts of the looks in turn."""
        config = read_task_configs({"t": {**self.task, "primary_metric": None}}, "task")["t"]
        task = replace(make_tasks({"t": config}, "task")[0], primary=self.task["primary_metric"])
        metric, examples = f"t/{task.primary_metric}", examples_of(task, study.truths)

        def statistics(run: list[Any]) -> Statistics:
            return {"t": row_statistics(task, predicted(run), examples, study.groups)}

        def score(run: Run) -> Scored | None:
            if run is None:
                return None
            is_accuracy = task.primary_metric == "accuracy"
            return accuracy(study, run) if is_accuracy else scored(statistics(run), metric)

        known = next((run for run in [*study.reference, *study.other] if run is not None), None)
        yield from self.judged(
            metric, statistics(known) if known else {}, map(score, study.reference), map(score, study.other)
        )

    def judged(self, metric: str, known: Statistics, *sides: Iterator[Scored | None]) -> Iterator[Verdict]:
        """The verdicts on scores, with facts from the statistics of a `known` run."""
        asked, scores = Question(metric, self.margin), ([], [])
        facts = facts_of(known, asked) if known else None
        for num in self.looks:
            for side, of_side in zip(sides, scores, strict=True):
                of_side.extend(islice(side, num - len(of_side)))
            yield judge(asked, *scores, facts)


def accuracy(study: Study, run: list[Any]) -> Scored:
    """The score of a run in accuracy, faster than `scored`."""
    is_known_N = np.array([truth is not None for truth in study.truths])
    right_N = (np.array(run) == np.array(study.truths))[is_known_N].astype(float)
    num = len(right_N)
    group_N = (
        np.arange(num)
        if study.groups is None
        else np.unique(study.groups[is_known_N], return_inverse=True)[1]
    )
    sizes_G = np.bincount(group_N)
    changes_G = np.bincount(group_N, right_N - right_N.mean())
    scale = 100 * len(sizes_G) / num
    return Scored(100 * right_N.mean(), num, 100 * right_N.mean() + scale * changes_G, scale * sizes_G)


def predicted(run: list[Any]) -> list[Any]:
    """Predictions as the engine has them: spans as (name, start, end)."""
    if not isinstance(run[0], dict):
        return run
    return [[(name, *pair) for name, of in row.items() for pair in of] for row in run]


def examples_of(task: Task, truths: Sequence[Any]) -> list[Example]:
    """Rows with these truths: a class, spans by name, or None for a row without a label."""
    examples = []
    for row, truth in enumerate(truths):
        is_span = isinstance(truth, dict)
        labels_ = {} if is_span or truth is None else {task.name: truth}
        spans = {name: [tuple(one) for one in of] for name, of in truth.items()} if is_span else {}
        annotated = frozenset() if truth is None else frozenset([task.name])
        examples.append(Example(str(row), " " * 400, labels_, spans, annotated=annotated))
    return examples


@dataclass(frozen=True)
class ScoreCell(Cell):
    """A cell of the mean over two tasks, whose rows are pairs: what `hpo deploy` judges."""

    def verdicts(self, study: Study) -> Iterator[Verdict]:
        tasks = [Task(name, "single_label", tuple(classes(4)), primary="accuracy") for name in ("t", "u")]
        examples = []
        for n, pair in enumerate(study.truths):
            labels_ = {name: truth for name, truth in zip("tu", pair, strict=True) if truth is not None}
            examples.append(Example(str(n), "", labels_, {}, annotated=frozenset(labels_)))
        statistics = [
            {
                task.name: row_statistics(task, [pair[place] for pair in run], examples)
                for place, task in enumerate(tasks)
            }
            for run in (study.reference[0] or [], study.other[0] or [])
        ]
        yield from self.judged("score", statistics[0], *(iter([scored(one, "score")]) for one in statistics))


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
    (`spread`, standard deviation in points). `loss` points are lost in rows that each run draws anew, and
    `of_run` more by the run. `rows` is the share of all rows that is lost in all runs, `nan` the share of
    runs without predictions on either side. An author has `author` rows in turn, and `lost` of the authors
    are lost in all runs. Each row stands `copies` times.
    """

    num_rows: int = 1000
    num_classes: int = 4
    labelled: int | None = None
    flips: float = 0.02
    spread: float = 0.2
    loss: float = 0.0
    rows: float = 0.0
    of_run: Callable[[Generator], float] | None = None
    author: int = 1
    lost: float = 0.0
    copies: int = 1
    nan: float = 0.0
    same_rows: bool = False

    def __call__(self, rng: Generator, num_runs: int) -> Study:
        num, K = self.labelled or self.num_rows, self.num_classes
        truth_N = rng.integers(0, K, num)
        base_N = rng.random(num) < RIGHT
        authors_N = np.arange(num) // self.author
        always_N = base_N & (rng.random(num) < self.rows / RIGHT)
        always_N |= (rng.random(num) < self.lost)[authors_N]
        tends_N = self.flipped(base_N, 2 * self.flips, 0.0, rng)
        reference: list[Run] = []
        other: list[Run] = []
        for _ in range(num_runs):
            shift = rng.normal(0, self.spread) / 100
            if self.same_rows:
                flipped_N = (tends_N & (rng.random(num) < 0.5)) ^ self.flipped(base_N, 0.0, shift, rng)
            else:
                flipped_N = self.flipped(base_N, self.flips, shift, rng)
            drop = (self.loss + (self.of_run(rng) if self.of_run else 0.0)) / 100
            lost_N = always_N | (base_N & (rng.random(num) < drop / RIGHT))
            reference.append(self.run(truth_N, base_N, rng))
            other.append(self.run(truth_N, (base_N ^ flipped_N) & ~lost_N, rng))
        truths = [*map("c{}".format, truth_N.tolist()), *[None] * (self.num_rows - num)]
        groups = authors_N if self.author > 1 else None
        if self.copies > 1:
            truths, groups = truths * self.copies, np.tile(np.arange(num), self.copies)
            reference, other = ([run and run * self.copies for run in side] for side in (reference, other))
        return Study(truths, reference, other, groups)

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
class Large:
    """A share of the runs loses `points`."""

    share: float
    points: float

    def __call__(self, rng: Generator) -> float:
        return self.points * (rng.random() < self.share)

    @property
    def excess(self) -> float:
        return self.share * max(self.points - COVERED, 0.0)


@dataclass(frozen=True)
class Skewed:
    """Each run loses a lognormal number of points with this mean, at most all right rows."""

    sigma: float
    mean: float = 0.5

    @property
    def distribution(self) -> Any:
        return lognorm(self.sigma, scale=self.mean / np.exp(self.sigma**2 / 2))

    def __call__(self, rng: Generator) -> float:
        return min(float(self.distribution.rvs(random_state=rng)), 100 * RIGHT)

    @property
    def excess(self) -> float:
        return float(self.distribution.expect(lambda points: points - COVERED, lb=COVERED))


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
class UnevenSpans:
    """One model on each side. A text has 1 to about 30 spans, 4 on average.

    The other model misses all spans in a share of the texts with `least` spans or more.
    """

    lost: float
    least: int = 1
    num_rows: int = 1000
    errors: float = 0.05

    def __call__(self, rng: Generator, num_runs: int) -> Study:  # noqa: ARG002
        num_N = rng.geometric(0.25, self.num_rows)
        right_N = [rng.random(num) >= self.errors for num in num_N]
        lost_N = (rng.random(self.num_rows) < self.lost) & (num_N >= self.least)
        reference = [self.spans(right_S) for right_S in right_N]
        other = [{"a": []} if is_lost else row for is_lost, row in zip(lost_N, reference, strict=True)]
        truths = [self.spans(np.ones(num, bool)) for num in num_N]
        return Study(truths, [reference], [other])

    @staticmethod
    def spans(right_S: NDArray[Any]) -> dict[str, Any]:
        return {"a": [[3 * s, 3 * s + (3 if right else 2)] for s, right in enumerate(right_S)]}

    @property
    def loss(self) -> float:
        """The true loss of micro F1 in points, from the expected numbers of spans."""
        sizes = np.arange(1, 400)
        spans_S = sizes * 0.25 * 0.75 ** (sizes - 1)
        true, lost = spans_S.sum(), self.lost * spans_S[self.least - 1 :].sum()
        hits = 1 - self.errors
        return 100 * float(hits - 2 * hits * (true - lost) / (2 * true - lost))


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

    def large(share: float, points: float) -> Cell:
        of_run = Large(share, points)
        name = f"{100 * share:g} % of the runs lose {points:g} points"
        return Cell(name, accuracy, Accuracy(of_run=of_run), share * points, excess=of_run.excess)

    def skewed(sigma: float) -> Cell:
        of_run = Skewed(sigma)
        name = f"each run's loss is lognormal, sigma {sigma:g}"
        return Cell(name, accuracy, Accuracy(of_run=of_run), of_run.mean, excess=of_run.excess)

    def authors(num: int, size: int, lost: float) -> Cell:
        name = f"{num} authors of {size} rows, {100 * lost:g} % of the authors lost"
        return Cell(name, accuracy, Accuracy(num * size, author=size, lost=lost), 100 * RIGHT * lost)

    def copied(copies: int) -> Cell:
        draw = Accuracy(1000 // copies, rows=0.005, copies=copies, spread=0.0)
        return Cell(f"each row {copies} times, 0.5 % of them lost", accuracy, draw, 0.5)

    def rare(
        name: str, num_classes: int, rows: int, lost: float, looks: Sequence[int] = LOOKS, margin: float = 0.5
    ) -> Cell:
        draw = RareClass(num_classes, rows, lost)
        return Cell(name, labels(num_classes, "f1_macro"), draw, macro_f1_loss(draw), looks, margin)

    def uneven(lost: float, least: int) -> Cell:
        draw = UnevenSpans(lost, least)
        name = f"one model each: span F1, {100 * lost:g} % of the texts with {least} spans or more lost"
        return Cell(name, SPANS, draw, draw.loss, one, margin=draw.loss)

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
        uneven(0.04, 1),
        uneven(0.5, 13),
        uneven(0.9, 15),
        rare("one model each: macro F1, 5 classes, a class of 10 rows loses 30 %", 5, 10, 0.3, one, 3.3),
        large(0.05, 20),
        large(0.05, 10),
        large(0.1, 10),
        large(0.1, 5),
        large(0.25, 2),
        skewed(1),
        skewed(1.5),
        skewed(2),
        authors(100, 10, 0.005 / RIGHT),
        authors(100, 20, 0.01 / RIGHT),
        authors(1000, 2, 0.005 / RIGHT),
        copied(2),
        copied(4),
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
    """The first verdict that a study is given; `excused` for `as_good` if its condition is broken."""
    study = cell.draw(np.random.default_rng(seed), max(cell.looks))
    for found in cell.verdicts(study):
        if found.verdict == "as_good" and found.condition and found.condition.slack <= cell.excess:
            return "excused"
        if found.verdict != "not_shown":
            return found.verdict
        if found.reason:  # more runs do not help
            break
    return "not_shown"


def rates(cell: Cell, num_studies: int, seed: int, map_: Callable[..., Any] = map) -> dict[str, int]:
    """The number of studies with each verdict."""
    seeds = [(seed, study) for study in range(num_studies)]
    found = list(map_(partial(verdict_of, cell), seeds))
    return {name: found.count(name) for name in ("as_good", "worse", "excused")}


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
    print("| situation | true loss | as good | condition broken | worse | error |")
    print("| --- | --- | --- | --- | --- | --- |")
    with ProcessPoolExecutor(asked.processes) as pool:
        for cell in cells():
            if asked.cell and not any(part in cell.name for part in asked.cell):
                continue
            found = rates(cell, asked.studies, asked.seed, partial(pool.map, chunksize=10))
            wrong = max(found[name] for name in cell.wrong)
            above = binomtest(wrong, asked.studies, ERROR, alternative="greater").pvalue < 0.01
            error = "above 2.5 %" if above else "within 2.5 %"
            shares = [_share(found[name], asked.studies) for name in ("as_good", "excused", "worse")]
            print("| " + " | ".join([cell.name, f"{cell.loss:.2f}", *shares, error]) + " |", flush=True)


if __name__ == "__main__":
    main()
