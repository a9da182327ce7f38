"""Every outcome of a trial, also of a compiled one, each reached by a real run of the executor."""

import gc
import itertools
import json
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.resumed_trials import check_resume_is_exact
from support.tiny import CPU, CPU_PRECISIONS, ENCODER, altered_executor, tiny_executor

from hpo.config.trial_config import build_trial_config
from hpo.data.batches import training_batches
from hpo.models.encoder import encoder_layers
from hpo.models.multitask import MultitaskModel
from hpo.outcome import Progress, TrialResult
from hpo.training import loop
from hpo.training.budget import TrainState
from hpo.training.checkpoint import CheckpointStore, best_checkpoint
from hpo.training.evaluate import Evaluation
from hpo.training.throughput import CompileClock
from hpo.trial import run as run_module
from hpo.trial.executor import Executor
from hpo.trial.telemetry import Callbacks

# Weights so large that the feed-forward layers pass fp16's largest number; LayerNorm hides it from fp32.
OVERFLOWING = {"encoder": ENCODER | {"initializer_range": 300.0}}


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return tiny_executor(tmp_path_factory.mktemp("tiny"))


def run(executor: Executor, tmp_path: Path, precision: str = "fp32", **params: Any) -> TrialResult:
    result = executor.run({"fp_precision": precision, **params}, tmp_path / "trial", "test")
    json.dumps(result.telemetry)
    assert result.values is None or result.outcome == "complete"
    return result


@pytest.mark.parametrize("name", CPU_PRECISIONS)
def test_complete(executor: Executor, tmp_path: Path, name: str) -> None:
    result = run(executor, tmp_path, name)
    assert (result.outcome, result.reason) == ("complete", "")
    assert 0 <= result.values[0] <= 1
    assert result.headline.keys() == {
        "fp_precision_effective",
        "train_examples_per_second",
        "train_tokens_per_second",
        "peak_memory_bytes",
    }
    telemetry = result.telemetry
    assert telemetry["precision"]["requested"] == telemetry["precision"]["effective"] == name
    assert telemetry["precision"]["agrees"]
    assert set(telemetry["metrics"]) == {task.name for task in executor.tasks}
    assert telemetry["num_steps"] == 4
    assert telemetry["num_examples"] == 32
    assert 0 < telemetry["evaluation_scoring_seconds"] < telemetry["evaluation_seconds"]
    assert (telemetry["scaler"]["scale_min"] is not None) == (name == "fp16")
    assert result.headline["peak_memory_bytes"] > 2**27


@pytest.mark.parametrize(
    ("name", "support", "amp", "outcome", "message"),
    [
        ("tf32", "unsupported", {}, "unsupported", "`tf32` needs CUDA"),
        ("bf16", "emulated", {}, "unsupported", "set amp.allow_emulated: true"),
        ("tf32", "unsupported", {"on_unsupported": "fail"}, "failed", "`tf32` needs CUDA"),
    ],
)
def test_unsupported(
    tmp_path: Path, name: str, support: str, amp: dict[str, Any], outcome: str, message: str
) -> None:
    result = run(tiny_executor(tmp_path, amp=amp), tmp_path, name)
    assert result.outcome == outcome
    assert message in result.reason
    assert result.telemetry["precision"] == {"requested": name, "effective": None, "support": support}
    assert "metrics" not in result.telemetry
    assert not (tmp_path / "trial").exists()


def test_fallback_is_recorded(tmp_path: Path) -> None:
    executor = tiny_executor(tmp_path, amp={"on_unsupported": "fallback"})
    result = run(executor, tmp_path, "tf32")
    assert result.outcome == "complete"
    assert result.headline["fp_precision_effective"] == "fp32"
    record = result.telemetry["precision"]
    assert (record["requested"], record["effective"]) == ("tf32", "fp32")
    assert "Ran fp32 instead" in record["reason"]


def test_incompatible(tmp_path: Path) -> None:
    executor = tiny_executor(tmp_path, model=OVERFLOWING)
    result = run(executor, tmp_path, "fp16")
    assert result.outcome == "incompatible"
    assert "not finite under fp16; the first module that made them so is encoder" in result.reason
    assert result.telemetry["compatibility"]["verdict"] == "incompatible"
    assert run(executor, tmp_path).outcome == "complete"


@pytest.mark.parametrize("check_every", [1, 20])
def test_checkpoint_keeps_the_count_of_nonfinite_steps(
    executor: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check_every: int
) -> None:
    """A CPU checks every step, a GPU every 20th; a checkpoint must not lose the count."""
    norms = itertools.chain([1.0], itertools.repeat(math.inf, 3), itertools.repeat(1.0))
    monkeypatch.setitem(loop.CHECK_EVERY, "cpu", check_every)
    monkeypatch.setattr(loop, "gradient_norm", lambda *_: torch.tensor(next(norms)))
    steps: list[Progress] = []
    callbacks = Callbacks(should_stop=lambda: len({one.step for one in steps}) > 6, on_progress=steps.append)
    params = {"fp_precision": "fp32", "max_steps": 20}
    result = executor.run(params, tmp_path / "trial", "test", callbacks)
    assert (result.outcome, result.reason) == (
        "nonfinite",
        "the gradients were not finite in 3 steps in a row.",
    )


def out_of_memory_unless(fits: Callable[[MultitaskModel, int], bool]) -> Callable[[MultitaskModel], object]:
    """Let a model run with gradients only where `fits` says so of it and the number of texts."""

    def limit(model: MultitaskModel, inputs: tuple[torch.Tensor, ...]) -> None:
        if torch.is_grad_enabled() and not fits(model, len(inputs[0])):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    return lambda model: model.register_forward_pre_hook(limit)


def test_halved_micro_batch_trains_alike(executor: Executor, tmp_path: Path) -> None:
    curves: dict[str, list[Any]] = {"small": [], "halved": []}

    def record(name: str) -> Callable[[Evaluation], None]:
        return lambda scored: curves[name].append((scored.train_loss, scored.values))

    params = {"fp_precision": "fp32", "dropout": 0.1}
    executor.run(params | {"micro_batch_size": 2}, tmp_path / "small", "s", Callbacks(record("small")))
    limited = altered_executor(tmp_path, out_of_memory_unless(lambda _, num_texts: num_texts <= 2))
    result = limited.run(params, tmp_path / "halved", "h", Callbacks(record("halved")))
    assert result.outcome == "complete"
    assert (result.telemetry["micro_batch_size"], result.telemetry["oom_halvings"]) == (2, 2)
    assert curves["halved"] == curves["small"] != []


def test_oom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in training, where the check let it pass; and by the check."""
    device = replace(CPU, total_memory_bytes=2**34)
    trains = Mock(side_effect=run_module.train)
    monkeypatch.setattr(run_module, "train", trains)
    limited = altered_executor(tmp_path, out_of_memory_unless(lambda *_: not trains.called), device)
    result = run(limited, tmp_path)
    assert result.outcome == "oom"
    config = build_trial_config(limited.study, {}, "fp32", limited.amp)
    lengths_W = limited.loader.tokens("train", config).lengths_W
    first = training_batches(lengths_W, config.batch_size, config.seed, epoch=0)[0]
    longest = lengths_W[first].max()
    assert result.reason == f"one example of {longest} tokens does not fit into memory."
    assert result.telemetry["oom_halvings"] == 3
    assert result.telemetry["device"]["memory_limit_bytes"] == 2**34
    limited = altered_executor(tmp_path, out_of_memory_unless(lambda *_: False))
    result = run(limited, tmp_path, "bf16")
    assert (result.outcome, result.reason) == ("oom", "one example of 64 tokens does not fit into memory.")
    assert "compatibility" not in result.telemetry


def test_precision_is_not_blamed_without_fp32(tmp_path: Path) -> None:
    """Whether fp32 would be finite is not known."""

    def alter(model: MultitaskModel) -> None:
        out_of_memory_unless(lambda model, _: next(model.parameters()).dtype == torch.bfloat16)(model)
        model.register_forward_hook(
            lambda _model, _inputs, logits: {name: value * torch.nan for name, value in logits.items()}
        )

    result = run(altered_executor(tmp_path, alter), tmp_path, "bf16-true")
    assert result.outcome == "invalid"
    assert "logits not finite under bf16-true" in result.reason
    assert (
        "fp32 does not fit into memory here, so it is not known whether bf16-true is at fault"
        in result.reason
    )


def test_failed_trial_keeps_its_traceback_and_frees_its_model(tmp_path: Path) -> None:
    models = []

    def broken(model: MultitaskModel, _: Any) -> Any:
        model.__dict__["itself"] = model  # a cycle
        models.append(weakref.ref(model))
        raise ValueError("a bug")

    executor = altered_executor(
        tmp_path, lambda model: model.register_forward_pre_hook(broken), compat={"enabled": False}
    )
    num_frozen = gc.get_freeze_count()
    results = [run(executor, tmp_path) for _ in range(2)]
    assert {(result.outcome, result.reason) for result in results} == {("failed", "ValueError: a bug")}
    assert "in broken" in results[0].traceback
    assert models[0]() is None
    assert gc.get_freeze_count() > num_frozen, "what the first trial imported is not looked through again"


@pytest.mark.parametrize(
    ("name", "micro_batch_size", "stop_at", "num_steps"),
    [
        ("fp32", 8, 7, 7),  # in the second epoch
        ("fp16", 3, 20, 6),  # in its first step, between micro-batches
        ("bf16-true", 3, 20, 6),
    ],
)
def test_preempted_trial_resumes_exactly(
    executor: Executor, tmp_path: Path, name: str, micro_batch_size: int, stop_at: int, num_steps: int
) -> None:
    """The gradients of an unfinished step are dropped."""
    params = {"fp_precision": name, "dropout": 0.1, "max_steps": 10, "micro_batch_size": micro_batch_size}
    resumed = check_resume_is_exact(executor, tmp_path, stop_at, **params)
    assert resumed.telemetry["resumed_from_step"] == num_steps
    assert resumed.telemetry["num_steps"] == 10


def test_best_weights_may_be_newer_than_the_checkpoint(executor: Executor, tmp_path: Path) -> None:
    """A trial killed at its end repeats its last part, perhaps with a worse result."""
    run(executor, tmp_path)
    best = best_checkpoint(tmp_path / "trial")
    with CheckpointStore(tmp_path / "trial", best.resume_key) as store:
        best.state["best"]["values"] = [2.0]
        step = best.state["best"]["step"]
        store.save(step, best.weights, best=best.state)
    again = run(executor, tmp_path)
    assert again.values == (2.0,)
    kept = best_checkpoint(tmp_path / "trial")
    assert kept.state["best"]["values"] == [2.0]
    assert executor.run({}, tmp_path / "trial", "another trial").values[0] <= 1


COMPILED = {"max_steps": 2, "batch_size": 4, "max_length": 16, "dropout": 0.0, "compile": "default"}


@pytest.fixture(autouse=True)
def _forget_what_is_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_layers_alone(model: MultitaskModel, *_: Any) -> None:
    """In place of `apply_compile`: traces as ever, without making kernels."""
    for layer in encoder_layers(model.encoder):
        layer.compile(backend="eager", dynamic=False)


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
    sizes = {"num_train": 20, "num_validation": 6, "max_sentences": 4}
    data = {"source": "synthetic", "synthetic": sizes}
    executor = tiny_executor(tmp_path, data=data, compat={"enabled": False}, training=training)
    executor.loader.apply_compile = compile_layers_alone
    result = executor.run({"learning_rate": 1e-3}, tmp_path / "trial", "trial")
    assert result.outcome == "complete", result.traceback
    precision = result.telemetry["precision"]
    assert (precision["agrees"], precision["observed"]["compiled"]) == (True, True), precision["reason"]
    assert precision["observed"]["linear_products"].keys() == {"bfloat16"}
    assert result.telemetry["num_steps"] == 3
    assert result.telemetry["compile_seconds"] > later.seconds > 3600, "before the first step and after it"


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
