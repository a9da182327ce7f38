"""Throughput of training: rates, step times and padding; and what share of the device's peak that is.

Throughput is measured between marks that are set after each optimiser step: wall time on a CPU, events
on a GPU, which cost no synchronisation. The first steps are left out (allocator, autotuning, caches), and
so is what lies before a `start` call: evaluation, the copy for a checkpoint, compilation. Tokens are real
tokens, without padding.

The meter's size does not grow with the steps: it holds sums, and the seconds of the last `RECENT_STEPS`, of
which the percentiles are.
"""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from hpo.device import DeviceInfo, synchronize
from hpo.errors import ModelError
from hpo.models.encoder import encoder_layers
from hpo.models.multitask import MultitaskModel

WARMUP_STEPS = 3
"""Steps not counted as throughput, unless a trial has no more than these."""

RECENT_STEPS = 1000
"""Steps whose seconds are kept; of a GPU also those whose events are kept before it is waited for."""


class StepTotals(NamedTuple):
    """Sums over steps; `slots` are the places of a batch, padding included."""

    steps: int = 0
    seconds: float = 0.0
    examples: float = 0.0
    windows: int = 0
    tokens: int = 0
    slots: int = 0

    def plus(self, other: StepTotals) -> StepTotals:
        return StepTotals(*map(operator.add, self, other))


class ThroughputMeter:
    """Examples and tokens per second of the training steps, without a device sync per step."""

    def __init__(self, device: DeviceInfo, warmup_steps: int = WARMUP_STEPS) -> None:
        self._device = device
        self._warmup_steps = warmup_steps
        self._previous: Any = None
        self._pending: list[tuple[Any, Any, StepTotals]] = []
        self._warmup, self._after = StepTotals(), StepTotals()
        self._seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        """Of the steps after the warm-up, or of the warm-up while there are no others."""

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
        """Count one optimiser step; a window counts as the part that it is of its example."""
        mark = self._mark()
        counts = StepTotals(1, 0.0, num_examples, num_windows, num_tokens, num_slots)
        self._pending.append((self._previous, mark, counts))
        self._previous = mark
        if len(self._pending) > RECENT_STEPS:
            self._settle()

    def _settle(self) -> None:
        on_gpu = self._device.type == "cuda"
        if self._pending and on_gpu:
            synchronize(self._device)
        for start, end, counts in self._pending:
            seconds = start.elapsed_time(end) / 1000 if on_gpu else end - start
            step = counts._replace(seconds=seconds)
            if self._warmup.steps < self._warmup_steps:
                self._warmup = self._warmup.plus(step)
            else:
                if not self._after.steps:
                    self._seconds.clear()
                self._after = self._after.plus(step)
            self._seconds.append(seconds)
        self._pending.clear()

    def totals(self) -> StepTotals:
        """Of all training steps so far, the warm-up included; synchronises once."""
        self._settle()
        return self._warmup.plus(self._after)

    def summary(self) -> dict[str, float | None]:
        """Rates and step times in seconds so far; synchronises once."""
        total = self.totals()
        rated = self._after if self._after.steps else self._warmup
        p50, p95 = None, None
        if self._seconds:
            p50, p95 = np.percentile(self._seconds, (50, 95), method="inverted_cdf").tolist()
        return {
            "train_examples_per_second": _ratio(rated.examples, rated.seconds),
            "train_tokens_per_second": _ratio(rated.tokens, rated.seconds),
            "step_seconds_p50": p50,
            "step_seconds_p95": p95,
            "padding_share": _ratio(total.slots - total.tokens, total.slots),
        }

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints: plain numbers."""
        self._settle()
        totals = {"warmup": self._warmup._asdict(), "after": self._after._asdict()}
        return {**totals, "seconds": list(self._seconds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._warmup, self._after = StepTotals(**state["warmup"]), StepTotals(**state["after"])
        self._seconds = deque(state["seconds"], maxlen=RECENT_STEPS)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


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
    rates = next((rates for name, rates in _PEAK_FLOPS.items() if name in device.name), {})
    return rates.get(kind)


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
    attention = 4 * config.hidden_size * (num_tokens / num_sequences)
    flops = 0.0
    for layer in layers:
        passes = 3 if any(parameter.requires_grad for parameter in layer.parameters()) else 1
        flops += passes * (2 * _num_parameters(layer) + attention) * num_tokens
    for task, head in zip(model.tasks, model.heads, strict=True):
        flops += 6 * _num_parameters(head) * (num_tokens if task.level == "token" else num_sequences)
    return flops


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
