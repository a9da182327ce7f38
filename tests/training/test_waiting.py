"""Steps without a check do not wait for the device: on the meta device and on a real GPU."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.device_reads import META_GPU, WaitsForDevice, no_waiting
from support.tiny import CPU, CPU_PRECISIONS, EMULATED, amp_of, tiny_model, tiny_objective
from support.tiny_loop import accumulate, config_of, loop_parts

from hpo.device import DeviceInfo, probe_device
from hpo.precision.amp import backend_flags, prepare_model
from hpo.precision.table import PRECISIONS
from hpo.training.budget import TrainState
from hpo.training.loop import CHECK_EVERY, Learner, TrainingHooks, apply_gradients, train
from hpo.training.optim import build_optimizer, parameter_groups
from hpo.training.throughput import ThroughputMeter, TrainingClock
from hpo.trial.executor import Executor
from hpo.trial.parts import training_args


class Enough(Exception):
    pass


def run_steps(executor: Executor, device: DeviceInfo, steps: range, **params: Any) -> list[int]:
    """Train to the end of `steps`. Return the observed steps: those of `steps` without a check."""
    config = config_of(executor, dropout=0.1, head_dropout=0.1, max_steps=10 * steps.stop, **params)
    model, _, loss_fn, data = loop_parts(executor, config)
    model.to(device.torch_device)
    optimizer = build_optimizer(config.optimizer, parameter_groups(model, learning_rate=1e-4))
    state, meter = TrainState(), ThroughputMeter(CPU if device is META_GPU else device)
    observed: list[int] = []
    with ExitStack() as observation, backend_flags(PRECISIONS[config.fp_precision], EMULATED):

        def observe_next() -> bool:
            observation.close()
            if state.step == steps.stop:
                raise Enough
            if state.step >= steps.start and (state.step + 1) % CHECK_EVERY[device.type]:
                observed.append(state.step)
                if device is META_GPU:
                    observation.enter_context(no_waiting())
                else:
                    torch.cuda.set_sync_debug_mode("error")
                    observation.callback(torch.cuda.set_sync_debug_mode, "default")
            return False

        args = training_args(executor.study, config, data.train.num_windows)
        args = replace(args, micro_batch_size=config.batch_size // 2)
        learner = Learner(model, loss_fn, amp_of(config.fp_precision, device))
        clock, hooks = TrainingClock(state, meter), TrainingHooks(observe_next)
        observe_next()
        with pytest.raises(Enough):
            list(train(learner, optimizer, data, args, clock, hooks))
    return observed


@pytest.mark.parametrize(("name", "pooling"), [("fp32", "max"), ("bf16-true", "attention")])
def test_no_step_waits_for_the_device(executor: Executor, name: str, pooling: str) -> None:
    params = {"fp_precision": name, "pooling": pooling, "optimizer": "lion", "cuda_graphs": False}
    assert run_steps(executor, META_GPU, range(3), **params) == [0, 1, 2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "bf16-true", "fp16"])
def test_gpu_waits_only_in_checks(executor: Executor, name: str) -> None:
    expected = [step for step in range(5, 60) if (step + 1) % CHECK_EVERY["cuda"]]
    assert run_steps(executor, probe_device("cuda"), range(5, 60), fp_precision=name) == expected


@pytest.mark.parametrize("loss", ["auto", "focal"])
def test_no_loss_waits_for_the_device(loss: str) -> None:
    model, amp = tiny_model().to("meta"), amp_of("fp32", META_GPU)
    loss_fn = tiny_objective(loss=loss, label_smoothing=0.1)
    with no_waiting():
        accumulate(model, amp, 4, loss_fn)
    with pytest.raises(WaitsForDevice), no_waiting():
        amp.check()


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("name", CPU_PRECISIONS)
def test_no_update_waits_for_the_device(name: str, optimizer: str) -> None:
    """Fused kernels and the real scaler, with the CPU as the device."""
    model, amp = prepare_model(tiny_model(), PRECISIONS[name]), amp_of(name)
    update = build_optimizer(optimizer, parameter_groups(model, learning_rate=1e-3))
    for step in range(3):
        amp.device = CPU
        loss = accumulate(model, amp, seed=step)
        amp.device = replace(CPU, type="cuda")
        with no_waiting("cpu"):
            apply_gradients(model.parameters(), update, loss, amp, max_grad_norm=1.0)
