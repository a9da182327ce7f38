"""What tuners record about precision, what their trials ran, and what a broken precision costs them.

    python tests/benchmarks/peer_precision.py [--trials 40] [--seeds 3] [--broken bf16] [CONTENDER ...]

Each contender (`peer_searches.py`) searches precision (fp32, bf16, fp16) with the same tiny fresh BERT on the
same 64 generated posts, on the CPU, every search in a process of its own. First each precision once with a
sound model: what was asked for, what the study has of it, and what ran; and fp32 from a checkpoint whose
weights are stored in bf16. Then TPE over precision and learning
rate with a layer whose output is NaN wherever it is in the `--broken` precision. Peers that are not installed
(`make bench` does it) are named and left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import torch
from peer_searches import (
    CONTENDERS,
    DTYPES,
    WORKLOAD,
    Search,
    Trial,
    run_search,
    write_bf16_checkpoint,
)
from peers import missing
from workload import run_apart, write_workload

from hpo.device import probe_device

COSTS = (
    "asked for it",
    "trained in it",
    "ended without a value",
    "complete, trained on NaN",
    "recorded what did not run",
    "steps on NaN",
)


def costs(trials: Sequence[Trial], broken: str) -> tuple[int, ...]:
    """What the `broken` precision cost a search, in the order of COSTS: trials, and steps at last."""
    return (
        sum(trial.asked == broken for trial in trials),
        sum(trial.seen.num_steps > 0 and trial.ran(broken) for trial in trials),
        sum(trial.state != "COMPLETE" for trial in trials),
        sum(trial.state == "COMPLETE" and trial.seen.trained_nan for trial in trials),
        sum(not trial.is_true for trial in trials),
        sum(trial.seen.num_steps for trial in trials if trial.seen.trained_nan),
    )


def print_row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_sound(names: Sequence[str], folder: Path, **search: Any) -> None:
    print_row("contender", "recorded", "state", "what else is recorded", "linear layers gave", "autocast")
    print_row(*["---"] * 6)
    for name in names:
        trials = run_apart(run_search, name, Search(folder, **search))
        for trial in sorted(trials, key=lambda one: list(DTYPES).index(one.asked)):
            ran = (" and ".join(sorted(kinds)) for kinds in (trial.seen.dtypes, trial.seen.autocast))
            print_row(name, trial.asked, trial.state, trial.noted, *ran)


def print_broken(names: Sequence[str], folder: Path, num_trials: int, num_seeds: int, broken: str) -> None:
    print(f"\n{num_trials} trials, {broken} is always NaN; median of {num_seeds} seeds (each)")
    print_row("contender", *COSTS)
    print_row(*["---"] * (1 + len(COSTS)))
    for name in names:
        searches = [Search(folder, num_trials, seed, broken) for seed in range(num_seeds)]
        of_seeds = [costs(run_apart(run_search, name, search), broken) for search in searches]
        shown = (
            f"{statistics.median(each):g} ({', '.join(map(str, each))})"
            for each in zip(*of_seeds, strict=True)
        )
        print_row(name, *shown)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("contenders", nargs="*", metavar="CONTENDER", help=f"of {', '.join(CONTENDERS)}")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--broken", choices=DTYPES, default="bf16")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.contenders) - set(CONTENDERS)):
        parser.error(f"there is no contender {', '.join(unknown)}; there are {', '.join(CONTENDERS)}")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    names = []
    for name in arguments.contenders or CONTENDERS:
        if package := missing(name):
            print(f"{name}: left out, {package} is not installed (`make bench` installs the peers)")
        else:
            names.append(name)
    device = probe_device("cpu").describe()
    print(f"{device}, torch {torch.__version__}, optuna {optuna.__version__}\n")
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        write_workload(WORKLOAD, folder)
        print_sound(names, folder)
        print("\nFrom a checkpoint whose weights are stored in bf16:\n")
        encoder = write_bf16_checkpoint(folder / "encoder")
        print_sound(names, folder, encoder=encoder, precisions=("fp32",), num_trials=1)
        print_broken(names, folder, arguments.trials, arguments.seeds, arguments.broken)


if __name__ == "__main__":
    main()
