"""Each precision computes in what its name says, trains as fp32 does, and as a plain PyTorch loop does."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.command_line import hpo_command, ok
from support.gpu_studies import largest_relative, relative, write_gpu_study
from support.tiny_loop import config_of

from hpo.config.resolved_study import resolve_study
from hpo.config.study_config import load_study
from hpo.data.batches import Batch, collate, training_batches
from hpo.device import DeviceInfo
from hpo.models.multitask import MultitaskModel
from hpo.outcome import TrialResult
from hpo.precision.amp import MixedPrecision, backend_flags
from hpo.precision.table import PRECISIONS, Resolution
from hpo.training.budget import TrainState
from hpo.training.evaluate import Evaluation
from hpo.training.loop import Learner, accumulate_gradients, apply_gradients
from hpo.trial.executor import Executor
from hpo.trial.parts import TrialParts, assemble
from hpo.trial.telemetry import Callbacks

ALL = list(PRECISIONS)
PRODUCTS = {"fp32": {"float32"}, "bf16": {"bfloat16"}, "fp16": {"float16"}, "bf16-true": {"bfloat16"}}
"""The products that a layer may have. TF32 and float8 are in some layers only."""

# Relative difference from fp32's of the mean loss of the last 20 of 60 steps. bf16-true rounds its weights to
# 8 bits, so that it loses small updates. fp8 rounds the factors of its products to 3 or 4 bits.
TOLERANCES = {"tf32": 0.01, "bf16": 0.01, "fp16": 0.01, "bf16-true": 0.05, "fp8": 0.05}
NUM_STEPS = {"cuda": 60, "cpu": 6}


@pytest.fixture(params=ALL)
def name(request: pytest.FixtureRequest, device: DeviceInfo) -> str:
    precision: str = request.param
    if device.type == "cpu" and precision in ("tf32", "fp8"):
        pytest.skip(f"a CPU has no {precision}")
    if precision == "fp8" and not device.has_torchao:
        pytest.skip("torchao is not installed")
    return precision


def of(device: DeviceInfo, on_gpu: str) -> str:
    """The size of an encoder."""
    return on_gpu if device.type == "cuda" else "tiny"


def verified(folder: Path, device: DeviceInfo, size: str) -> dict[str, Any]:
    """What `hpo verify` says of each precision."""
    folder.mkdir()
    texts = (32, (20, 30)) if device.type == "cuda" else (32, (2, 6))
    max_length = 256 if device.type == "cuda" else 64
    write_gpu_study(folder, device, size, texts=texts, training={"max_steps": 4, "max_length": max_length})
    found = ok(hpo_command(folder, "verify", "tiny.yaml", "--json")).json["precisions"]
    return {each["name"]: each for each in found}


def test_verify_measures_each_precision(
    device: DeviceInfo, tmp_path: Path, figure: Callable[[str], None]
) -> None:
    found = verified(tmp_path / "wide", device, of(device, "wide"))
    small = verified(tmp_path / "small", device, of(device, "small"))
    assert found.keys() == small.keys() == PRECISIONS.keys()
    for name, each in found.items():
        if each["compatibility"] is None:
            assert device.type == "cpu" or name == "fp8", each["note"]
            figure(f"{name}: {each['note']}")
            continue
        measured = each["compatibility"]["measurement"]
        products = measured["observed"]["linear_products"]
        costs = each["compatibility"]["costs"]
        speed = f", {costs['speed_ratio']:.2f} times fp32's speed" if costs else ""
        figure(f"{name}: {each['compatibility']['verdict']}, {products}{speed}")
        assert measured["error"] is None
        assert measured["finite"]
        if name in PRODUCTS:
            assert products.keys() == PRODUCTS[name]
        if device.type == "cuda":
            assert each["support"]["level"] == "native", each["note"]
            if name in ("tf32", "fp8"):
                assert any({"tf32": "tf32", "fp8": "float8"}[name] in kind for kind in products)
    if device.has_torchao and device.type == "cuda":
        assert found["fp8"]["compatibility"]["verdict"] != "incompatible"
        assert small["fp8"]["compatibility"]["verdict"] == "incompatible"
        assert "no linear layer of this model is large enough" in small["fp8"]["note"]
        figure(f"fp8 of a small encoder: {small['fp8']['note']}")


def trained(folder: Path, device: DeviceInfo, name: str) -> tuple[TrialResult, float]:
    """A trial and the mean loss of its last third.

    On a GPU its longest text has 256 tokens: cuBLAS may run products of few rows without TF32.
    """
    folder.mkdir()
    on_gpu = device.type == "cuda"
    path = write_gpu_study(
        folder,
        device,
        of(device, "wide"),
        texts=(512, (4, 30)) if on_gpu else (32, (4, 8)),
        training={
            "max_steps": NUM_STEPS[device.type],
            "max_length": 256 if on_gpu else 128,
            "learning_rate": 1e-4,
        },
        evaluation={"per_trial": 3},
        search_space={},
        sampler={"name": "grid"},
    )
    losses: list[float] = []

    def note(scored: Evaluation) -> None:
        losses.append(scored.train_loss)

    executor = Executor(resolve_study(load_study(str(path)), device), folder / "runs")
    result = executor.run({"fp_precision": name}, None, "", Callbacks(on_evaluation=note))
    assert result.outcome == "complete", f"{result.reason}\n{result.traceback}"
    return result, losses[-1]


@pytest.fixture(scope="module")
def references() -> dict[str, float]:
    """The loss of fp32, by type of device; the first test that needs it trains it."""
    return {}


def test_a_trial_trains_like_fp32(
    device: DeviceInfo, name: str, references: dict[str, float], tmp_path: Path, figure: Callable[[str], None]
) -> None:
    result, loss = trained(tmp_path / name, device, name)
    if name == "fp32":
        references[device.type] = loss
    elif device.type not in references:
        references[device.type] = trained(tmp_path / "fp32", device, "fp32")[1]
    telemetry = result.telemetry
    precision, throughput = telemetry["precision"], telemetry["throughput"]
    difference = relative(loss, references[device.type])
    by_host = telemetry["num_examples"] / telemetry["train_seconds"]
    figure(
        f"{name}: loss {loss:.4f}, {difference:.2%} from fp32's; examples/s "
        f"{throughput['train_examples_per_second']:.0f} by events, {by_host:.0f} by the host with warm-up; "
        f"{precision['observed']['linear_products']}"
    )
    assert precision["agrees"] is True, precision["reason"]
    assert (precision["requested"], precision["effective"]) == (name, name)
    assert difference <= TOLERANCES.get(name, 0.0)


STEPS, RATE, CLIP = 6, 1e-4, 1.0
CUT = {"max_steps": STEPS, "learning_rate": RATE, "weight_decay": 0.0, "max_grad_norm": CLIP}


def parts_of(folder: Path, device: DeviceInfo, name: str, **amp: Any) -> TrialParts:
    path = write_gpu_study(
        folder, device, of(device, "small"), texts=(128, (2, 6)), training=CUT, amp=amp, search_space={}
    )
    executor = Executor(resolve_study(load_study(str(path)), device), folder / "runs")
    config = config_of(executor, fp_precision=name)
    return assemble(executor.study, config, Resolution(name, name, "native"), executor.loader)


def batches_of(parts: TrialParts) -> list[Batch]:
    split, config = parts.data.train, parts.config
    order = training_batches(split.lengths_W, config.batch_size, config.seed, 0)
    return [collate(split, windows, parts.loss_fn.tasks, parts.data.pad_id) for windows in order[:STEPS]]


def plain_loss(logits: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum of the tasks' losses, as a PyTorch user writes it."""
    num_rows = len(targets["criteria"])
    of_rows = F.binary_cross_entropy_with_logits(
        logits["criteria"].float(), targets["criteria"], reduction="sum"
    )
    return of_rows / num_rows + F.cross_entropy(logits["severity"].float(), targets["severity"])


def run_plainly(
    model: MultitaskModel, batches: list[Batch], device: DeviceInfo, name: str, init_scale: float
) -> tuple[list[float], float, int]:
    """Losses, final scale and number of skipped steps of a loop as PyTorch's guide to AMP has it."""
    precision = PRECISIONS[name]
    if name == "bf16-true":
        model = model.to(torch.bfloat16)
    dtype = getattr(torch, precision.autocast or "bfloat16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    scaler = torch.amp.GradScaler(device.type, init_scale=init_scale, enabled=name == "fp16")
    losses, num_skipped = [], 0
    for batch in batches:
        part = batch.to(device.torch_device)
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype, enabled=precision.autocast is not None):
            logits = model(*part.inputs)
        loss = plain_loss(logits, part.targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        num_skipped += scaler.get_scale() < before
        losses.append(float(loss.detach()))
    return losses, scaler.get_scale(), num_skipped


def run_ours(
    parts: TrialParts, model: MultitaskModel, batches: list[Batch]
) -> tuple[list[float], float, int | None]:
    parts = copy.copy(parts)
    object.__setattr__(parts, "model", model)
    optimizer = parts.prepare()
    precision = parts.resolution.precision
    amp = MixedPrecision(precision, parts.config.amp, parts.device)
    learner, state, losses = Learner(model, parts.loss_fn, amp), TrainState(micro_batch_size=16), []
    model.train()
    for batch in batches:
        loss = accumulate_gradients(learner, batch, parts.config.seed, state)
        apply_gradients(model.parameters(), optimizer, loss, amp, CLIP)
        losses.append(float(loss))
    return losses, amp.scaler.get_scale(), amp.statistics().skipped_steps


@pytest.mark.parametrize("init_scale", [2.0**16, 1e8])
def test_a_plain_loop_has_the_same_losses(
    device: DeviceInfo, name: str, init_scale: float, tmp_path: Path, figure: Callable[[str], None]
) -> None:
    if name == "fp8":
        pytest.skip("torchao's own conversion is what there is to compare with")
    if init_scale > 2.0**16 and name != "fp16":
        pytest.skip("only fp16 scales its loss")
    parts = parts_of(tmp_path, device, name, init_scale=init_scale)
    batches, amp = batches_of(parts), parts.config.amp
    with backend_flags(PRECISIONS[name], amp):
        plain = run_plainly(copy.deepcopy(parts.model), batches, device, name, init_scale)
        ours = run_ours(parts, parts.model, batches)
    difference = largest_relative(ours[0], plain[0])
    figure(
        f"{name}, scale {init_scale:g}: losses {difference:.1e} apart; "
        f"skipped steps {ours[2]} and {plain[2]}, scale {ours[1]:g} and {plain[1]:g}"
    )
    assert difference <= (1e-5 if name == "fp32" else 2e-3)
    assert ours[1] == plain[1]
    assert ours[2] == plain[2]
