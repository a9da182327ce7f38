"""Does this model work under this precision on this device? Asked on a small batch before a trial trains.

    ok            as expected of the precision
    degraded      works, but further from fp32 than the study's bounds, or not everywhere in the precision
    incompatible  not finite, raises, or so far from fp32 that training would mean nothing

What is measured (`hpo.trial.measure`) does not depend on the study's bounds, so it is cached and judged anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers

from hpo.config.study_config import CompatConfig, StudyConfig
from hpo.device import DeviceInfo
from hpo.errors import OutOfMemory
from hpo.json_safe import json_safe
from hpo.memory import is_out_of_memory
from hpo.precision.environment import environment_overrides
from hpo.precision.float8 import float8_advice, no_float8
from hpo.precision.table import PRECISIONS
from hpo.trial.adverse import adverse_batch
from hpo.trial.measure import MEASUREMENT_VERSION, Measurement, measure
from hpo.trial.trial_parts import TrialParts


@dataclass(frozen=True)
class Compatibility:
    """A measurement judged by a study's bounds."""

    verdict: str
    """ok, degraded, incompatible or skipped."""
    reasons: tuple[str, ...]
    measurement: Measurement
    cached: bool = False
    known: tuple[str, ...] = ()
    """What the family of the encoder is known for under the precision; asked for by `hpo verify`."""

    def telemetry(self) -> dict[str, Any]:
        """One record, with the entries of the measurement."""
        verdict = {"verdict": self.verdict, "reasons": self.reasons, "cached": self.cached}
        return verdict | asdict(self.measurement)


def judge(measurement: Measurement, bounds: CompatConfig, *, cached: bool = False) -> Compatibility:
    """The verdict on a measurement under a study's bounds, with every reason for it."""
    incompatible: list[str] = []
    degraded: list[str] = []
    name = measurement.precision
    if measurement.error:
        incompatible.append(f"{name} raised {measurement.error}")
    elif not measurement.finite:
        where = measurement.first_nonfinite_module
        also = "" if measurement.reference_finite else ", and so in fp32"
        culprit = f"; the first module that made them so is {where}" if where else ""
        incompatible.append(f"{measurement.nonfinite} not finite under {name}{also}{culprit}.")
    for task, error in measurement.logits_relative_error.items():
        is_degraded = error <= bounds.incompatible_logits_relative_error
        bound = (
            bounds.degraded_logits_relative_error
            if is_degraded
            else bounds.incompatible_logits_relative_error
        )
        if error > bound:
            reason = f"logits of {task} are {error:.3g} away from fp32's (relative), more than {bound:g}."
            (degraded if is_degraded else incompatible).append(reason)
    cosine = measurement.gradient_cosine
    if cosine is not None:
        is_degraded = cosine >= bounds.incompatible_gradient_cosine
        bound = bounds.degraded_gradient_cosine if is_degraded else bounds.incompatible_gradient_cosine
        if cosine < bound:
            reason = f"gradients differ from fp32's: cosine {cosine:.3f}, under {bound:g}."
            (degraded if is_degraded else incompatible).append(reason)
    is_float8 = PRECISIONS[name].float8 and not measurement.error
    if is_float8 and (none := no_float8(measurement.observed)):
        incompatible.append(none)
    elif measurement.disagreement:
        degraded.append(measurement.disagreement)
    if is_float8 and not incompatible:
        degraded += float8_advice(measurement.observed)
    verdict = "incompatible" if incompatible else "degraded" if degraded else "ok"
    reasons = incompatible + degraded
    if measurement.unmeasured:
        reasons.append(measurement.unmeasured)
    if not measurement.reference_fits:
        reasons.append(
            f"fp32 does not fit into memory here, so of {name} only that it is finite was checked."
        )
    if measurement.longest_alone:
        done = "compared with fp32" if measurement.reference_fits else "checked"
        reasons.append(
            "The longest text does not fit into memory here with very short ones beside it, so "
            f"{name} was {done} on the longest alone."
        )
    return Compatibility(verdict, tuple(reasons), measurement, cached)


class CompatibilityCache(Protocol):
    """Where compatibility measurements are kept between trials and workers: `hpo.study.storage.Storage`."""

    def get_compat(self, key: str) -> Mapping[str, Any] | None: ...

    def put_compat(self, key: str, result: Mapping[str, Any]) -> Mapping[str, Any]: ...


def check_compatibility(
    parts: TrialParts,
    study: StudyConfig,
    fingerprint: str,
    device: DeviceInfo,
    cache: CompatibilityCache | None,
) -> Compatibility:
    """The verdict on a trial's precision, measured unless the cache has it. `fingerprint` is the data's.

    Raises OutOfMemory when not even one example fits into memory under the precision.
    """
    bounds = study.compat
    if not bounds.enabled:
        return Compatibility("skipped", (), Measurement(parts.resolution.effective))
    key = cache_key(parts, study, fingerprint, device)
    cached = cache.get_compat(key) if cache else None
    if cached is not None:
        return judge(Measurement(**cached), bounds, cached=True)
    measurement = measure_parts(parts, device)
    # What another worker with more memory would measure is not known here.
    if cache and measurement.reference_fits and not measurement.longest_alone:
        cache.put_compat(key, json_safe(asdict(measurement)))
    return judge(measurement, bounds)


def measure_parts(
    parts: TrialParts,
    device: DeviceInfo,
    repeats: int = 0,
    on_estimate: Callable[[float], None] = lambda _: None,
) -> Measurement:
    """Measure on the longest window of the data beside very short ones, which are nearly all padding.

    Where these do not fit into memory (the precision's pass or fp32's), measure on the longest alone
    (`longest_alone`). Raises OutOfMemory when the precision fits neither.
    """
    without_reference = None
    for batch, is_alone in ((adverse_batch(parts), False), (parts.batch(0, 1), True)):
        try:
            found = measure(parts, batch, device, repeats, on_estimate)
            found = replace(found, longest_alone=is_alone)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            continue
        if found.reference_fits:
            return found
        without_reference = without_reference or found
    if without_reference is not None:
        return without_reference
    longest = parts.train_split.lengths_W.max()
    raise OutOfMemory(f"one example of {longest} tokens does not fit into memory.")


def checked_on(device: DeviceInfo) -> str:
    """What a result speaks for: this kind of device, with these versions of what computes on it.

    A result of one kind says nothing of another, nor one under variables that take instructions away.
    """
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    versions["cuda"] = device.cuda_version or ""
    if device.has_torchao:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # of a device that is described
            versions["torchao"] = importlib.metadata.version("torchao")
    told = [f"{name} {version}" for name, version in versions.items() if version]
    told += [f"{name}={value}" for name, value in environment_overrides().items()]
    return ", ".join([device.kind, *told])


def cache_key(parts: TrialParts, study: StudyConfig, fingerprint: str, device: DeviceInfo) -> str:
    """A hash of all that the check's measurements depend on."""
    config, data = parts.config, study.data
    settings = {
        "version": MEASUREMENT_VERSION,
        "encoder": config.encoder,
        "revision": study.model.revision,
        "tasks": [repr(task) for task in parts.loss_fn.tasks],
        "weights": _files_of(config.encoder),
        "frozen": config.freeze_layers,
        "cuts": [data.long_text, data.stride_of(config.max_length), data.pair_segments],
        "heads": [config.pooling, config.head_type, config.head_hidden_size, config.loss_weighting],
        "loss": [config.loss, config.label_smoothing, config.focal_gamma, config.class_weighting],
        "loss_weight": config.loss_weight,
        "max_length": config.max_length,
        # Attention with dropout has another kernel than without, whatever the rate.
        "attention": [config.attention, config.attention_dropout and "dropout"],
        "gradient_checkpointing": config.gradient_checkpointing,
        "precision": [parts.resolution.effective, config.float32_parts],
        "amp": [config.amp.init_scale, config.amp.backoff_factor, config.amp.min_scale, config.amp.tf32],
        "compile": [config.compile, config.compile_scope, config.compile_dynamic],
        "checked_on": checked_on(device),
        "data": fingerprint,
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def _files_of(encoder: str | Mapping[str, Any]) -> list[tuple[str, int, int]] | None:
    """Names, sizes and times of a local encoder's files: its weights may change under the same name."""
    if not isinstance(encoder, str) or not Path(encoder).is_dir():
        return None
    files = (path for path in Path(encoder).iterdir() if path.is_file())
    return sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files)
