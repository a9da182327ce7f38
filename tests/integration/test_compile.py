"""Compiled trials: seconds of the compiler, memory and precision."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import ENCODER, tiny_executor

from hpo.models.encoder import encoder_layers
from hpo.models.multitask import MultitaskModel
from hpo.training.budget import TrainState
from hpo.training.throughput import CompileClock
from hpo.trial.executor import Executor

COMPILED = {"max_steps": 2, "batch_size": 4, "max_length": 16, "dropout": 0.0, "compile": "default"}


@pytest.fixture(autouse=True)
def _forget_what_is_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_layers_alone(model: MultitaskModel, *_: Any, backend: str = "eager") -> None:
    """In place of `apply_compile`: traces as ever, without making kernels."""
    for layer in encoder_layers(model.encoder):
        layer.compile(backend=backend, dynamic=False)


def executor_of(folder: Path, num_train: int = 8, num_validation: int = 4, **changes: Any) -> Executor:
    model = {"encoder": ENCODER | {"num_hidden_layers": 1}}
    sizes = {"num_train": num_train, "num_validation": num_validation, "max_sentences": 4}
    defaults = {"model": model, "compat": {"enabled": False}}
    defaults["data"] = {"source": "synthetic", "synthetic": sizes}
    executor = tiny_executor(folder, **(defaults | changes))
    executor.loader.apply_compile = compile_layers_alone
    return executor


ONE_STEP = {"max_steps": 1, "batch_size": 8, "max_length": 16, "compile": "default"}


@pytest.mark.filterwarnings("ignore")
def test_late_shape_counts_as_compilation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later, start = CompileClock(), CompileClock.start

    def start_with_an_hour(clock: CompileClock) -> None:
        clock.seconds = 3600.0
        start(clock)

    def after_a_step(state: TrainState, *counts: Any) -> None:
        if not state.step:
            later.start()
        count_step(state, *counts)

    count_step = TrainState.count_step
    monkeypatch.setattr(TrainState, "count_step", after_a_step)
    monkeypatch.setattr(CompileClock, "start", start_with_an_hour)
    training = {"epochs": 1, "batch_size": 8, "max_length": 64, "compile": "default", "fp_precision": "bf16"}
    # One batch of the epoch has 4 rows, and the evaluation 6.
    executor = executor_of(tmp_path, 20, 6, training=training)
    result = executor.run({"learning_rate": 1e-3}, tmp_path / "trial", "trial")
    assert result.outcome == "complete", result.traceback
    precision = result.telemetry["precision"]
    assert (precision["agrees"], precision["observed"]["compiled"]) == (True, True), precision["reason"]
    assert precision["observed"]["linear_products"].keys() == {"bfloat16"}
    assert result.telemetry["num_steps"] == 3
    assert result.telemetry["compile_seconds"] > later.seconds > 3600, "before the first step and after it"


@pytest.mark.filterwarnings("ignore")
def test_trial_of_compiled_steps_has_no_throughput(tmp_path: Path) -> None:
    """It may be the settings of this trial alone, so the study goes on."""
    training = ONE_STEP | {"micro_batch_size": 3}
    executor = executor_of(tmp_path, objective={"metric": "train_tokens_per_second"}, training=training)
    result = executor.run({"learning_rate": 1e-3}, tmp_path / "trial", "trial")
    assert (result.outcome, result.values, result.traceback) == ("incompatible", None, None)
    message = r"train_tokens_per_second has no value: the training was too short"
    assert re.search(message, result.reason)


@pytest.mark.filterwarnings("ignore")
def test_unobserved_compiled_trial_is_unverified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison holds the gradients of several passes beside each other."""

    def run_out(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("hpo.trial.run.observe_compiled", run_out)
    executor = tiny_executor(tmp_path, training=COMPILED)
    executor.loader.apply_compile = compile_layers_alone
    result = executor.run({"fp_precision": "fp32"}, None, "")
    assert result.outcome == "complete", result.reason
    precision = result.telemetry["precision"]
    assert precision["agrees"] is None
    assert precision["reason"] == "compiled, too little memory is left to compare passes."
