"""Our contenders, and what is measured of ours alone: shares of a rate, seconds of a whole study."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from contextlib import chdir
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml
from workload import Workload, study_content

from hpo.config.study_config import load_study
from hpo.config.trial_config import build_trial_config
from hpo.device import probe_device
from hpo.trial.executor import Executor

STORAGE = "sqlite:///hpo.db"
NUM_TRIALS, NUM_ROWS = 50, 64
"""Of the study whose trials are looked at outside of training: many short ones."""


def run_hpo(folder: Path, workload: Workload, precision: str) -> dict[str, Any]:
    """The trial executor, as a study runs it."""
    with tempfile.TemporaryDirectory() as work:
        path = Path(work, "study.yaml")
        path.write_text(yaml.safe_dump(study_content(workload, folder, precision)))
        executor = Executor(load_study(str(path)), probe_device("cpu"), Path(work, "runs"))
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
    from hpo.trial.telemetry import training_flops

    config = build_trial_config(executor.study, {}, "fp32", executor.amp)
    model = executor.loader.build_model(config)
    examples, tokens = throughput["train_examples_per_second"], throughput["train_tokens_per_second"]
    sizes = model.encoder.config
    tokens_per_batch = round(workload.batch_size * tokens / examples)
    possible = product_rate(sizes.hidden_size, sizes.intermediate_size, tokens_per_batch)
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


def run_hpo_study(folder: Path, workload: Workload, precision: str) -> dict[str, Any]:
    """`hpo run` on a grid of learning rates, few rows each, from an empty folder: the mean seconds of a trial
    outside training and evaluation, from the second on.

    From the end of one trial to the end of the next: asking and telling, set-up, checkpoints, cleaning up.
    """
    from typer.testing import CliRunner

    from hpo.cli.commands import app
    from hpo.study.reading.reader import read_study
    from hpo.study.store.storage import open_storage

    content = study_content(workload, folder, precision)
    del content["training"]["learning_rate"]
    rates = [1e-5 * n for n in range(1, NUM_TRIALS + 1)]
    content["search_space"] = {"learning_rate": {"type": "categorical", "choices": rates}}
    content |= {"n_trials": NUM_TRIALS, "compat": {"enabled": True}}
    content["data"]["limits"] = {"train": NUM_ROWS, "validation": NUM_ROWS}
    with tempfile.TemporaryDirectory() as work, chdir(work):
        Path("study.yaml").write_text(yaml.safe_dump(content))
        result = CliRunner().invoke(app, ["run", "study.yaml", "--storage", STORAGE, "--json"])
        outcomes = json.loads(result.stdout)["outcomes"]
        if outcomes != {"complete": NUM_TRIALS}:
            raise RuntimeError(f"the study ended as {outcomes}")
        with open_storage(STORAGE, create=False) as storage:
            trials = read_study(storage, workload.name).trials
    outside = [
        (trial.ended - before.ended).total_seconds()
        - trial.telemetry["train_seconds"]
        - trial.telemetry["evaluation_seconds"]
        for before, trial in pairwise(trials)
    ]
    return {"outside": sum(outside) / len(outside)}


CONTENDERS = {"hpo": run_hpo, "hpo-study": run_hpo_study}
