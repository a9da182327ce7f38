"""The facts of a trial, and the record that they become however the trial ends.

A `TrialRecorder` holds the facts that are known so far, and reads those that change when the record is made,
so a trial that was pruned or ran out of memory has its throughput and its precision facts too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
import transformers

from hpo.data.tokenized_split import TokenizedSplit
from hpo.device import DeviceInfo, Utilization, memory_limit
from hpo.json_safe import json_safe
from hpo.models.multitask import MultitaskModel
from hpo.outcome import Outcome
from hpo.precision.amp import MixedPrecision
from hpo.precision.table import Resolution
from hpo.training.compilation import CompileClock
from hpo.training.decoding import DecodingThresholds
from hpo.training.evaluate import Evaluation
from hpo.training.loop import TrainState
from hpo.training.throughput import ThroughputMeter, peak_flops, training_flops


def device_facts(device: DeviceInfo, shared: bool, memory_fraction: float | None) -> dict[str, Any]:
    """Where the trial runs. `memory_fraction` is the share of a GPU's memory for this process; None: all."""
    capability = device.compute_capability
    record = {
        "type": device.type,
        "name": device.name,
        "compute_capability": None if capability is None else f"{capability[0]}.{capability[1]}",
        "cpu_features": sorted(device.cpu_features) if device.type == "cpu" else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": device.cuda_version,
        "num_threads": torch.get_num_threads(),
        "host": device.host,
        "shared": shared,
        "memory_fraction": memory_fraction if device.type == "cuda" else None,
        "memory_limit_bytes": memory_limit(device, memory_fraction),
    }
    return {"device": record}


def precision_facts(
    resolution: Resolution, observed: Mapping[str, Any] | None = None, disagreement: str = ""
) -> dict[str, Any]:
    """The precision that was asked for, the one that runs, and the one observed; None: not observed yet.

    `disagreement` says why the observed precision is not the one that should run; empty: it is.
    """
    record = asdict(resolution) | {"fell_back": resolution.fell_back}
    if observed is not None:
        reason = " ".join(filter(None, (resolution.reason, disagreement)))
        record |= {"observed": observed, "agrees": not disagreement, "reason": reason}
    return {"precision": record}


def data_facts(split: TokenizedSplit) -> dict[str, Any]:
    """How many training texts were cut, and how many true spans were lost, by `max_length`."""
    record = {
        "num_examples": len(split.examples),
        "num_cut_examples": split.num_cut_examples,
        "num_lost_spans": dict(split.num_lost_spans),
    }
    return {"data": record}


@dataclass(frozen=True)
class CompileFacts:
    """The time of compilation: before the first training step, and later by the clock."""

    seconds_before_training: float
    clock: CompileClock

    def telemetry(self) -> dict[str, Any]:
        return {"compile_seconds": self.seconds_before_training + self.clock.seconds}


@dataclass(frozen=True)
class ScoredEvaluation:
    """An evaluation with the study's objective values for it."""

    evaluation: Evaluation
    values: tuple[float, ...]

    def telemetry(self) -> dict[str, Any]:
        """The entries of the best evaluation."""
        evaluation = self.evaluation
        return {
            "metrics": evaluation.metrics,
            "decisions": {name: asdict(decision) for name, decision in evaluation.decisions.items()},
            "best_step": evaluation.step,
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain containers, for a checkpoint."""
        return {"values": list(self.values), "evaluation": asdict(self.evaluation)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> ScoredEvaluation:
        fields = dict(state["evaluation"])
        fields["decisions"] = {
            name: DecodingThresholds(**decision) for name, decision in fields["decisions"].items()
        }
        return cls(Evaluation(**fields), tuple(state["values"]))


@dataclass(frozen=True)
class TrainingFacts:
    """How the training goes."""

    model: MultitaskModel
    mixed_precision: MixedPrecision
    state: TrainState
    meter: ThroughputMeter
    utilization: Utilization
    evaluation_rates: Sequence[float]
    """Examples per second of each evaluation."""

    def telemetry(self) -> dict[str, Any]:
        state, rates = self.state, self.evaluation_rates
        scaler = asdict(self.mixed_precision.statistics())
        fp32_fallbacks = scaler.pop("fp32_fallbacks")
        return {
            "throughput": self.meter.summary()
            | {"evaluation_examples_per_second": float(np.median(rates)) if rates else None},
            "scaler": scaler,
            "fp32_fallbacks": fp32_fallbacks,
            "micro_batch_size": state.micro_batch_size,
            "oom_halvings": state.oom_halvings,
            "num_steps": state.step,
            "num_examples": round(state.num_examples),
            "num_tokens": state.num_tokens,
            "train_seconds": state.train_seconds,
            "evaluation_seconds": state.evaluation_seconds,
            "device_utilization": self.utilization.read(),
            "model_flops_utilization": self._flops_utilization(),
        }

    def _flops_utilization(self) -> float | None:
        """Model FLOP/s over the data sheet's peak for the precision's products; None where unknown."""
        precision = self.mixed_precision.precision
        kind = "float8" if precision.float8 else "tf32" if precision.tf32 else precision.linear_dtype
        peak = peak_flops(self.mixed_precision.device, kind)
        steps = self.meter.totals()
        if peak is None or not steps.seconds:
            return None
        flops = training_flops(self.model, steps.tokens, steps.windows)
        return None if flops is None else flops / steps.seconds / peak


class TrialRecorder:
    """The record of one running trial."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self._entries: dict[str, Any] = {}
        self._sources: list[Callable[[], Mapping[str, Any]]] = []

    def note(self, entries: Mapping[str, Any]) -> None:
        """Add entries; a later one replaces an earlier one of its name."""
        self._entries |= entries

    def follow(self, source: Callable[[], Mapping[str, Any]]) -> None:
        """Add the entries that `source` returns whenever the record is made."""
        self._sources.append(source)

    def telemetry(self) -> dict[str, Any]:
        """The record as of now."""
        record = {"total_seconds": time.perf_counter() - self.started, **self._entries}
        for source in self._sources:
            record |= source()
        return record

    def result(
        self, outcome: Outcome, reason: str, values: tuple[float, ...] | None, traceback: str | None
    ) -> TrialResult:
        """The trial's end with everything that it stores."""
        telemetry = json_safe(self.telemetry())
        throughput = telemetry.get("throughput", {})
        headline = {
            "fp_precision_effective": telemetry.get("precision", {}).get("effective"),
            "train_examples_per_second": throughput.get("train_examples_per_second"),
            "train_tokens_per_second": throughput.get("train_tokens_per_second"),
            "peak_memory_bytes": telemetry.get("peak_memory_bytes"),
        }
        known = {key: value for key, value in headline.items() if value is not None}
        return TrialResult(outcome, reason, values, known, telemetry, traceback)


@dataclass(frozen=True)
class TrialResult:
    """How one trial ended; everything that the study stores about it."""

    outcome: Outcome
    reason: str = ""
    values: tuple[float, ...] | None = None
    """One for each objective; None unless the outcome is `complete`. Always finite."""
    headline: Mapping[str, str | float | int | bool] = field(default_factory=dict)
    """Scalars that become user attributes of their own."""
    telemetry: Mapping[str, Any] = field(default_factory=dict)
    traceback: str | None = None
