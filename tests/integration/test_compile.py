"""Compiled trials: the compiler's seconds are charged apart, and its kernels are kept for the next trial."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CPU, ENCODER, tiny_executor, tiny_study

from hpo.errors import InputError
from hpo.models.encoder import encoder_layers
from hpo.models.multitask import MultitaskModel
from hpo.training.compilation import CompileClock
from hpo.training.loop import TrainState
from hpo.trial.executor import Executor


@pytest.fixture(autouse=True)
def _forget_what_is_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_kernels_are_kept_under_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    tiny_executor(tmp_path)
    compiled: Any = torch.compile(lambda x: (x * 2).sin())
    torch.testing.assert_close(compiled(torch.ones(64)), (torch.ones(64) * 2).sin())
    assert [path for path in (tmp_path / "runs" / "cache" / "inductor").rglob("*") if path.is_file()]


def compile_layers_alone(model: MultitaskModel, *_: Any) -> None:
    """In place of `apply_compile`: traces as ever, without making kernels."""
    for layer in encoder_layers(model.encoder):
        layer.compile(backend="eager", dynamic=False)


def executor_of(folder: Path, **changes: Any) -> Executor:
    return Executor(tiny_study(folder, **changes), CPU, folder / "runs", apply_compile=compile_layers_alone)


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
    executor = executor_of(
        tmp_path,
        model={"encoder": ENCODER | {"num_hidden_layers": 1}},
        # One batch of the epoch has 4 rows, and the evaluation 6.
        data={"source": "synthetic", "synthetic": {"num_train": 20, "num_validation": 6, "max_sentences": 4}},
        training={"epochs": 1, "batch_size": 8, "max_length": 64, "compile": "default"},
        compat={"enabled": False},
    )
    result = executor.run({"learning_rate": 1e-3}, tmp_path / "trial", "trial")
    assert result.outcome == "complete", result.traceback
    assert result.telemetry["precision"]["observed"]["compiled"]
    assert result.telemetry["num_steps"] == 3
    assert result.telemetry["compile_seconds"] > later.seconds > 3600, "before the first step and after it"


def throughput_executor(folder: Path, max_steps: int, **changes: Any) -> Executor:
    """All rows in one batch of one length; its micro-batches of 3, 3 and 2 are compiled in the first step."""
    return executor_of(
        folder,
        objective={"metric": "train_tokens_per_second"},
        model={"encoder": ENCODER | {"num_hidden_layers": 1}},
        data={"source": "synthetic", "synthetic": {"num_train": 8, "num_validation": 4}},
        training={
            "max_steps": max_steps,
            "batch_size": 8,
            "micro_batch_size": 3,
            "max_length": 16,
            "compile": "default",
        },
        evaluation={"per_trial": max_steps},
        compat={"enabled": False},
        **changes,
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("searched", [False, True])
def test_a_trial_of_nothing_but_compilation_has_no_throughput(tmp_path: Path, searched: bool) -> None:
    """Where it may be the settings of this trial alone, the study goes on."""
    scopes = {"compile_scope": {"type": "categorical", "choices": ["model", "layers"]}}
    space = scopes if searched else {"learning_rate": {"type": "float", "low": 1e-4, "high": 1e-3}}
    executor = throughput_executor(tmp_path, max_steps=1, search_space=space)
    message = (
        r"train_tokens_per_second has no value: .* \(1 in all\).* Raise `max_steps`, or use `compile: none`"
    )
    if searched:
        result = executor.run({"compile_scope": "layers"}, tmp_path / "trial", "trial")
        assert (result.outcome, result.values, result.traceback) == ("incompatible", None, None)
        assert re.search(message, result.reason)
    else:
        with pytest.raises(InputError, match=message):
            executor.run({"learning_rate": 1e-3}, tmp_path / "trial", "trial")


@pytest.mark.filterwarnings("ignore")
def test_throughput_may_come_after_the_first_evaluation(tmp_path: Path) -> None:
    values: list[float] = []
    result = throughput_executor(tmp_path, max_steps=2).run(
        {"learning_rate": 1e-3}, tmp_path / "trial", "trial", lambda scored: values.extend(scored.values)
    )
    assert result.outcome == "complete", result.traceback
    first, last = values
    assert math.isnan(first)
    assert result.values[0] == pytest.approx(last) != 0
