"""Out of memory and a lost device: the trial goes on with less, and the study goes on without it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import finish, start_hpo, stored
from support.gpu_studies import SGD, relative, write_gpu_study

from hpo.config.resolved_study import resolve_study
from hpo.config.study_config import load_study
from hpo.device import DeviceInfo
from hpo.models.multitask import MultitaskModel
from hpo.trial.executor import Executor
from hpo.trial.telemetry import Callbacks

MOST_ROWS = 4
"""Rows that fit into memory in the form for the CPU."""


@pytest.fixture
def little_memory(device: DeviceInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has too much memory: there the model refuses more than a few rows."""
    if device.type == "cuda":
        return
    forward = MultitaskModel.forward

    def forward_of_few_rows(model: MultitaskModel, *inputs: Any) -> Any:
        if len(inputs[0]) > MOST_ROWS:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(model, *inputs)

    monkeypatch.setattr(MultitaskModel, "forward", forward_of_few_rows)


def run_trial(
    folder: Path, device: DeviceInfo, training: dict[str, Any], fraction: float
) -> tuple[float, int]:
    """The loss of a trial, and the micro-batch that it ended with."""
    folder.mkdir()
    on_gpu = device.type == "cuda"
    path = write_gpu_study(
        folder,
        device,
        "base" if on_gpu else "tiny",
        texts=(512, (6, 12)) if on_gpu else (16, (2, 4)),
        training={
            "max_steps": 4,
            "batch_size": 512 if on_gpu else 16,
            "max_length": 128 if on_gpu else 32,
            "fp_precision": "bf16",
            **SGD,
            **training,
        },
        amp={"memory_fraction": fraction},
        compat={"enabled": False},
        evaluation={"batch_tokens": 2048},
        search_space={},
    )
    losses: list[float] = []

    def note(scored: Any) -> None:
        losses.append(scored.train_loss)

    executor = Executor(resolve_study(load_study(str(path)), device), folder / "runs")
    result = executor.run({}, None, "", Callbacks(on_evaluation=note))
    assert result.outcome == "complete", f"{result.reason}\n{result.traceback}"
    halvings = result.telemetry["oom_halvings"]
    assert (halvings > 0) == ("micro_batch_size" not in training)
    return losses[-1], result.telemetry["micro_batch_size"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("mode", ["none", "reduce-overhead"])
def test_out_of_memory_halves_the_micro_batch(
    device: DeviceInfo, mode: str, tmp_path: Path, figure: Callable[[str], None]
) -> None:
    if device.type == "cpu" and mode != "none":
        pytest.skip("a CPU has no CUDA graphs")
    small = 8 if device.type == "cuda" else 2
    reference, _ = run_trial(tmp_path / "small", device, {"micro_batch_size": small}, 1.0)
    compiled = {"compile": mode, "compile_scope": "layers"} if mode != "none" else {"cuda_graphs": True}
    loss, micro_batch = run_trial(tmp_path / "halved", device, compiled, 0.05)
    figure(
        f"compile {mode}: micro-batch {micro_batch}, "
        f"loss {relative(loss, reference):.1e} from that of micro-batch {small}"
    )
    assert relative(loss, reference) < 2e-3


CODE = """
import os, signal
from pathlib import Path

import hpo, torch
from torch.nn.functional import binary_cross_entropy_with_logits

MARKER = Path({marker!r})

class Trial(hpo.Section):
    number: int = 0

@hpo.loss("asserts", ["multi_label"], Trial)
def asserts(kind, logits, target, options, class_weight, mask):
    if options.number == 1 and torch.is_grad_enabled() and MARKER.exists():
        MARKER.unlink()
        if logits.is_cuda:
            values = torch.zeros(4, device=logits.device)
            values[torch.tensor([5], device=logits.device)].sum()  # a device assert
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    return binary_cross_entropy_with_logits(logits, target, reduction="sum")
"""


@pytest.mark.slow
def test_a_device_assert_in_one_trial_leaves_the_others_right(
    device: DeviceInfo, tmp_path: Path, figure: Callable[[str], None]
) -> None:
    """One of five trials loses the device. A CPU cannot be lost, so its worker is killed."""
    marker = tmp_path / "marker"
    marker.touch()
    (tmp_path / "own.py").write_text(CODE.format(marker=str(marker)))
    write_gpu_study(
        tmp_path,
        device,
        "tiny",
        texts=(32, (2, 4)),
        training={"max_steps": 6, "fp_precision": "fp32", "loss": "asserts", "learning_rate": 1e-3},
        code="own.py",
        compat={"enabled": False},
        sampler={"name": "grid"},
        n_trials=5,
        search_space={"asserts.number": {"type": "categorical", "choices": [0, 1, 2, 3, 4]}},
    )
    finished = finish(start_hpo(tmp_path, "run", "tiny.yaml", "--workers-per-device", "1"), 240)
    record = stored(tmp_path)
    scores = {trial.params["asserts.number"]: trial.values for trial in record.trials}
    figure(f"exit code {finished.exit_code}, outcomes {[trial.outcome for trial in record.trials]}, {scores}")
    assert not marker.exists(), "the device was never lost"
    assert finished.exit_code == 0, finished.err
    assert [trial.outcome for trial in record.trials] == ["complete"] * 5
    # All trials have the same settings and seed.
    first, *others = scores.values()
    assert others == [pytest.approx(first, abs=0.05)] * 4
