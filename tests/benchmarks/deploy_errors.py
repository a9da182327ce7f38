"""How often `hpo deploy` calls a form as good that is not, by simulated splits whose true loss is known.

    python tests/benchmarks/deploy_errors.py [--splits 400] [--seed 0]

Prints a Markdown table. A split has rows of one class of two, of which fp32 gets 90 % right; a form turns
some of those that are right wrong, and some that are wrong right. The verdicts are those of `hpo.deploy`.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.random import Generator

from hpo.data.examples import Example
from hpo.data.tasks import Task
from hpo.deploy.drops import Scale
from hpo.training.metrics import RowStatistics, row_statistics

MAX_DROP = 1.0
ROWS = (50, 100, 200, 455, 1000)
GAINS = (0.0, 0.02)
LOSSES = (1.0, 0.0)
"""Net, in points; that at `MAX_DROP` is the largest that may be called as good by chance alone."""
_TASK = Task("intent", "single_label", ("a", "b"))
_FP32 = 0.9


@dataclass(frozen=True)
class Cell:
    """A kind of form, and of split."""

    num_rows: int
    loss: float
    """Net, in points."""
    gains: float
    """The share of texts that it makes better."""


def draw(cell: Cell, rng: Generator) -> tuple[dict[str, RowStatistics], dict[str, RowStatistics]]:
    """What a form and fp32 say of a split."""
    truth = rng.choice(_TASK.labels, cell.num_rows)
    is_right = rng.random(cell.num_rows) < _FP32
    turned = np.where(is_right, (cell.loss / 100 + cell.gains) / _FP32, cell.gains / (1 - _FP32))
    is_right_of_form = is_right ^ (rng.random(cell.num_rows) < turned)
    examples = [
        Example(str(i), "", {"intent": str(one)}, {}, annotated=frozenset({"intent"}))
        for i, one in enumerate(truth)
    ]
    wrong = np.where(truth == "a", "b", "a")
    found, reference = (
        {"intent": row_statistics(_TASK, np.where(right, truth, wrong).tolist(), examples)}
        for right in (is_right_of_form, is_right)
    )
    return found, reference


def verdicts(cell: Cell, num_splits: int, seed: int = 0) -> Counter[str]:
    """How often each is given."""
    rng, scale = np.random.default_rng(seed), Scale("intent/accuracy", False, MAX_DROP)
    return Counter(scale.judge(*draw(cell, rng)).verdict for _ in range(num_splits))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--splits", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    print("| true loss, points | texts made better | " + " | ".join(f"{n} rows" for n in ROWS) + " |")
    print("| --- | --- |" + " --- |" * len(ROWS))
    for loss, gains in product(LOSSES, GAINS):
        cells = []
        for num_rows in ROWS:
            found = verdicts(Cell(num_rows, loss, gains), asked.splits, asked.seed)
            shares = (100 * found[name] / asked.splits for name in ("as_good", "worse"))
            cells.append(" / ".join(f"{share:.1f}" for share in shares))
        print(f"| {loss:g} | {gains:.0%} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
