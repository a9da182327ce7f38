"""Run every configuration of a search space once and write its course: a table for `search_tables.py`.

    python tests/benchmarks/tabulate_spaces.py [SPACE ...]

The spaces are the study files of `tests/benchmarks/spaces`; without any, all are run. A space is a grid, so
that what samplers search is what was run. Its table is a file of JSON lines beside the study file: a header
that says how and where it was made, then a line for each configuration. It takes the better part of an hour
and wants a core of its own: `OMP_NUM_THREADS=1 taskset -c 1 python ...`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import torch
import transformers

import hpo
from hpo.config.search_space import grid
from hpo.config.study_config import StudyConfig, load_study
from hpo.device import DeviceInfo, probe_device
from hpo.precision.table import support
from hpo.trial.callbacks import Callbacks
from hpo.trial.executor import Executor
from hpo.trial.telemetry import ScoredEvaluation

SPACES = Path(__file__).with_name("spaces")


class TabulatedEvaluation(NamedTuple):
    """One evaluation of a configuration."""

    index: int
    """1 for the first: what the worker reports to Optuna as its step."""
    step: int
    """Optimiser steps so far."""
    seconds: float
    """CPU time since the trial's start, set-up and this evaluation included: the cost of ending here."""
    score: float
    """The objective."""


def configurations(study: StudyConfig) -> list[dict[str, Any]]:
    """Every configuration of the study's space, in a random order that is always the same."""
    values = grid(study.search_space)
    every = [dict(zip(values, combination, strict=True)) for combination in product(*values.values())]
    random.Random(0).shuffle(every)
    return every


def tabulate(name: str) -> None:
    """Run every configuration of the space `name`, one after the other, and write the table at the end."""
    path = SPACES / f"{name}.yaml"
    study = load_study(path)
    device = probe_device(study.device)
    every = configurations(study)
    # Compatibility is measured once for all trials, as with the database of a study.
    measured: dict[str, Any] = {}
    cache = SimpleNamespace(get_compat=measured.get, put_compat=measured.setdefault)
    lines = [_header(study, name, device)]
    with tempfile.TemporaryDirectory() as runs:
        executor = Executor(study, device, Path(runs), cache)
        run_one(executor, every[0])  # imports, tokens and first allocations are no trial's
        for number, params in enumerate(every, start=1):
            row = run_one(executor, params)
            if row["outcome"] == "failed":
                raise RuntimeError(f"{params} failed: {row['reason']}")
            lines.append(row)
            print(f"{number} {row['outcome']} {row['score']} {row['seconds']} s {params}", flush=True)
    path.with_suffix(".jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )


def run_one(executor: Executor, params: Mapping[str, Any]) -> dict[str, Any]:
    """Train one configuration to its end, as a worker would, with the clock running; its line of the file.

    The cost is CPU time, which others on the machine do not change; with one thread it is the wall time of a
    machine that does nothing else.
    """
    folder = executor.runs_dir / "trial"
    evaluations: list[TabulatedEvaluation] = []
    started = time.process_time()

    def on_evaluation(scored: ScoredEvaluation) -> None:
        seconds = round(time.process_time() - started, 3)
        one, score = scored.evaluation, round(scored.values[0], 6)
        evaluations.append(TabulatedEvaluation(one.index, one.step, seconds, score))

    result = executor.run(params, folder, "tabulated", Callbacks(on_evaluation))
    seconds = time.process_time() - started
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "params": dict(params),
        "outcome": result.outcome,
        "reason": result.reason,
        "score": None if result.values is None else round(result.values[0], 6),
        "seconds": round(seconds, 3),
        "evaluations": evaluations,
    }


def _header(study: StudyConfig, name: str, device: DeviceInfo) -> dict[str, Any]:
    searched = study.search_space.get("fp_precision")
    precisions = searched.grid() if searched else [study.training.fp_precision]
    return {
        "command": f"python tests/benchmarks/tabulate_spaces.py {name}",
        "begun": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "machine": device.describe(),
        "num_threads": torch.get_num_threads(),
        "num_usable_cores": len(os.sched_getaffinity(0)),
        "note": "Seconds of a precision marked emulated in `support` are those of emulation: compare its "
        "scores only.",
        "support": {precision: support(precision, device).level for precision in precisions},
        "evaluation": TabulatedEvaluation._fields,
        "versions": {
            "hpo": hpo.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": numpy.__version__,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = sorted(path.stem for path in SPACES.glob("*.yaml"))
    parser.add_argument("spaces", nargs="*", metavar="SPACE", help=f"of {', '.join(known)}")
    names = parser.parse_args().spaces or known
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"there is no space {', '.join(unknown)}; there are {', '.join(known)}")
    for name in names:
        tabulate(name)


if __name__ == "__main__":
    main()
