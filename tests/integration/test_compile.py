"""Compiled trials: the compiler's seconds are charged apart, and its kernels are kept for the next trial."""

from __future__ import annotations

import gc
import os
import re
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.tiny import ENCODER, tiny_executor

from hpo.device import DeviceInfo
from hpo.errors import RunError
from hpo.models.encoder import encoder_layers
from hpo.models.multitask import MultitaskModel
from hpo.training.budget import TrainState
from hpo.training.clock import CompileClock
from hpo.trial.executor import Executor
from hpo.trial.trial_parts import TrialParts
from hpo.trial.trial_run import TrialRun

TOO_STRICT = {"degraded_gradient_cosine": 1.0, "incompatible_gradient_cosine": 1.0}
COMPILED = {"max_steps": 2, "batch_size": 4, "max_length": 16, "dropout": 0.0, "compile": "default"}


@pytest.fixture(autouse=True)
def _forget_what_is_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_kernels_are_kept_under_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user has a place for them already."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    tiny_executor(tmp_path)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "runs/cache/inductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "own"))
    tiny_executor(tmp_path)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "own")


def compile_layers_alone(model: MultitaskModel, *_: Any, backend: str = "eager") -> None:
    """In place of `apply_compile`: traces as ever, without making kernels."""
    for layer in encoder_layers(model.encoder):
        layer.compile(backend=backend, dynamic=False)


class KeepsMemory:
    """A backend that keeps every graph until the compiler is reset, as CUDA graphs keep their memory."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def __call__(self, graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        self.graphs.append(graph)
        return graph.forward

    def reset(self) -> None:
        self.graphs.clear()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("end", ["complete", "failed", "incompatible", "raised"])
def test_no_compiled_code_outlives_the_check_or_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    backend = KeepsMemory()
    models: list[weakref.ref[MultitaskModel]] = []
    num_compiled: list[int] = []
    released: list[tuple[int, int]] = []

    def apply_compile(model: MultitaskModel, *_: Any) -> None:
        compile_layers_alone(model, backend=backend)
        models.append(weakref.ref(model))

    def prepare(parts: TrialParts) -> torch.optim.Optimizer:
        num_compiled.append(len(backend.graphs))
        return optimizer_of(parts)

    def step(run: TrialRun) -> bool:
        num_compiled.append(len(backend.graphs))
        if end == "failed":
            raise ValueError("the step failed")
        if end == "raised":
            raise RunError("the disk is full")
        return after_step(run)

    def release(_: DeviceInfo) -> None:
        gc.collect()
        released.append((len(backend.graphs), sum(model() is not None for model in models)))

    optimizer_of, after_step = TrialParts.prepare, TrialRun._on_step
    monkeypatch.setattr(TrialParts, "prepare", prepare)
    monkeypatch.setattr(TrialRun, "_on_step", step)
    monkeypatch.setattr("hpo.training.compilation.release_free_memory", release)
    compat = {"enabled": True} | (TOO_STRICT if end == "incompatible" else {})
    executor = executor_of(tmp_path, compat=compat, training=COMPILED | {"fp_precision": "bf16"})
    executor.loader.apply_compile = apply_compile
    if end == "raised":
        with pytest.raises(RunError, match="the disk is full"):
            executor.run({}, tmp_path / "trial", "trial")
    else:
        result = executor.run({}, tmp_path / "trial", "trial")
        assert result.outcome == end, result.traceback
        assert released[-1] == (0, 0), "the model was still held"
    assert backend.graphs == []
    assert models
    if end != "incompatible":
        assert (num_compiled[0], num_compiled[1] > 0) == (0, True), "the check left compiled code behind"


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
def test_a_shape_that_comes_up_later_is_charged_as_compilation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_a_compiled_trial_needs_no_more_memory_than_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step, too, the model sees the micro-batch alone, which is halved until it fits."""
    sizes: list[int] = []
    forward = MultitaskModel.forward

    def forward_of_two_rows(model: MultitaskModel, *inputs: torch.Tensor) -> Any:
        sizes.append(len(inputs[0]))
        if len(inputs[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(model, *inputs)

    monkeypatch.setattr(MultitaskModel, "forward", forward_of_two_rows)
    executor = executor_of(tmp_path, training=ONE_STEP | {"micro_batch_size": 4})
    result = executor.run({"learning_rate": 1e-3}, tmp_path / "trial", "trial")
    assert (result.outcome, result.reason) == ("complete", ""), result.traceback
    assert max(sizes) == 4, "never the whole batch"
    assert result.telemetry["precision"]["observed"]["compiled"]
    assert (result.telemetry["micro_batch_size"], result.telemetry["oom_halvings"]) == (2, 1)


@pytest.mark.filterwarnings("ignore")
def test_a_trial_of_nothing_but_compilation_has_no_throughput(tmp_path: Path) -> None:
    """It may be the settings of this trial alone, so the study goes on."""
    training = ONE_STEP | {"micro_batch_size": 3}
    executor = executor_of(tmp_path, objective={"metric": "train_tokens_per_second"}, training=training)
    result = executor.run({"learning_rate": 1e-3}, tmp_path / "trial", "trial")
    assert (result.outcome, result.values, result.traceback) == ("incompatible", None, None)
    message = (
        r"train_tokens_per_second has no value: .* \(1 in all\).* Raise `max_steps`, or use `compile: none`"
    )
    assert re.search(message, result.reason)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("base", ["int8", pytest.param("nf4", marks=pytest.mark.slow)])
def test_with_an_adapter_it_trains_as_uncompiled(tmp_path: Path, base: str) -> None:
    """Also where the frozen weights are decoded in each product, forward and backward."""
    results, weights = [], []
    for mode in ("none", "default"):
        folder = tmp_path / mode
        folder.mkdir()
        settings = {"adapter": "lora", "base_precision": base, "lora_learning_rate": 1.0, "compile": mode}
        settings |= {"optimizer": "sgd"}  # Adam's first steps have the sign of gradients that are nearly 0
        settings |= {"attention_dropout": 0.0, "head_dropout": 0.0}  # compiled, the masks are others
        training = {"max_steps": 2, "batch_size": 8, "max_length": 64, "dropout": 0.0, "fp_precision": "fp32"}
        executor = executor_of(folder, 48, 24, training={**training, **settings})
        executor.loader.apply_compile = partial(compile_layers_alone, backend="aot_eager")
        results.append(executor.run({}, folder / "trial", "trial"))
        assert results[-1].outcome == "complete", results[-1].traceback
        weights.append(load_file(next(folder.glob("trial/best-*/model.safetensors"))))
    assert [one.telemetry["precision"]["observed"]["compiled"] for one in results] == [False, True]
    assert all(one.telemetry["base_precision"]["agrees"] for one in results)
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.allclose(value, weights[1][name], atol=1e-5) for name, value in weights[0].items())
    assert max(float(value.abs().max()) for name, value in weights[0].items() if ".lora_B" in name) > 1e-3


@pytest.mark.filterwarnings("ignore")
def test_too_little_memory_to_observe_compiled_training_leaves_it_unverified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison holds the gradients of several passes beside each other."""

    def run_out(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("hpo.trial.trial_run.observe_compiled", run_out)
    executor = tiny_executor(tmp_path, training=COMPILED)
    executor.loader.apply_compile = compile_layers_alone
    result = executor.run({"fp_precision": "fp32"}, None, "")
    assert result.outcome == "complete", result.reason
    precision = result.telemetry["precision"]
    assert precision["agrees"] is None
    assert precision["reason"] == "compiled, too little memory is left to compare passes."
