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
from typing import Any

from hpo.config.search_space import grid
from hpo.config.study_config import StudyConfig, load_study

SPACES = Path(__file__).with_name("spaces")
_ORDER_SEED = 0
_DECIDES = (
    *("objective", "data", "model", "training"),
    *("amp", "compat", "evaluation", "checkpoint", "search_space"),
)
"""Keys of a study file on which a row depends."""

Key = tuple[Any, ...]
"""Values of the searched settings, in the order of the search space."""


@dataclass(frozen=True)
class TabulatedEvaluation:
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
    reason: str
    score: float | None
    """Of the best evaluation, as a trial's value is; None unless the outcome is `complete`."""
    seconds: float
    """CPU time of the whole trial."""
    wall_seconds: float
    """Of the whole trial. What follows is wall time too, as the trial measured it."""
    setup_seconds: float | None
    """Until the first training step; None where there was none."""
    train_seconds: float
    evaluation_seconds: float
    evaluations: tuple[TabulatedEvaluation, ...]

    def to_json(self) -> dict[str, Any]:
        """A line of the file; an evaluation is a list of its fields."""
        evaluations = [list(vars(evaluation).values()) for evaluation in self.evaluations]
        return {**vars(self), "evaluations": evaluations}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Row:
        evaluations = tuple(TabulatedEvaluation(*fields) for fields in line["evaluations"])
        return cls(**{**line, "evaluations": evaluations})


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
    random.Random(_ORDER_SEED).shuffle(every)
    return every


def table_names() -> list[str]:
    """The spaces that there are, the first one for choosing and the others for confirming."""
    return sorted(path.stem for path in SPACES.glob("*.yaml"))


def load_space(name: str) -> StudyConfig:
    """The study whose search space is that of the table `name`."""
    return load_study(SPACES / f"{name}.yaml")


def load_table(name: str) -> Table:
    """The table `name`. Raises ValueError where it is not whole."""
    study = load_space(name)
    path = _path(name)
    header, *lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    rows = {tuple(line["params"].values()): Row.from_json(line) for line in lines}
    expected = {tuple(params.values()) for params in configurations(study)}
    if missing := len(expected - rows.keys()):
        command = f"python tests/benchmarks/search_speed.py tabulate {name}"
        raise ValueError(f"{path}: {missing} configurations are missing. Go on with `{command}`.")
    return Table(study, header, rows)


def _path(name: str) -> Path:
    return SPACES / f"{name}.jsonl"


def tabulate(name: str) -> None:
    """Run what is missing of the table `name`, a configuration after the other, and append it to its file.

    Raises ValueError where the file was begun with other versions, on another machine or for another study:
    its seconds and scores would not compare.
    """
    import torch

    from hpo.device import probe_device
    from hpo.trial.executor import Executor

    study = load_space(name)
    device = probe_device(study.device)
    header = _header(study, name, device.describe(), torch.get_num_threads())
    done = _begin(_path(name), header)
    missing = [params for params in configurations(study) if tuple(params.values()) not in done]
    if not missing:
        print(f"{name}: all {len(done)} configurations are there")
        return
    with tempfile.TemporaryDirectory() as runs:
        executor = Executor(study, device, Path(runs), _Cache())
        run_one(executor, missing[0], Path(runs))  # imports, tokens and first allocations are no trial's
        with _path(name).open("a", encoding="utf-8") as file:
            for number, params in enumerate(missing, start=len(done) + 1):
                row = run_one(executor, params, Path(runs))
                if row.outcome == "failed":
                    raise RuntimeError(f"{params} failed: {row.reason}")
                file.write(json.dumps(row.to_json()) + "\n")
                file.flush()
                print(f"{number} {row.outcome} {row.score} {row.seconds} s {dict(params)}", flush=True)


def run_one(executor: Any, params: Mapping[str, Any], runs: Path) -> Row:
    """Train one configuration to its end, as a worker would, with the clock running.

    The cost is CPU time, which others on the machine do not change; with one thread it is the wall time of a
    machine that does nothing else.
    """
    folder = runs / "trial"
    evaluations: list[TabulatedEvaluation] = []
    wall_started, started = time.perf_counter(), time.process_time()

    def on_evaluation(scored: Any) -> None:
        evaluation = scored.evaluation
        evaluations.append(
            TabulatedEvaluation(
                evaluation.index,
                evaluation.step,
                round(time.process_time() - started, 3),
                round(scored.values[0], 6),
            )
        )

    result = executor.run(params, folder, "tabulated", on_evaluation)
    seconds, wall_seconds = time.process_time() - started, time.perf_counter() - wall_started
    shutil.rmtree(folder, ignore_errors=True)
    setup_seconds = result.telemetry.get("setup_seconds")
    return Row(
        dict(params),
        result.outcome,
        result.reason,
        None if result.values is None else round(result.values[0], 6),
        round(seconds, 3),
        round(wall_seconds, 3),
        None if setup_seconds is None else round(setup_seconds, 3),
        round(result.telemetry.get("train_seconds", 0.0), 3),
        round(result.telemetry.get("evaluation_seconds", 0.0), 3),
        tuple(evaluations),
    )


class _Cache:
    """Compatibility is measured once for all trials, as with the database of a study."""

    def __init__(self) -> None:
        self._results: dict[str, Mapping[str, Any]] = {}

    def get_compat(self, key: str) -> Mapping[str, Any] | None:
        return self._results.get(key)

    def put_compat(self, key: str, result: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._results.setdefault(key, result)


def _header(study: StudyConfig, name: str, machine: str, num_threads: int) -> dict[str, Any]:
    import numpy
    import torch
    import transformers

    import hpo

    return {
        "command": f"python tests/benchmarks/search_speed.py tabulate {name}",
        "begun": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "machine": machine,
        "num_threads": num_threads,
        "num_usable_cores": len(os.sched_getaffinity(0)),
        "note": "Seconds of a precision marked emulated in `support` are those of emulation: compare its "
        "scores only.",
        "support": _support(study),
        "evaluation": ["index", "step", "seconds", "score"],
        "versions": {
            "hpo": hpo.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": numpy.__version__,
        },
        "study": {key: study.definition()[key] for key in _DECIDES},
    }


def _support(study: StudyConfig) -> dict[str, str]:
    from hpo.device import probe_device
    from hpo.precision.table import support

    device = probe_device(study.device)
    searched = study.search_space.get("fp_precision")
    precisions = searched.grid() if searched else [study.training.fp_precision]
    return {precision: support(precision, device).level for precision in precisions}


def _begin(path: Path, header: Mapping[str, Any]) -> set[Key]:
    """Write the header where there is no table yet; return the configurations that are in it.

    A line that was cut off when the process was killed is removed.
    """
    if not path.exists():
        path.write_text(json.dumps(header) + "\n", encoding="utf-8")
        return set()
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    before, *lines = (json.loads(line) for line in whole.splitlines())
    for key in header:
        if key != "begun" and before[key] != json.loads(json.dumps(header[key])):
            raise ValueError(f"{path} was begun with {key} {before[key]}, but here it is {header[key]}.")
    return {tuple(line["params"].values()) for line in lines}
