"""The check before a trial: does this model work under this precision on this device?

    ok            as expected of the precision
    degraded      works, but further from fp32 than the study's bounds, or not everywhere in the precision
    incompatible  not finite, raises, or so far from fp32 that training would mean nothing
    unverified    two equal passes in fp32 differ, so nothing is known for or against the precision
    invalid       fp32 is not finite or raises, too, or does not fit into memory: nothing is known against
                  the precision

The measurement (`hpo.trial.measure`) does not depend on the study's bounds, so it is cached and judged anew.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers

from hpo.config.sections import CompatConfig
from hpo.device import DeviceInfo
from hpo.errors import OutOfMemory
from hpo.json_safe import json_safe
from hpo.memory import is_out_of_memory
from hpo.precision.amp import reduced_precision_reduction
from hpo.precision.environment import environment_overrides
from hpo.precision.float8 import NEEDS_COMPILE, no_float8
from hpo.precision.observation import UNVERIFIED, some
from hpo.precision.table import PRECISIONS
from hpo.trial.costs import Costs
from hpo.trial.measure import MEASUREMENT_VERSION, Measurement, measure
from hpo.trial.parts import TrialParts
from hpo.versions import installed_versions

NOT_REPEATED = (
    "two equal passes in fp32 differ, so the errors say nothing of {}. The model or the loss draws random "
    "numbers that hpo cannot seed, or keeps a state. Use the generators of PyTorch, NumPy or Python."
)
NOT_OF_PRECISION = "The fault is in the model, its settings or the data, not in the precision."


@dataclass(frozen=True)
class Compatibility:
    """A measurement judged by a study's bounds."""

    verdict: str
    """ok, degraded, incompatible, unverified, invalid or skipped."""
    reasons: tuple[str, ...]
    measurement: Measurement
    cached: bool = False
    costs: Costs | None = None
    """None: not measured, as in the check of a trial."""

    def __str__(self) -> str:
        """Return the verdict, the measurement and the reasons, a line each."""
        measured = self.measurement
        lines = [f"{measured.precision}: {self.verdict}"]
        errors = measured.logits_relative_error.items()
        lines += [f"{name}: {error:.2g} away from fp32 (relative)" for name, error in errors]
        if measured.gradient_cosine is not None:
            lines.append(f"gradients: cosine to fp32's {measured.gradient_cosine:.5f}")
        if measured.first_nonfinite:
            lines.append(f"first not finite: {measured.first_nonfinite}")
        if products := measured.observed.get("linear_products"):
            counts = (f"{kind} with {num} weights" for kind, num in products.items())
            lines.append(f"products: {', '.join(counts)}")
        if costs := self.costs:
            memory = "" if costs.memory_ratio is None else f", {costs.memory_ratio:.2f} of its memory"
            lines.append(f"{costs.speed_ratio:.2f} times as fast as fp32{memory}")
        return "\n".join([*lines, *self.reasons])

    def telemetry(self) -> dict[str, Any]:
        """Return one record, with the entries of the measurement."""
        verdict = {"verdict": self.verdict, "reasons": self.reasons, "cached": self.cached}
        return verdict | asdict(self.measurement)


def judge(measurement: Measurement, bounds: CompatConfig, *, cached: bool = False) -> Compatibility:
    """Return the verdict on a measurement under a study's bounds, with every reason for it."""
    incompatible: list[str] = []
    degraded: list[str] = []
    name = measurement.precision
    where = measurement.first_nonfinite_module
    culprit = f"; the first module that made them so is {where}" if where else ""
    if not measurement.reference_finite:
        broken = f"{measurement.nonfinite} not finite in fp32{culprit}"
        fault = f"fp32 raised {measurement.error}" if measurement.error else broken
        return Compatibility("invalid", (f"{fault.rstrip('.')}.", NOT_OF_PRECISION), measurement, cached)
    if not measurement.reference_repeats and not measurement.error:
        reasons = [NOT_REPEATED.format(name), measurement.disagreement]
        return Compatibility("unverified", tuple(filter(None, reasons)), measurement, cached)
    if measurement.error:
        kept = measurement.float32_buffers
        buffers = f"; buffers in fp32: {some(kept)}" if kept else ""
        incompatible.append(f"{name} raised {measurement.error}{buffers}")
    elif not measurement.finite:
        incompatible.append(f"{measurement.nonfinite} not finite under {name}{culprit}.")
    if incompatible and not measurement.reference_fits:
        unknown = f"fp32 does not fit into memory here, so it is not known whether {name} is at fault."
        return Compatibility("invalid", (*incompatible, unknown), measurement, cached)
    most = (bounds.incompatible_logits_relative_error, bounds.degraded_logits_relative_error)
    for task, error in measurement.logits_relative_error.items():
        for reasons, bound in zip((incompatible, degraded), most, strict=True):
            if error > bound:
                away = f"{error:.3g} away from fp32's (relative), more than {bound:g}"
                reasons.append(f"logits of {task} are {away}.")
                break
    least = (bounds.incompatible_gradient_cosine, bounds.degraded_gradient_cosine)
    if (cosine := measurement.gradient_cosine) is not None:
        for reasons, bound in zip((incompatible, degraded), least, strict=True):
            if cosine < bound:
                reasons.append(f"gradients differ from fp32's: cosine {cosine:.3f}, under {bound:g}.")
                break
    lost = {
        one: share
        for one, share in measurement.gradient_shares.items()
        if share < bounds.degraded_gradient_share
    }
    if lost:
        shares = ", ".join(f"{share:.0%} of {one}" for one, share in lost.items())
        degraded.append(f"gradients are smaller than fp32's: {shares} left.")
    is_float8 = PRECISIONS[name].float8 and not measurement.error
    if is_float8 and (none := no_float8(measurement.observed)):
        incompatible.append(none)
    elif measurement.agrees is False:
        degraded.append(measurement.disagreement)
    if is_float8 and not incompatible and not measurement.observed.get("compiled"):
        degraded.append(NEEDS_COMPILE)
    verdict = "incompatible" if incompatible else "degraded" if degraded else "ok"
    reasons = incompatible + degraded
    if measurement.agrees is None and measurement.disagreement:
        reasons.append(f"{UNVERIFIED}: {measurement.disagreement}")
    if not measurement.reference_fits:
        reasons.append(f"fp32 does not fit into memory here, so {name} was only checked for finite numbers.")
    return Compatibility(verdict, tuple(reasons), measurement, cached)


class CompatibilityCache(Protocol):
    """Keeps measurements between trials and workers: `hpo.study.store.storage.Storage`."""

    def get_compat(self, key: str) -> Mapping[str, Any] | None: ...

    def put_compat(self, key: str, result: Mapping[str, Any]) -> Mapping[str, Any]: ...


def check_compatibility(parts: TrialParts, cache: CompatibilityCache | None) -> Compatibility:
    """Return the verdict on a trial's precision, measured unless the cache has it.

    Raises OutOfMemory if not even one example fits into memory under the precision.
    """
    bounds = parts.study.compat
    if not bounds.enabled:
        return Compatibility("skipped", (), Measurement(parts.resolution.effective))
    key = cache_key(parts)
    cached = cache.get_compat(key) if cache else None
    if cached is not None:
        return judge(Measurement(**cached), bounds, cached=True)
    measurement = measure_parts(parts)
    if cache and measurement.reference_fits:  # else a worker with more memory knows more
        cache.put_compat(key, json_safe(asdict(measurement)))
    return judge(measurement, bounds)


def measure_parts(parts: TrialParts) -> Measurement:
    """Measure on the longest window of the data and the two shortest, which are nearly all padding.

    If these do not fit into memory (under the precision or in fp32), measure on the longest alone. Raises
    OutOfMemory if the precision does not fit with it either.
    """
    measurement = None
    for batch in (parts.batch(2, 1), parts.batch(0, 1)):
        try:
            measurement = measure(parts, batch)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        if measurement and measurement.reference_fits:
            break
    if measurement is None:
        longest = parts.data.train.lengths_W.max()
        raise OutOfMemory(f"one example of {longest} tokens does not fit into memory.")
    return measurement


def checked_on(device: DeviceInfo) -> str:
    """Return the conditions of a result: kind of device, versions, and variables that disable instructions.

    A result says nothing about other conditions.
    """
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    versions |= {"cuda": device.cuda_version or "", "rocm": device.rocm_version or ""}
    versions |= installed_versions("torchao") if device.has_torchao else {}
    conditions = [f"{name} {version}" for name, version in versions.items() if version]
    conditions += [f"{name}={value}" for name, value in environment_overrides().items()]
    return ", ".join([device.kind, *conditions])


MEASURED_SETTINGS = (
    *("encoder", "max_length", "gradient_checkpointing", "freeze_layers", "option"),
    *("adapter", "lora_rank", "lora_alpha", "lora_targets", "compile", "compile_scope", "fp32_parts"),
    *("pooling", "head_type", "head_types", "head_hidden_size"),
    *("loss", "loss_weight", "loss_weighting", "label_smoothing", "focal_gamma", "class_weighting"),
)
"""The settings of a trial that change its measurement."""


def cache_key(parts: TrialParts) -> str:
    """Return a hash of all conditions of the check's measurements."""
    study, config, data = parts.study, parts.config, parts.study.data
    conditions = {
        "version": MEASUREMENT_VERSION,
        "settings": {name: getattr(config, name) for name in MEASURED_SETTINGS},
        # Attention with dropout has another kernel than without, whatever the rate.
        "attention": [config.attention, config.attention_dropout and "dropout"],
        "code": sorted(study.code.values()),
        "encoder": [study.model.revision, _files_of(config.encoder)],
        "tasks": [repr(task) for task in parts.loss_fn.tasks],
        "cuts": [data.long_text, data.stride_of(config.max_length), data.pair],
        "precision": [parts.resolution.effective, parts.resolution.base],
        "amp": [config.amp.init_scale, config.amp.backoff_factor, config.amp.min_scale, config.amp.tf32],
        "reduced_precision_reduction": reduced_precision_reduction(),
        "checked_on": checked_on(parts.device),
        "data": parts.dataset.fingerprint,
    }
    return hashlib.sha256(json.dumps(conditions, sort_keys=True, default=str).encode()).hexdigest()


def _files_of(encoder: str | Mapping[str, Any]) -> list[tuple[str, int, int]] | None:
    """Return names, sizes and times of a local encoder's files: they may change under the same name."""
    if not isinstance(encoder, str) or not Path(encoder).is_dir():
        return None
    files = (path for path in Path(encoder).iterdir() if path.is_file())
    return sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files)
