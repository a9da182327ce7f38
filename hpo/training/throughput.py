"""Throughput of training: rates, step times and padding; and what share of the device's peak that is.

Throughput is measured between marks that are set after each optimiser step: wall time on a CPU, events
on a GPU, which cost no synchronisation. The first steps are left out (allocator, autotuning, caches), and
so is what lies before a `start` call: evaluation, the copy for a checkpoint, compilation. Tokens are real
tokens, without padding.

The meter's size does not grow with the steps: it holds sums, and a histogram of the steps' seconds whose
bounds are 2 % apart. A percentile is the middle of its bin, hence within 1 % of the step's seconds.
"""

from __future__ import annotations

import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from hpo.device import DeviceInfo, synchronize
from hpo.errors import ModelError
from hpo.models.encoder import encoder_layers
from hpo.models.multitask import MultitaskModel

WARMUP_STEPS = 3
"""Steps not counted as throughput, unless a trial has no more than these."""

MAX_PENDING = 1000
"""Steps of a GPU whose events are kept before it is waited for."""

_LOG_BIN = math.log(1.02)
_SHORTEST, _LONGEST = 1e-6, 1e6
"""Seconds that are told apart in the histogram: 1396 bins."""


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
        self._histogram: Counter[int] = Counter()
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
        if len(self._pending) > MAX_PENDING:
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
                    self._histogram.clear()
                self._after = self._after.plus(step)
            clipped = min(max(seconds, _SHORTEST), _LONGEST)
            self._histogram[int(math.log(clipped / _SHORTEST) / _LOG_BIN)] += 1
        self._pending.clear()

    def totals(self) -> StepTotals:
        """Of all training steps so far, the warm-up included; synchronises once."""
        self._settle()
        return self._warmup.plus(self._after)

    def summary(self) -> dict[str, float | None]:
        """Rates and step times in seconds so far; synchronises once."""
        total = self.totals()
        rated = self._after if self._after.steps else self._warmup
        rates: dict[str, Callable[[], float]] = {
            "train_examples_per_second": lambda: rated.examples / rated.seconds,
            "train_tokens_per_second": lambda: rated.tokens / rated.seconds,
            "step_seconds_p50": lambda: self._percentile(50),
            "step_seconds_p95": lambda: self._percentile(95),
            "padding_share": lambda: 1 - total.tokens / total.slots,
        }
        return {name: rate() if rated.seconds > 0 else None for name, rate in rates.items()}

    def _percentile(self, percent: int) -> float:
        """Seconds that so many percent of the steps do not exceed, within 1 %."""
        rank = math.ceil(self._histogram.total() * percent / 100)
        for index in sorted(self._histogram):
            rank -= self._histogram[index]
            if rank <= 0:
                break
        return _SHORTEST * math.exp((index + 0.5) * _LOG_BIN)

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints: plain numbers, as many after any number of steps."""
        self._settle()
        totals = {"warmup": self._warmup._asdict(), "after": self._after._asdict()}
        return {**totals, "histogram": dict(self._histogram)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._warmup, self._after = StepTotals(**state["warmup"]), StepTotals(**state["after"])
        self._histogram = Counter(state["histogram"])


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
