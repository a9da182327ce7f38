"""Our contenders, and what is measured of ours alone: shares, seconds and memory of whole runs."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from executors import config_of, executor_of
from workload import STUDY_LEARNING_RATES, Workload, study_content

from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import TrialRecord

STORAGE = "sqlite:///hpo.db"
NUM_MEMORY_TRIALS = 50


def run_hpo(folder: Path, workload: Workload, precision: str) -> dict[str, Any]:
    """The trial executor, as a study runs it."""
    with tempfile.TemporaryDirectory() as work:
        executor = executor_of(folder, workload, precision, work=Path(work))
        result = executor.run({}, Path(work) / "trial", "bench")
        if result.outcome != "complete":
            raise RuntimeError(f"{result.outcome}: {result.reason}\n{result.traceback}")
        throughput = result.telemetry["throughput"]
        measured = {
            "train": throughput["train_examples_per_second"],
            "evaluate": throughput["evaluation_examples_per_second"],
            "padding": throughput["padding_share"],
        }
        if precision == "fp32":
            measured["product_share"] = _product_share(executor, workload, throughput)
    return measured


def _product_share(executor: Any, workload: Workload, throughput: Mapping[str, float]) -> float:
    """FLOP/s of training over those of the bare matrix products, measured now."""
    from hpo.training.throughput import training_flops

    model = executor.loader.build_model(config_of(executor, seed=42))
    examples, tokens = throughput["train_examples_per_second"], throughput["train_tokens_per_second"]
    config = model.encoder.config
    tokens_per_batch = round(workload.batch_size * tokens / examples)
    possible = product_rate(config.hidden_size, config.intermediate_size, tokens_per_batch)
    flops = training_flops(model, round(1000 * tokens), round(1000 * examples)) / 1000
    return flops / possible


def product_rate(hidden_size: int, intermediate_size: int, num_tokens: int, seconds: float = 3.0) -> float:
    """FLOP/s of the fp32 matrix products of a transformer layer's training step, without anything else.

    Forward, and backward to inputs and weights, of the four attention projections and the two feed-forward
    layers over `num_tokens` rows, in turn until `seconds` are over.
    """
    shapes = [(hidden_size, hidden_size)] * 4
    shapes += [(hidden_size, intermediate_size), (intermediate_size, hidden_size)]
    operands = [
        (torch.randn(num_tokens, inputs), torch.randn(outputs, inputs), torch.randn(num_tokens, outputs))
        for inputs, outputs in shapes
    ]

    def layer() -> None:
        for input_TI, weight_OI, gradient_TO in operands:
            input_TI @ weight_OI.T
            gradient_TO @ weight_OI
            gradient_TO.T @ input_TI

    layer()
    num_layers = 0
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        layer()
        num_layers += 1
    elapsed = time.perf_counter() - started
    flops = sum(3 * 2 * num_tokens * inputs * outputs for inputs, outputs in shapes)
    return num_layers * flops / elapsed


@contextmanager
def _study_folder(
    folder: Path,
    workload: Workload,
    precision: str,
    learning_rates: Sequence[float],
    num_rows: int | None = None,
) -> Iterator[None]:
    """Work in a new folder with study.yaml: a grid of learning rates, with the compatibility check."""
    content = study_content(workload, folder, precision)
    del content["training"]["learning_rate"]
    content["search_space"] = {"learning_rate": {"type": "categorical", "choices": list(learning_rates)}}
    content["n_trials"] = len(learning_rates)
    content["compat"] = {"enabled": True}
    if num_rows:
        content["data"]["limits"] = {"train": num_rows, "validation": num_rows}
    with tempfile.TemporaryDirectory() as work, chdir(work):
        Path("study.yaml").write_text(yaml.safe_dump(content))
        yield


def run_hpo_study(folder: Path, workload: Workload, precision: str) -> dict[str, Any]:
    """`hpo run` on a grid of learning rates, from an empty folder."""
    from typer.testing import CliRunner

    from hpo.cli.commands import app

    with _study_folder(folder, workload, precision, STUDY_LEARNING_RATES):
        result = CliRunner().invoke(app, ["run", "study.yaml", "--storage", STORAGE, "--json"])
        status = json.loads(result.stdout)
        if status["outcomes"] != {"complete": len(STUDY_LEARNING_RATES)}:
            raise RuntimeError(f"the study ended as {status['outcomes']}")
        return {"outside": _seconds_outside(_read_trials(workload.name))}


def run_hpo_memory(folder: Path, workload: Workload, precision: str) -> dict[str, Any]:
    """50 trials of a few steps in one worker: its resident memory after the last over that after the fifth,
    less 1, and the seconds of a trial outside training and evaluation."""
    from hpo.config.study_config import load_study
    from hpo.study.running import run

    resident: list[int] = []
    keep_best_checkpoints = run.keep_best_checkpoints

    def after_trial(*args: Any) -> None:
        keep_best_checkpoints(*args)
        resident.append(_resident_bytes())

    learning_rates = [1e-5 * n for n in range(1, NUM_MEMORY_TRIALS + 1)]
    options = run.OpenOptions(is_file=True)
    with _study_folder(folder, workload, precision, learning_rates, num_rows=64):
        with (
            mock.patch.object(run, "keep_best_checkpoints", after_trial),
            run.open_study(load_study("study.yaml"), STORAGE, Path("runs"), options) as opened,
        ):
            run.run_study(opened)
        trials = _read_trials(workload.name)
    del resident[NUM_MEMORY_TRIALS:]  # it is called once more at the end of the study
    assert {trial.outcome for trial in trials} == {"complete"}
    assert len(resident) == NUM_MEMORY_TRIALS
    return {
        "growth": resident[-1] / resident[4] - 1,
        "resident_gib": resident[-1] / 2**30,
        "outside": _seconds_outside(trials),
    }


def _seconds_outside(trials: Sequence[TrialRecord]) -> float:
    """Mean seconds of a trial outside training and evaluation, from the second on.

    From the end of one trial to the end of the next: asking and telling, set-up, checkpoints, cleaning up.
    """
    outside = [
        (trial.ended - before.ended).total_seconds()
        - trial.telemetry["train_seconds"]
        - trial.telemetry["evaluation_seconds"]
        for before, trial in pairwise(trials)
    ]
    return sum(outside) / len(outside)


def _read_trials(name: str) -> Sequence[TrialRecord]:
    """The trials of the study in this folder's database."""
    from hpo.study.store.storage import open_storage

    with open_storage(STORAGE, create=False) as storage:
        return read_study(storage, name).trials


def _resident_bytes() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS:"))


CONTENDERS = {
    "hpo": run_hpo,
    "hpo-study": run_hpo_study,
    "hpo-memory": run_hpo_memory,
}
