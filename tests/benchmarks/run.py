"""Ours against the peers on the same work: `make bench`, or `make bench BENCH="1 2" PAIRS=5 EXAMPLES=160`.

Every contender runs in turn in processes of its own, A B C A B C ..., after one round that is not counted,
so that what the machine does meanwhile meets all alike. A figure is the median over the rounds of ours over
the peer's, with minimum and maximum; the rates themselves are printed below it. Run it on a machine that
does nothing else.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

import gpu
from workload import WORKLOADS, run_apart, spread, write_workload

from hpo.device import probe_device
from hpo.precision.table import support


@dataclass(frozen=True)
class Figure:
    """One ratio of ours to a peer's, or one number of ours where no peer is named."""

    number: str
    what: str
    work: tuple[str, str]
    """Workload and precision."""
    measure: str
    """A key of what the contender measured."""
    wanted: float
    peer: str = ""
    ours: str = "hpo"
    unit: str = "x"
    at_most: bool = False
    """Whether `wanted` is an upper bound."""

    @property
    def contenders(self) -> tuple[str, ...]:
        return (self.ours, *((self.peer,) if self.peer else ()))

    def of(self, measured: Mapping[str, Mapping[str, float]]) -> float:
        """This figure in one round."""
        value = measured[self.ours][self.measure]
        return value / measured[self.peer][self.measure] if self.peer else value

    def verdict(self, values: Sequence[float]) -> str:
        median = statistics.median(values)
        reached = median <= self.wanted if self.at_most else median >= self.wanted
        bound = "at most" if self.at_most else "at least"
        return f"wanted {bound} {self.wanted:g}{self.unit}: {'reached' if reached else 'NOT reached'}"


LONG_FP32, LONG_BF16 = ("long", "fp32"), ("long", "bf16")
SHORT_FP32, SHORT_BF16 = ("short", "fp32"), ("short", "bf16")
FIGURES = (
    Figure("1", "training against Trainer", LONG_FP32, "train", 2.0, "trainer"),
    Figure("2", "training against Trainer", LONG_BF16, "train", 2.5, "trainer"),
    Figure("3a", "training against Trainer by length", LONG_FP32, "train", 1.25, "trainer-grouped"),
    Figure("3b", "training against Trainer by length", LONG_BF16, "train", 1.6, "trainer-grouped"),
    Figure("4", "training against Lightning", LONG_BF16, "train", 2.5, "lightning"),
    Figure("5", "evaluation against Trainer.evaluate", LONG_BF16, "evaluate", 2.0, "trainer"),
    Figure("6", "training against Trainer", SHORT_BF16, "train", 2.0, "trainer"),
    Figure("8", "training, share of the products' own rate", LONG_FP32, "product_share", 0.55, unit=""),
    Figure("9", "a trial outside training", SHORT_FP32, "outside", 0.5, "", "hpo-study", " s", True),
)
GPU = "gpu"
UNITS = {"train": "examples/s", "evaluate": "examples/s", "padding": "of the places", "outside": "s"}


def run_contender(name: str, folder: Path, workload: str, precision: str) -> dict[str, float]:
    """What one contender measures in this process: one epoch, then an evaluation as it does by default.

    Rates leave out the first steps, as many for each.
    """
    contenders = import_module("ours" if name.startswith("hpo") else "peers").CONTENDERS
    with redirect_stdout(sys.stderr):
        return dict(contenders[name](folder, WORKLOADS[workload], precision))


def rounds(
    workload: str, precision: str, names: Sequence[str], folder: Path, num_rounds: int
) -> Iterator[dict[str, dict[str, float]]]:
    """{contender: measured} of each round but the first."""
    for number in range(num_rounds + 1):
        results = {name: run_apart(run_contender, name, folder, workload, precision) for name in names}
        print(f"{workload} {precision} round {number} of {num_rounds}", file=sys.stderr)
        if number:
            yield results


def write_texts(workload: str, folder: Path, num_train: int | None) -> str:
    """Write what the contenders read into `folder` and say what it is."""
    texts = WORKLOADS[workload]
    if num_train is not None:
        texts = replace(texts, num_train=num_train, num_validation=num_train // 2)
    return f"{texts.num_train} training texts of {write_workload(texts, folder)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figures", nargs="*", help=f"numbers of figures, default: all; or {GPU}")
    parser.add_argument("--pairs", type=int, help="rounds that are counted; default: 5, or 3 of gpu")
    parser.add_argument("--examples", type=int, help="train on so many of a workload's texts")
    parser.add_argument("--results", help=f"{GPU}: a file to which figures are added as lines of JSON")
    arguments = parser.parse_args()
    if arguments.figures == [GPU]:
        results = ["--results", arguments.results] if arguments.results else []
        gpu.main([*(["--rounds", str(arguments.pairs)] if arguments.pairs else []), *results])
        return
    num_rounds = arguments.pairs or 5
    known = [figure.number for figure in FIGURES]
    if unknown := set(arguments.figures) - set(known):
        parser.error(f"there is no figure {', '.join(sorted(unknown))}, only {', '.join(known)}")
    wanted = arguments.figures or known
    chosen = [figure for figure in FIGURES if figure.number in wanted]
    groups: dict[tuple[str, str], list[Figure]] = defaultdict(list)
    for figure in chosen:
        groups[figure.work].append(figure)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    device = probe_device("cpu")
    print(
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {device.describe()}, torch {device.torch_version}, "
        f"median of {num_rounds} rounds (minimum to maximum)"
    )
    with tempfile.TemporaryDirectory() as work:
        for (workload, precision), figures in groups.items():
            if support(precision, device).level != "native":
                print(f"\n{workload} texts, {precision}: left out, it is not native on {device.name}")
                continue
            folder = Path(work) / workload
            origin = write_texts(workload, folder, arguments.examples)
            print(f"\n{workload}: {origin}, {precision}", flush=True)
            names = list(dict.fromkeys(name for figure in figures for name in figure.contenders))
            results = list(rounds(workload, precision, names, folder, num_rounds))
            for figure in figures:
                values = [figure.of(result) for result in results]
                measured = f"{spread(values)}{figure.unit}"
                print(f"  {figure.number:3} {figure.what}: {measured}; {figure.verdict(values)}")
            for name in names:
                for measure in results[0][name]:
                    values = [result[name][measure] for result in results]
                    print(f"      {name:16} {measure:13} {spread(values)} {UNITS.get(measure, '')}")


if __name__ == "__main__":
    main()
