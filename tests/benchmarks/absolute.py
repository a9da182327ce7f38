"""What is measured of ours alone, without a peer: shares, seconds and memory of whole runs.

Each function takes a study as `workload.study_content` makes it and returns numbers for `contenders.py`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml

STORAGE = "sqlite:///hpo.db"


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


def seconds_outside(trials: list[Any]) -> float:
    """Mean seconds of a trial outside training and evaluation, from the second on.

    From the end of one trial to the end of the next: asking and telling, set-up, checkpoints, cleaning up.
    """
    outside = [
        _seconds(before.ended, trial.ended)
        - trial.telemetry["train_seconds"]
        - trial.telemetry["evaluation_seconds"]
        for before, trial in pairwise(trials)
    ]
    return sum(outside) / len(outside)


def seconds_to_first_step(content: Mapping[str, Any]) -> float:
    """Seconds from the start of an `hpo run` process to its first training step, with everything cached."""
    _write(content)
    command = [sys.executable, "-m", "hpo", "run", "study.yaml", "--storage", STORAGE, "--n-trials"]
    subprocess.run([*command, "1"], check=True, capture_output=True)
    started = time.time()
    subprocess.run([*command, "2"], check=True, capture_output=True)
    trial = read_trials(content["name"])[1]
    return trial.started.timestamp() - started + float(trial.telemetry["setup_seconds"])


def many_trials(content: Mapping[str, Any], num_trials: int, settled_after: int = 5) -> dict[str, float]:
    """`num_trials` in one worker: its resident memory after the last over that after the fifth, less 1,
    and `seconds_outside`."""
    from hpo.config.study_config import load_study
    from hpo.study import run

    _write({**content, "n_trials": num_trials})
    resident: list[int] = []
    keep_best_checkpoints = run.keep_best_checkpoints

    def after_trial(*args: Any) -> None:
        keep_best_checkpoints(*args)
        resident.append(_resident_bytes())

    with (
        mock.patch.object(run, "keep_best_checkpoints", after_trial),
        run.open_study(load_study("study.yaml"), STORAGE, Path("runs")) as opened,
    ):
        run.run_study(opened)
    del resident[num_trials:]  # it is called once more at the end of the study
    assert {trial.outcome for trial in read_trials(content["name"])} == {"complete"}
    assert len(resident) == num_trials
    return {
        "growth": resident[-1] / resident[settled_after - 1] - 1,
        "resident_gib": resident[-1] / 2**30,
        "outside": seconds_outside(read_trials(content["name"])),
    }


def read_trials(name: str) -> list[Any]:
    """The finished trials of the study in this folder's database."""
    from hpo.study.storage import open_storage

    with open_storage(STORAGE, create=False) as storage:
        return list(storage.read_study(name).trials)


def _write(content: Mapping[str, Any]) -> None:
    Path("study.yaml").write_text(yaml.safe_dump(dict(content)))


def _seconds(begin: datetime, end: datetime) -> float:
    return (end - begin).total_seconds()


def _resident_bytes() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS:"))
