"""A search space with the course of every configuration, made by running each of them once.

A table is a file of JSON lines beside the study file that defines its space: a header that says how and
where it was made, then a line for each configuration. The space is a grid, so that what samplers search is
what was run.
"""

from __future__ import annotations

import json
import os
import platform
import random
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
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
Key = tuple[Any, ...]
"""Values of the searched settings, in the order of the search space."""


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


@dataclass(frozen=True)
class Row:
    """What became of one configuration."""

    params: Mapping[str, Any]
    outcome: str
    score: float | None
    """Of the best evaluation, as a trial's value is; None unless the outcome is `complete`."""
    seconds: float
    """CPU time of the whole trial."""
    evaluations: tuple[TabulatedEvaluation, ...]


@dataclass(frozen=True)
class Table:
    """A space with a row for each of its configurations."""

    study: StudyConfig
    header: Mapping[str, Any]
    rows: Mapping[Key, Row]

    def row(self, params: Mapping[str, Any]) -> Row:
        """The row that stands for `params`. Raises KeyError where its configuration was not tabulated."""
        return self.rows[tuple(params[name] for name in self.study.search_space)]

    @property
    def best_score(self) -> float:
        """The highest score of a configuration."""
        return max(row.score for row in self.rows.values() if row.score is not None)


def configurations(study: StudyConfig) -> list[dict[str, Any]]:
    """Every configuration of the study's space, in a random order that is always the same."""
    values = grid(study.search_space)
    every = [dict(zip(values, combination, strict=True)) for combination in product(*values.values())]
    random.Random(0).shuffle(every)
    return every


def table_names() -> list[str]:
    """The spaces that there are, the first one for choosing and the others for confirming."""
    return sorted(path.stem for path in SPACES.glob("*.yaml"))


def load_table(name: str) -> Table:
    study = load_study(SPACES / f"{name}.yaml")
    header, *lines = map(json.loads, _path(name).read_text(encoding="utf-8").splitlines())
    rows = {}
    for line in lines:
        evaluations = tuple(TabulatedEvaluation(*fields) for fields in line["evaluations"])
        row = Row(line["params"], line["outcome"], line["score"], line["seconds"], evaluations)
        rows[tuple(row.params.values())] = row
    return Table(study, header, rows)


def _path(name: str) -> Path:
    return SPACES / f"{name}.jsonl"


def tabulate(name: str) -> None:
    """Run every configuration of the table `name`, one after the other, and write its file at the end."""
    study = load_study(SPACES / f"{name}.yaml")
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
    _path(name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


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
        "command": f"python tests/benchmarks/search_speed.py tabulate {name}",
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
