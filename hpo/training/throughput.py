"""What a trial measured about itself: throughput, step times, memory, and the record that is stored.

Throughput is measured between marks that are set after each optimiser step: wall time on a CPU, events
on a GPU, which cost no synchronisation. The first steps are left out (allocator, autotuning, caches).
Evaluation, the copy for a checkpoint and compilation lie between `start` calls and are not counted; writing
a checkpoint goes on beside the next steps. Tokens are real tokens; padding is told apart as `padding_share`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hpo.device import DeviceInfo, synchronize
from hpo.errors import ModelError
from hpo.models.encoder import (
    encoder_layers,
)
from hpo.models.export import _num_parameters
from hpo.models.multitask import MultitaskModel

WARMUP_STEPS = 3
"""Steps not counted as throughput, unless a trial has no more than these."""


class ThroughputMeter:
    """Examples and tokens per second of the training steps, without a device sync per step."""

    def __init__(self, device: DeviceInfo, warmup_steps: int = WARMUP_STEPS) -> None:
        self._device = device
        self._warmup_steps = warmup_steps
        self._previous: Any = None
        self._pending: list[tuple[Any, Any]] = []
        self._seconds: list[float] = []
        self._examples: list[float] = []
        self._windows: list[int] = []
        self._tokens: list[int] = []
        self._slots: list[int] = []

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """Begin an uninterrupted stretch of steps."""
        self._previous = self._mark()

    def step(self, num_examples: float, num_windows: int, num_tokens: int, num_slots: int) -> None:
        """Count one optimiser step over `num_tokens` real tokens in `num_slots` padded places.

        A window counts as the part that it is of its example.
        """
        mark = self._mark()
        self._pending.append((self._previous, mark))
        self._previous = mark
        self._examples.append(num_examples)
        self._windows.append(num_windows)
        self._tokens.append(num_tokens)
        self._slots.append(num_slots)

    def _settle(self) -> None:
        if self._pending and self._device.type == "cuda":
            synchronize(self._device)
            self._seconds += [start.elapsed_time(end) / 1000 for start, end in self._pending]
        else:
            self._seconds += [end - start for start, end in self._pending]
        self._pending.clear()

    def summary(self) -> dict[str, float | None]:
        """Rates and step times in seconds so far; synchronises once."""
        self._settle()
        first = self._warmup_steps if len(self._seconds) > self._warmup_steps else 0
        seconds = np.asarray(self._seconds[first:])
        total = float(seconds.sum())
        if total <= 0:
            return dict.fromkeys(
                (
                    "train_examples_per_second",
                    "train_tokens_per_second",
                    "step_seconds_p50",
                    "step_seconds_p95",
                    "padding_share",
                )
            )
        slots = sum(self._slots)
        return {
            "train_examples_per_second": sum(self._examples[first:]) / total,
            "train_tokens_per_second": sum(self._tokens[first:]) / total,
            "step_seconds_p50": float(np.percentile(seconds, 50)),
            "step_seconds_p95": float(np.percentile(seconds, 95)),
            "padding_share": 1 - sum(self._tokens) / slots,
        }

    def state_dict(self) -> dict[str, list[Any]]:
        """For checkpoints: plain numbers."""
        self._settle()
        return {
            "seconds": list(self._seconds),
            "examples": list(self._examples),
            "windows": list(self._windows),
            "tokens": list(self._tokens),
            "slots": list(self._slots),
        }

    def load_state_dict(self, state: Mapping[str, list[Any]]) -> None:
        self._seconds = list(state["seconds"])
        self._examples = list(state["examples"])
        self._windows = list(state["windows"])
        self._tokens = list(state["tokens"])
        self._slots = list(state["slots"])

    @property
    def measured_tokens(self) -> int:
        """Real tokens that passed through the model in training so far."""
        return sum(self._tokens)

    @property
    def measured_windows(self) -> int:
        """Windows that passed through the model in training so far."""
        return sum(self._windows)

    @property
    def measured_seconds(self) -> float:
        """Seconds of all training steps so far, the warm-up included."""
        self._settle()
        return float(sum(self._seconds))


# Dense peak of one device in FLOP/s by (name part, dtype of the products), from the vendors' data sheets:
# NVIDIA A100, H100 and H200 Tensor Core GPU data sheets, without sparsity.
_PEAK_FLOPS = {
    "H200": {"bfloat16": 989e12, "float16": 989e12, "tf32": 494e12, "float32": 67e12, "float8": 1979e12},
    "H100": {"bfloat16": 989e12, "float16": 989e12, "tf32": 494e12, "float32": 67e12, "float8": 1979e12},
    "A100": {"bfloat16": 312e12, "float16": 312e12, "tf32": 156e12, "float32": 19.5e12},
}


def peak_flops(device: DeviceInfo, kind: str) -> float | None:
    """The device's data-sheet rate in FLOP/s for products in `kind`; None where it is not known.

    The variants of one name differ (SXM and PCIe); the figure is the SXM part's.
    """
    for name, rates in _PEAK_FLOPS.items():
        if name in device.name:
            return rates.get(kind)
    return None


def training_flops(model: MultitaskModel, num_tokens: int, num_sequences: int) -> float | None:
    """Floating-point operations of forward and backward over `num_tokens` in `num_sequences` windows.

    The estimate of PaLM's appendix B (Chowdhery et al. 2022, arXiv 2204.02311): 6 N a token for N
    parameters outside the embeddings, 12 D L for a layer's attention over L tokens. A frozen layer only
    goes forward, a third of that. Recomputation by gradient checkpointing is not counted, nor is padding;
    every layer is taken to attend to the whole window, of mean length. None where the layers are not
    known.
    """
    if not num_sequences:
        return 0.0
    try:
        layers = encoder_layers(model.encoder)
    except ModelError:
        return None
    config: Any = model.encoder.config
    mean_length = num_tokens / num_sequences
    flops = 0.0
    for layer in layers:
        passes = 3 if any(parameter.requires_grad for parameter in layer.parameters()) else 1
        per_token = 2 * _num_parameters(layer) + 4 * config.hidden_size * mean_length
        flops += passes * per_token * num_tokens
    for task, head in zip(model.tasks, model.heads, strict=True):
        flops += 6 * _num_parameters(head) * (num_tokens if task.level == "token" else num_sequences)
    return flops
