"""Our contenders, and what is measured of ours alone: shares of a rate, seconds of a whole study."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from workload import Workload, mark, seconds_between, study_content

from hpo.config.resolved_study import resolve_study
from hpo.config.study_config import load_study
from hpo.config.trial_config import build_trial_config
from hpo.device import probe_device
from hpo.outcome import TrialResult
from hpo.precision.amp import backend_flags
from hpo.precision.table import PRECISIONS, AmpConfig
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import TrialRecord
from hpo.study.store.storage import open_storage
from hpo.trial.compat import CompatibilityCache
from hpo.trial.executor import NO_CALLBACKS, Executor
from hpo.trial.telemetry import Callbacks, training_flops

STORAGE = "sqlite:///hpo.db"
NUM_TRIALS, NUM_ROWS = 50, 64
"""Of the study whose trials are looked at outside of training: many short ones."""


class MeasuredOnce(dict[str, Any]):
    """Keeps the measurements of the compatibility check, as the database of a study does."""

    def get_compat(self, key: str) -> Any:
        return self.get(key)

    def put_compat(self, key: str, result: Any) -> Any:
        return self.setdefault(key, result)


def build_executor(
    content: Mapping[str, Any], work: Path, cache: CompatibilityCache | None = None
) -> Executor:
    """The trial executor of a study, with its files in `work`."""
    path = work / "study.yaml"
    path.write_text(yaml.safe_dump(dict(content)))
    resolved = resolve_study(load_study(str(path)), probe_device(content["device"]))
    return Executor(resolved, work / "runs", cache)


def run_trial(
    executor: Executor, callbacks: Callbacks = NO_CALLBACKS, params: Mapping[str, Any] | None = None
) -> TrialResult:
    """One trial of the study, to its end. It writes checkpoints, which are then removed."""
    with tempfile.TemporaryDirectory(dir=executor.runs_dir.parent) as folder:
        result = executor.run(params or {}, Path(folder) / "trial", "bench", callbacks)
    if result.outcome != "complete":
        raise RuntimeError(f"{result.outcome}: {result.reason}\n{result.traceback}")
    return result


def rates(throughput: Mapping[str, float]) -> dict[str, float]:
    """A trial's throughput by the names of this benchmark."""
    return {
        "train": throughput["train_examples_per_second"],
        "evaluate": throughput["evaluation_examples_per_second"],
        "padding": throughput["padding_share"],
    }


def run_hpo(folder: Path, workload: Workload, precision: str) -> dict[str, Any]:
    """The trial executor, as a study runs it."""
    with tempfile.TemporaryDirectory() as work:
        executor = build_executor(study_content(workload, folder, precision), Path(work))
        throughput = run_trial(executor).telemetry["throughput"]
        measured = rates(throughput)
        if precision == "fp32":
            cost = training_cost(executor, throughput)
            possible = product_rate(cost, workload.batch_size, precision, workload.device)
            measured["product_share"] = measured["train"] * cost.flops / possible
    return measured


class TrainingCost(NamedTuple):
    """What one example costs in training, and the sizes of the model's matrix products."""

    flops: float
    tokens: float
    hidden_size: int
    intermediate_size: int


def training_cost(executor: Executor, throughput: Mapping[str, float]) -> TrainingCost:
    """The cost of an example of the length that `throughput` is of."""
    examples, tokens = throughput["train_examples_per_second"], throughput["train_tokens_per_second"]
    model = executor.loader.build_model(build_trial_config(executor.study, {}, "fp32", executor.amp))
    flops = training_flops(model, round(1000 * tokens), round(1000 * examples))
    sizes = model.encoder.config
    return TrainingCost(
        flops / (1000 * examples), tokens / examples, sizes.hidden_size, sizes.intermediate_size
    )


def product_rate(
    cost: TrainingCost, batch_size: int, precision: str, device: str, seconds: float = 3.0
) -> float:
    """FLOP/s of the matrix products of a transformer layer's training step, without anything else.

    Forward, and backward to inputs and weights, of the four attention projections and the two feed-forward
    layers over the tokens of a batch, in turn until `seconds` are over.
    """
    hidden, inner, num_tokens = cost.hidden_size, cost.intermediate_size, round(batch_size * cost.tokens)
    shapes = [(hidden, hidden)] * 4 + [(hidden, inner), (inner, hidden)]
    options: Any = {"dtype": getattr(torch, PRECISIONS[precision].linear_dtype), "device": device}
    operands = [
        (
            torch.randn(num_tokens, inputs, **options),
            torch.randn(outputs, inputs, **options),
            torch.randn(num_tokens, outputs, **options),
        )
        for inputs, outputs in shapes
    ]

    def layer() -> None:
        for input_TI, weight_OI, gradient_TO in operands:
            input_TI @ weight_OI.T
            gradient_TO @ weight_OI
            gradient_TO.T @ input_TI

    layers_at_once = 1 if device == "cpu" else 10  # a GPU is waited for after each
    num_layers, elapsed = 0, 0.0
    with backend_flags(PRECISIONS[precision], AmpConfig(tf32=False, cudnn_benchmark=False)):
        layer()
        started = mark(device)
        while elapsed < seconds:
            for _ in range(layers_at_once):
                layer()
            num_layers += layers_at_once
            elapsed = seconds_between(started, mark(device))
    flops = sum(3 * 2 * num_tokens * inputs * outputs for inputs, outputs in shapes)
    return num_layers * flops / elapsed


def grid_of_rates(content: dict[str, Any], num_trials: int, num_rows: int) -> dict[str, Any]:
    """The study, changed to a grid of learning rates with `num_rows` rows of each split in a trial."""
    training = {name: value for name, value in content["training"].items() if name != "learning_rate"}
    rates = [1e-5 * number for number in range(1, num_trials + 1)]
    return content | {
        "training": training,
        "data": content["data"] | {"limits": {"train": num_rows, "validation": num_rows}},
        "search_space": {"learning_rate": {"type": "categorical", "choices": rates}},
        "n_trials": num_trials,
        "compat": {},
    }


def run_grid(content: dict[str, Any], *options: str) -> list[TrialRecord]:
    """The trials of `hpo run` with these options, from an empty folder, in the order of their numbers."""
    with tempfile.TemporaryDirectory() as work:
        Path(work, "study.yaml").write_text(yaml.safe_dump(content))
        command = [sys.executable, "-m", "hpo", "run", "study.yaml", "--storage", STORAGE, "--json", *options]
        run = subprocess.run(command, cwd=work, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"hpo run ended with {run.returncode}:\n{run.stderr}")
        outcomes = json.loads(run.stdout)["outcomes"]
        if outcomes != {"complete": content["n_trials"]}:
            raise RuntimeError(f"the study ended as {outcomes}")
        with open_storage(STORAGE.replace("hpo.db", f"{work}/hpo.db"), create=False) as storage:
            return read_study(storage, content["name"]).trials


def run_hpo_study(folder: Path, workload: Workload, precision: str) -> dict[str, Any]:
    """`hpo run` on a grid of learning rates, few rows each: the mean seconds of a trial outside training and
    evaluation, from the second on.

    From the end of one trial to the end of the next: asking and telling, set-up, checkpoints, cleaning up.
    """
    trials = run_grid(grid_of_rates(study_content(workload, folder, precision), NUM_TRIALS, NUM_ROWS))
    outside = [
        (trial.ended - before.ended).total_seconds()
        - trial.telemetry["train_seconds"]
        - trial.telemetry["evaluation_seconds"]
        for before, trial in pairwise(trials)
    ]
    return {"outside": sum(outside) / len(outside)}


def trials_per_hour(content: dict[str, Any], num_workers: int, num_rows: int) -> float:
    """Rate of a study with so many workers on the device, after the first trial of each."""
    grid = grid_of_rates(content, 4 * num_workers, num_rows)
    trials = run_grid(grid, "--workers-per-device", str(num_workers))
    ended = sorted(trial.ended for trial in trials)
    seconds = (ended[-1] - ended[num_workers - 1]).total_seconds()
    return 3600 * (len(ended) - num_workers) / seconds


CONTENDERS = {"hpo": run_hpo, "hpo-study": run_hpo_study}
