"""The facts of a trial, and the record that they become however the trial ends.

Each part of a trial returns its facts: a small frozen dataclass whose `telemetry()` gives its share of the
record. A `TrialRecorder` holds those that are known so far. `telemetry()` is read when the record is made, so
a trial that was pruned or ran out of memory has its throughput and its precision facts too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import transformers

from hpo.data.tokenized_split import TokenizedSplit
from hpo.device import DeviceInfo, Utilization, memory_limit
from hpo.json_safe import json_safe
from hpo.memory import PeakMemory
from hpo.models.multitask import MultitaskModel
from hpo.outcome import Outcome
from hpo.precision.amp import MixedPrecision
from hpo.precision.table import Resolution
from hpo.training.compilation import CompileClock
from hpo.training.decoding import DecodingThresholds
from hpo.training.evaluate import Evaluation
from hpo.training.loop import TrainState
from hpo.training.throughput import ThroughputMeter, peak_flops, training_flops


class Facts(Protocol):
    """A part of what is known about a trial."""

    def telemetry(self) -> dict[str, Any]:
        """Its entries of the record."""
        ...


@dataclass(frozen=True)
class DeviceFacts:
    """Where the trial runs."""

    device: DeviceInfo
    shared: bool
    memory_fraction: float | None
    """The share of a GPU's memory that the process may take; None: all of it."""

    def telemetry(self) -> dict[str, Any]:
        capability = self.device.compute_capability
        record = {
            "type": self.device.type,
            "name": self.device.name,
            "compute_capability": None if capability is None else f"{capability[0]}.{capability[1]}",
            "cpu_features": sorted(self.device.cpu_features) if self.device.type == "cpu" else None,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "cuda": self.device.cuda_version,
            "num_threads": torch.get_num_threads(),
            "host": self.device.host,
            "shared": self.shared,
            "memory_fraction": self.memory_fraction if self.device.type == "cuda" else None,
            "memory_limit_bytes": memory_limit(self.device, self.memory_fraction),
        }
        return {"device": record}


@dataclass(frozen=True)
class PrecisionFacts:
    """The precision that was asked for, the one that runs, and the one that was observed."""

    requested: str
    support: str
    resolution: Resolution | None = None
    """None: not resolved."""
    observed: Mapping[str, Any] | None = None
    """None: not observed."""
    disagreement: str = ""
    """Why the observed precision is not the one that should run; empty: it is."""

    def telemetry(self) -> dict[str, Any]:
        record: dict[str, Any] = {"requested": self.requested, "effective": None, "support": self.support}
        if self.resolution is not None:
            record |= asdict(self.resolution) | {"fell_back": self.resolution.fell_back}
        if self.observed is not None:
            record |= {
                "observed": dict(self.observed),
                "agrees": not self.disagreement,
                "reason": " ".join(filter(None, (record["reason"], self.disagreement))),
            }
        return {"precision": record}


@dataclass(frozen=True)
class DataFacts:
    """How many training texts were cut, and how many true spans were lost, by `max_length`."""

    split: TokenizedSplit

    def telemetry(self) -> dict[str, Any]:
        record = {
            "num_examples": len(self.split.examples),
            "num_cut_examples": self.split.num_cut_examples,
            "num_lost_spans": dict(self.split.num_lost_spans or {}),
        }
        return {"data": record}


@dataclass(frozen=True)
class MemoryFacts:
    """The peak of memory since the last reset, read when the record is made."""

    peak: PeakMemory

    def telemetry(self) -> dict[str, Any]:
        return {"peak_memory_bytes": self.peak.read()}


@dataclass(frozen=True)
class SetupFacts:
    """The time from the trial's start to its first training step, in this process."""

    seconds: float
    resumed_from_step: int | None

    def telemetry(self) -> dict[str, Any]:
        resumed = self.resumed_from_step
        return {"setup_seconds": self.seconds} | ({} if resumed is None else {"resumed_from_step": resumed})


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
    """What the training has come to, read when the record is made."""

    model: MultitaskModel
    mixed_precision: MixedPrecision
    state: TrainState
    meter: ThroughputMeter
    utilization: Utilization
    evaluation_rates: Sequence[float]
    """Examples per second of each evaluation."""

    def telemetry(self) -> dict[str, Any]:
        state, statistics, rates = self.state, self.mixed_precision.statistics(), self.evaluation_rates
        return {
            "throughput": self.meter.summary()
            | {"evaluation_examples_per_second": float(np.median(rates)) if rates else None},
            "scaler": {
                "scale_min": statistics.scale_min,
                "scale_mean": statistics.scale_mean,
                "scale_max": statistics.scale_max,
                "skipped_steps": statistics.skipped_steps,
            },
            "fp32_fallbacks": statistics.fp32_fallbacks,
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
        seconds = self.meter.measured_seconds
        if peak is None or not seconds:
            return None
        flops = training_flops(self.model, self.meter.measured_tokens, self.meter.measured_windows)
        return None if flops is None else flops / seconds / peak


class TrialRecorder:
    """The facts of one running trial. Of two facts of one kind the later replaces the earlier."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self._facts: dict[type, Facts] = {}

    def note(self, facts: Facts) -> None:
        self._facts[type(facts)] = facts

    def telemetry(self) -> dict[str, Any]:
        """What all facts come to now."""
        record: dict[str, Any] = {"total_seconds": time.perf_counter() - self.started}
        for facts in self._facts.values():
            record |= facts.telemetry()
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
