"""Steps without a check do not wait for the device: on the meta device and on a real GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.device_reads import META_GPU, WaitsForDevice, no_waiting
from support.tiny import CPU, CPU_PRECISIONS, EMULATED, tiny_model, tiny_objective
from support.tiny_loop import accumulate, amp_of, config_of, loop_parts

from hpo.device import DeviceInfo, probe_device
from hpo.precision.amp import backend_flags, prepare_model
from hpo.precision.table import PRECISIONS
from hpo.training.budget import TrainState
from hpo.training.clock import TrainingClock
from hpo.training.loop import (
    CHECK_EVERY,
    Learner,
    TrainingHooks,
    apply_gradients,
    train,
)
from hpo.training.optim import build_optimizer, parameter_groups
from hpo.training.throughput import ThroughputMeter
from hpo.trial.executor import Executor
from hpo.trial.parts import training_args


class Enough(Exception):
    pass


def run_steps(
    executor: Executor, device: DeviceInfo, *, stop_after: int, watch_from: int = 0, **params: Any
) -> tuple[int, list[int]]:
    """Train on `device`. Return the number of steps, and the observed steps without a check."""
    config = config_of(executor, dropout=0.1, head_dropout=0.1, max_steps=10 * stop_after, **params)
    model, _, loss_fn, data = loop_parts(executor, config)
    model.to(device.torch_device)
    optimizer = build_optimizer(config.optimizer, parameter_groups(model, learning_rate=1e-4))
    state, meter = TrainState(), ThroughputMeter(CPU if device is META_GPU else device)
    watched: list[int] = []

    with ExitStack() as watching, backend_flags(PRECISIONS[config.fp_precision], EMULATED):

        def watch_next() -> bool:
            watching.close()
            if state.step == stop_after:
                raise Enough
            if state.step >= watch_from and (state.step + 1) % CHECK_EVERY[device.type]:
                watching.enter_context(no_waiting() if device is META_GPU else errors_on_sync())
                watched.append(state.step)
            return False

        args = replace(
            training_args(executor.study, config, data.train.num_windows),
            micro_batch_size=config.batch_size // 2,
        )
        clock, amp = TrainingClock(state, meter), amp_of(config.fp_precision, device)
        watch_next()
        with pytest.raises(Enough):
            list(train(Learner(model, loss_fn, amp), optimizer, data, args, clock, TrainingHooks(watch_next)))
    return state.step, watched


@contextmanager
def errors_on_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("name", "pooling"), [("fp32", "max"), ("bf16-true", "attention")])
def test_no_step_waits_for_the_device(executor: Executor, name: str, pooling: str) -> None:
    steps = 3
    assert steps < CHECK_EVERY["cuda"]
    params = {"fp_precision": name, "pooling": pooling, "optimizer": "lion", "cuda_graphs": False}
    assert run_steps(executor, META_GPU, stop_after=steps, **params) == (steps, [*range(steps)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "bf16-true", "fp16"])
def test_gpu_waits_only_in_checks(executor: Executor, name: str) -> None:
    every, warm_up, steps = CHECK_EVERY["cuda"], 5, 60
    expected = [step for step in range(warm_up, steps) if (step + 1) % every]
    gpu = probe_device("cuda")
    ran = run_steps(executor, gpu, stop_after=steps, watch_from=warm_up, fp_precision=name)
    assert ran == (steps, expected)


@pytest.mark.parametrize("loss", ["auto", "focal"])
def test_no_loss_waits_for_the_device(loss: str) -> None:
    model = tiny_model().to("meta")
    loss_fn = tiny_objective(loss=loss, label_smoothing=0.1)
    amp = amp_of("fp32", META_GPU)
    with no_waiting():
        accumulate(model, amp, 4, loss_fn)
    with pytest.raises(WaitsForDevice), no_waiting():
        amp.check()


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("name", CPU_PRECISIONS)
def test_no_update_waits_for_the_device(name: str, optimizer: str) -> None:
    model = prepare_model(tiny_model(), PRECISIONS[name])
    groups = parameter_groups(model, learning_rate=1e-3)
    update, amp = build_optimizer(optimizer, groups), amp_of(name)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for step in range(3):
        amp.device = CPU
        loss = accumulate(model, amp, seed=step)
        amp.device = replace(CPU, type="cuda")
        with no_waiting("cpu"):
            apply_gradients(model, update, loss, amp, max_grad_norm=1.0)
    assert not all(map(torch.equal, before, model.parameters()))
