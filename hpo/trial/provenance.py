"""Where an exported model comes from: what its hpo.json says of study, trial and data."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hpo
from hpo.config.trial_config import TrialConfig
from hpo.json_safe import json_safe
from hpo.models.encoder import MINILM_HUB_ID
from hpo.trial.executor import Executor
from hpo.versions import installed_versions


@dataclass(frozen=True)
class TrialSource:
    """The trial that a model comes from, as its study recorded it."""

    number: int
    params: Mapping[str, Any] = field(default_factory=dict)
    telemetry: Mapping[str, Any] = field(default_factory=dict)
    detailed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Its stored detailed evaluations by split, as JSON."""


def provenance(executor: Executor, config: TrialConfig, trial: TrialSource) -> dict[str, Any]:
    """The record as plain containers."""
    study = executor.study
    dataset, precision = executor.dataset, trial.telemetry.get("precision", {})
    settings = config.model_dump(mode="json", exclude={"encoder", "amp"}, exclude_none=True)
    scores = {"validation": trial.telemetry.get("metrics"), "test": trial.telemetry.get("test_metrics")}
    for split, document in trial.detailed.items():
        of_tasks = {task: of_task["metrics"] for task, of_task in document["tasks"].items()}
        scores[split] = {
            task: {metric: of["value"] for metric, of in metrics.items()}
            for task, metrics in of_tasks.items()
        }
    record = {
        "study": study.name,
        "trial": trial.number,
        "parameters": {name: value for name, value in trial.params.items() if name != "encoder"},
        "settings": {name: value for name, value in settings.items() if value not in ({}, [])},
        "scores": {split: of_tasks for split, of_tasks in scores.items() if of_tasks},
        "precision": {
            "requested": config.fp_precision,
            **{key: precision.get(key) for key in ("effective", "support", "observed")},
        },
        "data": {"source": study.data.source, "fingerprint": dataset.fingerprint},
        "encoder": encoder_facts(config.encoder, study.model.revision),
        "device": trial.telemetry.get("device", {}).get("name"),
        "versions": {
            "hpo": hpo.__version__,
            "python": platform.python_version(),
            **installed_versions("torch", "transformers", "tokenizers", "safetensors", "numpy"),
        },
    }
    plain: dict[str, Any] = json_safe(record)
    return plain


def encoder_facts(encoder: str | Mapping[str, Any], revision: str | None) -> dict[str, Any]:
    """Name and revision of an encoder; of a folder its name alone, and no path of this machine."""
    if not isinstance(encoder, str):
        return {"name": f"a fresh {encoder.get('model_type')}", "hub_id": None}
    hub_id = MINILM_HUB_ID if encoder == "minilm" else None if Path(encoder).is_dir() else encoder
    return {"name": hub_id or Path(encoder).name, "hub_id": hub_id, "revision": revision}
