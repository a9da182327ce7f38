"""What a trial has come to so far, and the record that it becomes, whole or not.

The executor fills in a `TrialRecorder` while the trial runs. However the trial ends, what is there by then is
stored: a trial that was pruned or ran out of memory has its throughput and its precision facts too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
import transformers

from hpo.device import DeviceInfo, Utilization, memory_limit
from hpo.json_safe import json_safe
from hpo.memory import PeakMemory
from hpo.outcome import Outcome
from hpo.precision.amp import MixedPrecision
from hpo.precision.table import Resolution
from hpo.training.compilation import CompileClock
from hpo.training.decoding import DecodingThresholds
from hpo.training.evaluate import Evaluation
from hpo.training.loop import TrainState
from hpo.training.throughput import ThroughputMeter, peak_flops
from hpo.trial.compat import Compatibility


@dataclass(frozen=True)
class ScoredEvaluation:
    """An evaluation with the study's objective values for it."""

    evaluation: Evaluation
    values: tuple[float, ...]

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


@dataclass
class TrialRecorder:
    """The facts of one running trial. None: not known yet."""

    device: DeviceInfo
    shared_device: bool
    memory_fraction: float | None = None
    """Of a GPU's memory, that the process may take; None: all of it."""
    started: float = field(default_factory=time.perf_counter)
    setup_seconds: float | None = None
    """From the start to the first training step, in this process."""
    compile_seconds: float | None = None
    """Before the first training step."""
    compile_clock: CompileClock = field(default_factory=CompileClock)
    """What was compiled later."""
    precision: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    """How many training texts were cut and true spans lost by `max_length`."""
    compatibility: Compatibility | None = None
    progress: TrainState | None = None
    resumed_from_step: int | None = None
    meter: ThroughputMeter | None = None
    mixed_precision: MixedPrecision | None = None
    utilization: Utilization | None = None
    memory: PeakMemory | None = None
    best: ScoredEvaluation | None = None
    evaluation_rates: list[float] = field(default_factory=list)
    """Examples per second of each evaluation."""
    flops: Callable[[int, int], float | None] | None = None
    """Of training over so many tokens in so many windows."""

    def reset_memory(self) -> None:
        """Begin to measure the peak of memory here."""
        self.memory = self.memory or PeakMemory(self.device)
        self.memory.reset()

    def resolved(self, resolution: Resolution) -> None:
        """Note which precision runs."""
        self.precision = {
            "requested": resolution.requested,
            "effective": resolution.effective,
            "support": resolution.support,
            "fell_back": resolution.fell_back,
            "reason": resolution.reason,
        }

    def observed(self, observed: Mapping[str, Any], disagreement: str) -> None:
        """Note what was seen of it, and why that is not the precision (empty: it is)."""
        self.precision |= {
            "observed": dict(observed),
            "agrees": not disagreement,
            "reason": " ".join(filter(None, (self.precision["reason"], disagreement))),
        }

    def result(
        self, outcome: Outcome, reason: str, values: tuple[float, ...] | None, traceback: str | None
    ) -> TrialResult:
        """The trial's end with everything that it stores."""
        telemetry = json_safe(self._telemetry())
        throughput = telemetry.get("throughput", {})
        headline = {
            "fp_precision_effective": self.precision.get("effective"),
            "train_examples_per_second": throughput.get("train_examples_per_second"),
            "train_tokens_per_second": throughput.get("train_tokens_per_second"),
            "peak_memory_bytes": telemetry.get("peak_memory_bytes"),
        }
        known = {key: value for key, value in headline.items() if value is not None}
        return TrialResult(outcome, reason, values, known, telemetry, traceback)

    def _telemetry(self) -> dict[str, Any]:
        telemetry: dict[str, Any] = {
            "device": self._device(),
            "precision": self.precision,
            "data": self.data,
            "total_seconds": time.perf_counter() - self.started,
        }
        optional = {
            "compatibility": self.compatibility and self.compatibility.telemetry(),
            "peak_memory_bytes": self.memory and self.memory.read(),
            "setup_seconds": self.setup_seconds,
            "compile_seconds": self.compile_seconds and self.compile_seconds + self.compile_clock.seconds,
            "resumed_from_step": self.resumed_from_step,
        }
        telemetry |= {key: value for key, value in optional.items() if value is not None}
        if self.best is not None:
            evaluation = self.best.evaluation
            telemetry |= {
                "metrics": evaluation.metrics,
                "decisions": {name: asdict(decision) for name, decision in evaluation.decisions.items()},
                "best_step": evaluation.step,
            }
        if self.progress and self.meter and self.mixed_precision:
            telemetry |= self._training(self.progress, self.meter, self.mixed_precision)
        return telemetry

    def _device(self) -> dict[str, Any]:
        capability = self.device.compute_capability
        return {
            "type": self.device.type,
            "name": self.device.name,
            "compute_capability": None if capability is None else f"{capability[0]}.{capability[1]}",
            "cpu_features": sorted(self.device.cpu_features) if self.device.type == "cpu" else None,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "cuda": self.device.cuda_version,
            "num_threads": torch.get_num_threads(),
            "host": self.device.host,
            "shared": self.shared_device,
            "memory_fraction": self.memory_fraction if self.device.type == "cuda" else None,
            "memory_limit_bytes": memory_limit(self.device, self.memory_fraction),
        }

    def _training(
        self, progress: TrainState, meter: ThroughputMeter, mixed_precision: MixedPrecision
    ) -> dict[str, Any]:
        statistics = mixed_precision.statistics()
        rates = self.evaluation_rates
        return {
            "throughput": meter.summary()
            | {"evaluation_examples_per_second": float(np.median(rates)) if rates else None},
            "scaler": {
                "scale_min": statistics.scale_min,
                "scale_mean": statistics.scale_mean,
                "scale_max": statistics.scale_max,
                "skipped_steps": statistics.skipped_steps,
            },
            "fp32_fallbacks": statistics.fp32_fallbacks,
            "micro_batch_size": progress.micro_batch_size,
            "oom_halvings": progress.oom_halvings,
            "num_steps": progress.step,
            "num_examples": round(progress.num_examples),
            "num_tokens": progress.num_tokens,
            "train_seconds": progress.train_seconds,
            "evaluation_seconds": progress.evaluation_seconds,
            "device_utilization": self.utilization and self.utilization.read(),
            "model_flops_utilization": self._flops_utilization(meter, mixed_precision),
        }

    def _flops_utilization(self, meter: ThroughputMeter, mixed_precision: MixedPrecision) -> float | None:
        """Model FLOP/s over the data sheet's peak for the precision's products; None where unknown."""
        precision = mixed_precision.precision
        kind = "float8" if precision.float8 else "tf32" if precision.tf32 else precision.linear_dtype
        peak = peak_flops(self.device, kind)
        seconds = meter.measured_seconds
        if peak is None or self.flops is None or not seconds:
            return None
        flops = self.flops(meter.measured_tokens, meter.measured_windows)
        return None if flops is None else flops / seconds / peak


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
