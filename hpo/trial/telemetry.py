"""The record of a trial, and its calls while it runs.

A `TrialRecorder` holds the known facts, and reads changing ones when the record is made. A trial that was
pruned or ran out of memory has its throughput and its precision facts too.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from hpo.device import DeviceInfo, Utilization, memory_limit
from hpo.errors import ModelError
from hpo.json_safe import json_safe
from hpo.models.encoder import encoder_layers
from hpo.models.multitask import MultitaskModel
from hpo.outcome import Outcome, Progress, TrialResult
from hpo.precision.amp import MixedPrecision
from hpo.training.evaluate import Evaluation
from hpo.training.throughput import ThroughputMeter, TrainingClock


def device_facts(device: DeviceInfo, shared: bool, memory_fraction: float | None) -> dict[str, Any]:
    """Return the facts of the device. `memory_fraction` is this process's share of its memory; None: all."""
    capability = device.compute_capability
    return {
        "type": device.type,
        "name": device.name,
        "compute_capability": None if capability is None else f"{capability[0]}.{capability[1]}",
        "gcn_arch": device.gcn_arch or None,
        "cpu_features": sorted(device.cpu_features) if device.type == "cpu" else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": device.cuda_version,
        "rocm": device.rocm_version,
        "num_threads": torch.get_num_threads(),
        "host": device.host,
        "shared": shared,
        "memory_limit_bytes": memory_limit(device, memory_fraction),
    }


@dataclass(frozen=True)
class Callbacks:
    """Functions that a running trial calls. Each may end the trial by raising a TrialEnd."""

    on_evaluation: Callable[[Evaluation], None] = lambda _: None
    should_stop: Callable[[], bool] = lambda: False
    """Called between micro-batches. True: the trial is checkpointed and ends as `preempted`."""
    on_progress: Callable[[Progress], None] = lambda _: None
    """Called after each step but the last, at the begin of other parts, and before evaluation batches."""
    other_workers: Callable[[], Collection[int]] = tuple  # returns their processes on this device


def training_facts(
    model: nn.Module,
    mixed_precision: MixedPrecision,
    clock: TrainingClock,
    utilization: Utilization,
    evaluation_rates: Sequence[float],
    num_ranks: int,
) -> dict[str, Any]:
    """Return the state of the training over all ranks; `device_utilization` is rank 0's.

    `evaluation_rates` are the examples per second of the forward passes of each evaluation.
    """
    state, meter = clock.state, clock.meter
    scaler = asdict(mixed_precision.statistics())
    evaluation_rate = float(np.median(evaluation_rates)) if evaluation_rates else None
    return {
        "throughput": meter.summary() | {"evaluation_examples_per_second": evaluation_rate},
        "fp32_fallbacks": scaler.pop("fp32_fallbacks"),
        "scaler": scaler,
        "moved_share": mixed_precision.moved_share(),
        "micro_batch_size": state.micro_batch_size,
        "oom_halvings": state.oom_halvings,
        "cuda_graphs": {"num_shapes": state.num_graphs, "problem": state.graph_problem},
        "num_ranks": num_ranks,
        "num_steps": state.step,
        "num_examples": None if math.isnan(state.num_examples) else round(state.num_examples),
        "num_tokens": state.num_tokens,
        "train_seconds": state.train_seconds,
        "evaluation_seconds": state.evaluation_seconds,
        "evaluation_scoring_seconds": state.evaluation_scoring_seconds,
        "device_utilization": utilization.read(),
        "model_flops_utilization": _flops_utilization(model, mixed_precision, meter, num_ranks),
    }


_HOPPER_SXM = {"bfloat16": 989e12, "float16": 989e12, "tf32": 494e12, "float32": 67e12}
_AMPERE_SXM = {"bfloat16": 312e12, "float16": 312e12, "tf32": 156e12, "float32": 19.5e12}
# Dense peak of one GPU in FLOP/s, by its full name and the dtype of the products. Source: the data sheets of
# NVIDIA A100, H100 and H200, SXM, without sparsity. Other cards with such a chip (PCIe, NVL) and parts of a
# GPU may be slower. float8 is left out: only the larger layers of an fp8 trial are float8, others are bf16.
_PEAK_FLOPS = {
    "NVIDIA H200": _HOPPER_SXM,
    "NVIDIA H100 80GB HBM3": _HOPPER_SXM,
    "NVIDIA A100-SXM4-80GB": _AMPERE_SXM,
    "NVIDIA A100-SXM4-40GB": _AMPERE_SXM,
}


def _flops_utilization(
    model: nn.Module, mixed_precision: MixedPrecision, meter: ThroughputMeter, num_ranks: int
) -> float | None:
    """Return model FLOP/s over the data sheets' peak for the precision's products.

    None if the peak is not known, or if frozen weights are decoded for each product, which `training_flops`
    does not count.
    """
    device, precision = mixed_precision.device, mixed_precision.precision
    peak = _PEAK_FLOPS.get(device.name, {}).get(precision.products)
    steps = meter.totals()
    if (
        not isinstance(model, MultitaskModel)
        or peak is None
        or device.is_part
        or device.gcn_arch
        or precision.frozen != "fp32"
        or not steps.seconds
    ):
        return None
    flops = training_flops(model, steps.tokens, steps.windows)
    return None if flops is None else flops / steps.seconds / (peak * num_ranks)


def training_flops(model: MultitaskModel, num_tokens: int, num_sequences: int) -> float | None:
    """Return the FLOPs of forward and backward over `num_tokens` in `num_sequences` windows.

    The estimate of PaLM's appendix B (Chowdhery et al. 2022, arXiv 2204.02311): 6 N a token for N
    parameters outside the embeddings, 12 D L for a layer's attention over L tokens. A frozen layer only
    goes forward: a third. A frozen weight beside trained ones has no gradient of its own: two thirds.
    Recomputation by gradient checkpointing and padding do not count. Every layer is assumed to attend to the
    whole window, of mean length. None if the layers are not known, or have experts, of which a token passes
    only some.
    """
    if not num_sequences:
        return 0.0
    try:
        layers = encoder_layers(model.encoder)
    except ModelError:
        return None
    if any(".experts." in name for name, _ in model.named_parameters()):
        return None
    config: Any = model.encoder.config
    attention = 4 * config.hidden_size * (num_tokens / num_sequences)
    flops = 0.0
    for layer in layers:
        weights = [(weight.numel(), weight.requires_grad) for weight in layer.parameters()]
        is_trained = any(trained for _, trained in weights)
        products = sum(size * (2 + trained if is_trained else 1) for size, trained in weights)
        flops += (2 * products + (3 if is_trained else 1) * attention) * num_tokens
    for task, head in zip(model.tasks, model.heads, strict=True):
        num_parameters = sum(parameter.numel() for parameter in head.parameters())
        flops += 6 * num_parameters * (num_tokens if task.level == "token" else num_sequences)
    return flops


@dataclass(frozen=True)
class StoredTrial:
    """A trial as its study recorded it."""

    number: int
    params: Mapping[str, Any] = field(default_factory=dict)
    telemetry: Mapping[str, Any] = field(default_factory=dict)
    outcome: str = Outcome.COMPLETE
    evaluations: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """The metrics of its evaluations by step."""
    detailed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Its detailed evaluations by split, as JSON."""
    folder: Path = Path()
    """Its checkpoints, which belong to `resume_key`."""
    resume_key: str = ""


class TrialRecorder:
    """The record of one running trial."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self._entries: dict[str, Any] = {}
        self._sources: list[Callable[[], Mapping[str, Any]]] = []

    def note(self, **entries: Any) -> None:
        """Add entries. A later entry replaces an earlier one of the same name."""
        self._entries |= entries

    def follow(self, source: Callable[[], Mapping[str, Any]]) -> None:
        """Add the entries of `source`, which is called whenever the record is made."""
        self._sources.append(source)

    def telemetry(self) -> dict[str, Any]:
        """Return the record as of now."""
        record = dict(self._entries)
        for source in self._sources:
            record |= source()
        return record

    def complete(self, end: TrialResult) -> TrialResult:
        """Return the trial's end with its whole record."""
        telemetry = json_safe(self.telemetry())
        self._sources.clear()  # they hold the model
        throughput = telemetry.get("throughput", {})
        headline = {
            "fp_precision_effective": telemetry.get("precision", {}).get("effective"),
            "train_examples_per_second": throughput.get("train_examples_per_second"),
            "train_tokens_per_second": throughput.get("train_tokens_per_second"),
            "train_joules_per_example": throughput.get("train_joules_per_example"),
            "peak_memory_bytes": telemetry.get("peak_memory_bytes"),
        }
        known = {key: value for key, value in headline.items() if value is not None}
        return replace(end, headline=known, telemetry=telemetry)
