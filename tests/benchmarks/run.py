"""Ours against the peers on the same work: `make bench`, or `make bench BENCH="1 2" PAIRS=5`.

Every contender runs in turn in processes of its own, A B C A B C ..., after one round that is not counted,
so that what the machine does meanwhile meets all alike. A figure is the median over the rounds of ours over
the peer's, with minimum and maximum; the rates themselves are printed below it. Run it on a machine that
does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from workload import WORKLOADS, write_workload

CONTENDERS = Path(__file__).with_name("contenders.py")


@dataclass(frozen=True)
class Figure:
    """One ratio of ours to a peer's."""

    number: str
    what: str
    workload: str
    precision: str
    peer: str
    measure: str
    """`train` and `evaluate` are examples/s; `process` is 1 / seconds of the whole process."""
    at_least: float
    ours: str = "hpo"


FIGURES = (
    Figure("1", "training, long, fp32, Trainer", "long", "fp32", "trainer", "train", 2.0),
    Figure("2", "training, long, bf16, Trainer", "long", "bf16", "trainer", "train", 2.5),
    Figure("3a", "training, long, fp32, Trainer by length", "long", "fp32", "trainer-grouped", "train", 1.25),
    Figure("3b", "training, long, bf16, Trainer by length", "long", "bf16", "trainer-grouped", "train", 1.6),
    Figure("4", "training, long, bf16, Lightning", "long", "bf16", "lightning", "train", 2.5),
    Figure("5", "evaluation, long, bf16, Trainer.evaluate", "long", "bf16", "trainer", "evaluate", 2.0),
    Figure("6", "training, short, bf16, Trainer", "short", "bf16", "trainer", "train", 2.0),
    Figure("7", "hyperparameter_search", "short", "bf16", "trainer-study", "process", 2.5, "hpo-study"),
)  # fmt: skip


def run_contender(name: str, folder: Path, workload: str, precision: str) -> dict[str, float]:
    """What one contender measured. Raises RuntimeError with the end of its output where it failed."""
    command = [sys.executable, str(CONTENDERS), name, str(folder), workload, precision]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-2000:]}")
    return {"process": 1 / seconds, **json.loads(done.stdout.splitlines()[-1])}


def rounds(
    workload: str, precision: str, names: Sequence[str], folder: Path, num_rounds: int
) -> Iterator[dict[str, dict[str, float]]]:
    """{contender: measured} of each round but the first."""
    for number in range(num_rounds + 1):
        results = {name: run_contender(name, folder, workload, precision) for name in names}
        shown = "  ".join(f"{name} {1 / result['process']:.0f} s" for name, result in results.items())
        print(f"{workload} {precision} round {number}: {shown}", file=sys.stderr)
        if number:
            yield results


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figures", nargs="*", help="numbers of figures; default: all")
    parser.add_argument("--pairs", type=int, default=5, help="rounds that are counted")
    arguments = parser.parse_args()
    unknown = set(arguments.figures) - {figure.number for figure in FIGURES}
    if unknown:
        parser.error(f"there is no figure {', '.join(sorted(unknown))}")
    chosen = [figure for figure in FIGURES if not arguments.figures or figure.number in arguments.figures]
    groups: dict[tuple[str, str], list[Figure]] = defaultdict(list)
    for figure in chosen:
        groups[figure.workload, figure.precision].append(figure)
    print(
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {platform.processor() or platform.machine()}, "
        f"{len(os.sched_getaffinity(0))} cores, median of {arguments.pairs} rounds (minimum to maximum)"
    )
    with tempfile.TemporaryDirectory() as work:
        for (workload, precision), figures in groups.items():
            folder = Path(work) / workload
            print(f"\n{workload} texts of {write_workload(WORKLOADS[workload], folder)}, {precision}")
            names = list(dict.fromkeys(name for figure in figures for name in (figure.ours, figure.peer)))
            results = list(rounds(workload, precision, names, folder, arguments.pairs))
            for figure in figures:
                ratios = [
                    result[figure.ours][figure.measure] / result[figure.peer][figure.measure]
                    for result in results
                ]
                verdict = "reached" if statistics.median(ratios) >= figure.at_least else "NOT reached"
                wanted = f"wanted {figure.at_least}x: {verdict}"
                print(f"  {figure.number:3} {figure.what}: {spread(ratios)}x; {wanted}")
            for name in names:
                for measure in results[0][name]:
                    values = [result[name][measure] for result in results]
                    if measure == "process":
                        print(f"      {name:16} process  {spread([1 / value for value in values])} s")
                    elif measure == "padding":
                        print(f"      {name:16} padding  {spread(values)} of the places")
                    else:
                        print(f"      {name:16} {measure:8} {spread(values)} examples/s")


if __name__ == "__main__":
    main()
