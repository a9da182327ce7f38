"""How often `hpo compare` is wrong, by simulated comparisons whose true differences are known.

    python tests/benchmarks/decision_errors.py [--studies 400] [--seed 0]

Prints a Markdown table: a row for each true difference and number of rows, a column for each limit of runs.
The verdicts are those of `hpo.compare.decision.decide`, called on arrays, look by look: `as good` counts
where any look up to the limit says it. Each run of a precision flips rows for and against it, and moves by
its seed besides; each study has other rows and other seeds. The margin is 0.5 points.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from hpo.compare.decision import decide, next_look

MARGIN = 0.5
SPREAD = 0.2
"""Standard deviation, in points, of what a seed does to all rows alike."""
FLIPPED = 0.02
"""Share of the rows that a run flips, half of them for the precision."""
RUNS = (3, 6, 12, 24, 50)
ROWS = (100, 300, 1000, 3000)
_AT_ONCE = 2**25


@dataclass(frozen=True)
class Truth:
    """What is true of a precision."""

    name: str
    loss: float = 0.0
    """Points, in every run alike, of all rows."""
    texts: float = 0.0
    """Share of the population's texts that lose always, so 100 times as many points."""
    collapses: float = 0.0
    """Share of the runs that lose 20 points."""
    same_rows: bool = False
    """Whether it is always the same rows that flip, as those whose answer is nearly undecided."""

    @property
    def mean_loss(self) -> float:
        return self.loss + 100 * self.texts + 20 * self.collapses


TRUTHS = (
    Truth("no difference"),
    Truth("no difference, the same rows flip", same_rows=True),
    Truth("loss of 0.5 in all runs and rows", loss=0.5),
    Truth("loss of 0.5, the same rows flip", loss=0.5, same_rows=True),
    Truth("loss of 1 in all runs and rows", loss=1.0),
    Truth("loss of 0.5 in 0.5 % of the texts", texts=0.005),
    Truth("loss of 1 in 1 % of the texts", texts=0.01),
    Truth("5 % of the runs lose 20", collapses=0.05),
)


def draw(truth: Truth, shape: tuple[int, int, int], rng: Generator) -> NDArray[np.int8]:
    """What each row does in each run, precision minus fp32: -1, 0 or 1, [studies, runs, rows]."""
    studies, runs, rows = shape
    if truth.same_rows:
        tends = rng.random((studies, 1, rows), np.float32) < 2 * FLIPPED
        flips = tends & (rng.random(shape, np.float32) < 0.5)
        signs = np.where(rng.random((studies, 1, rows), np.float32) < 0.5, 1, -1).astype(np.int8)
        found = flips * signs
    else:
        drawn = rng.random(shape, np.float32)
        found = (drawn < FLIPPED / 2).astype(np.int8) - (drawn > 1 - FLIPPED / 2).astype(np.int8)
    lost = rng.random((studies, 1, rows)) < truth.texts
    shares = np.where(rng.random((studies, runs, 1)) < truth.collapses, 0.2, truth.loss / 100)
    lost = lost | (rng.random(shape, np.float32) < shares)
    return np.where(lost, np.int8(-1), found)


def said(truth: Truth, num_rows: int, num_studies: int, rng: Generator) -> Iterator[tuple[float, float]]:
    """The shares of studies in which `as good` and `worse` are said with at most each of `RUNS`."""
    most = max(RUNS)
    at_once = max(_AT_ONCE // (most * num_rows), 1)
    sizes = [at_once] * (num_studies // at_once) + [num_studies % at_once]
    parts = [_verdicts(draw(truth, (size, most, num_rows), rng), rng) for size in sizes if size]
    verdicts = np.concatenate(parts, axis=1)
    for of_limit in verdicts:
        yield float((of_limit > 0).mean()), float((of_limit < 0).mean())


def _verdicts(found: NDArray[np.int8], rng: Generator) -> NDArray[np.float64]:
    """The verdict of each study with at most each of `RUNS`: [limits, studies]."""
    num_studies, most, num_rows = found.shape
    differences = 100 * found.mean(axis=2) + SPREAD * rng.standard_normal((num_studies, most))
    verdict = np.zeros(num_studies)
    at_limit, num = [], min(RUNS)
    for limit in RUNS:
        while num <= limit:
            rows = 100 * found[:, :num].mean(axis=1)
            looked = decide(differences[:, :num], rows, MARGIN, row_bound=100.0, step=100 / num_rows)
            verdict = np.where(verdict == 0, looked.sign, verdict)
            num = limit if num < limit < next_look(num) else next_look(num)
        at_limit.append(verdict)
    return np.array(at_limit)


def table(num_studies: int, seed: int = 0, rows: Sequence[int] = ROWS) -> Iterator[Sequence[str]]:
    yield ("truth", "loss", "rows", *(f"{num} runs" for num in RUNS))
    for truth in TRUTHS:
        for num_rows in rows:
            shares = said(truth, num_rows, num_studies, np.random.default_rng(seed))
            cells = [f"{100 * good:.1f} / {100 * worse:.1f}" for good, worse in shares]
            yield (truth.name, f"{truth.mean_loss:g}", str(num_rows), *cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--studies", type=int, default=400, help="simulated studies a cell")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    print(f"{asked.studies} studies a cell, % in which `as good` / `worse` is said, margin {MARGIN}\n")
    for index, row in enumerate(table(asked.studies, asked.seed)):
        print("| " + " | ".join(row) + " |", flush=True)
        if not index:
            print("| " + " | ".join("---" for _ in row) + " |")


if __name__ == "__main__":
    main()
