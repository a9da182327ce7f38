"""The compatibility check of a trial: its batches, and the key under which its result is cached."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers

from hpo.config.study_config import StudyConfig
from hpo.device import DeviceInfo
from hpo.errors import OutOfMemory
from hpo.json_safe import json_safe
from hpo.memory import is_out_of_memory
from hpo.trial.compat import MEASUREMENT_VERSION, Compatibility, Measurement, judge, measure
from hpo.trial.trial_parts import TrialParts


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
    if cache and measurement.reference_fits:
        cache.put_compat(key, json_safe(asdict(measurement)))
    return judge(measurement, bounds)


def measure_parts(
    parts: TrialParts,
    device: DeviceInfo,
    repeats: int = 0,
    on_estimate: Callable[[float], None] = lambda _: None,
) -> Measurement:
    """Measure on the longest and the shortest window of the data, so that one of them is padded.

    Where these do not fit into memory (the precision's pass or fp32's), measure on the longest alone. Raises
    OutOfMemory when the precision fits neither.
    """
    without_reference = None
    precision, amp = parts.resolution.precision, parts.config.amp
    for batch in (parts.batch(1, 1), parts.batch(0, 1)):
        try:
            found = measure(
                parts.model, batch, parts.loss_fn, precision, amp, device, parts.compile, repeats, on_estimate
            )
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


def cache_key(parts: TrialParts, study: StudyConfig, fingerprint: str, device: DeviceInfo) -> str:
    """A hash of all that the check's measurements depend on."""
    config = parts.config
    settings = {
        "version": MEASUREMENT_VERSION,
        "encoder": config.encoder,
        "revision": study.model.revision,
        "tasks": [repr(task) for task in parts.loss_fn.tasks],
        "weights": _files_of(config.encoder),
        "frozen": config.freeze_layers,
        "cuts": [
            study.data.long_text,
            study.data.stride_of(parts.config.max_length),
            study.data.pair_segments,
        ],
        "heads": [config.pooling, config.head_type, config.head_hidden_size, config.loss_weighting],
        "loss": [config.loss, config.label_smoothing, config.focal_gamma, config.class_weighting],
        "loss_weight": config.loss_weight,
        "max_length": config.max_length,
        # Attention with dropout has another kernel than without, whatever the rate.
        "attention": [config.attention, config.attention_dropout and "dropout"],
        "gradient_checkpointing": config.gradient_checkpointing,
        "precision": parts.resolution.effective,
        "amp": [config.amp.init_scale, config.amp.backoff_factor, config.amp.min_scale, config.amp.tf32],
        "compile": [config.compile, config.compile_scope, config.compile_dynamic],
        "device": [device.name, device.compute_capability, sorted(device.cpu_features)],
        "versions": [torch.__version__, transformers.__version__, device.cuda_version],
        "data": fingerprint,
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def _files_of(encoder: str | Mapping[str, Any]) -> list[tuple[str, int, int]] | None:
    """Names, sizes and times of a local encoder's files: its weights may change under the same name."""
    if not isinstance(encoder, str) or not Path(encoder).is_dir():
        return None
    files = (path for path in Path(encoder).iterdir() if path.is_file())
    return sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files)
