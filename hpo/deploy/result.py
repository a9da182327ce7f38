"""The result of a deployment, as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hpo.deploy.timing import Timing
from hpo.evaluation.decision import VerdictName
from hpo.evaluation.record import Interval
from hpo.json_safe import json_safe


@dataclass(frozen=True)
class TaskDrop:
    """The primary metric of a task, and what was lost of it, in points."""

    metric: str
    value: Interval
    drop: Interval


@dataclass(frozen=True)
class Judged:
    """What a form is worth on a split."""

    verdict: VerdictName
    reason: str
    """Why it is not as good, or not known to be."""
    score: Interval | None = None
    """The objective; None: its logits are not finite."""
    drop: Interval | None = None
    """What it has lost of fp32's, in `Deployment.unit`; below 0 it has gained."""
    tasks: Mapping[str, TaskDrop] = field(default_factory=dict)
    baseline: float = math.nan
    """Score of the best constant prediction, in `Deployment.unit`; higher is better."""
    num_rows: int = 0
    """Rows that are labelled for the objective."""


@dataclass(frozen=True)
class DeployedArtifact:
    """One form of the model, scored on validation."""

    artifact: str
    judged: Judged
    weight_bytes: int
    timings: Mapping[int, Timing] = field(default_factory=dict)
    """By the number of texts in a batch."""


@dataclass(frozen=True)
class Confirmation:
    """What the test split, which chose nothing, says of the form that validation chose."""

    num_examples: int
    fp32_score: Interval
    judged: Judged


@dataclass(frozen=True)
class Deployment:
    """The forms of a model, and the one to use."""

    study: str
    trial: int
    num_examples: int
    """Rows of validation that are labelled for the objective."""
    objective: str
    unit: str
    """Of drops: `points` (hundredths), or `label units`."""
    max_drop: float
    batch_size: int
    """That by whose latency the fastest is chosen."""
    num_threads: int
    device: Mapping[str, Any]
    versions: Mapping[str, str]
    artifacts: tuple[DeployedArtifact, ...]
    chosen: int
    """Index in `artifacts` of the fastest that is as good on validation, and not worse on test."""
    test: Confirmation | None
    """None: there is no test split with labels."""
    left_out: Mapping[str, str]
    """Forms that are not there, with the reason."""
    notes: tuple[str, ...] = ()
    """Whole sentences that limit what the numbers say."""

    @property
    def best(self) -> DeployedArtifact:
        return self.artifacts[self.chosen]

    def as_json(self) -> dict[str, Any]:
        """Plain containers; times in milliseconds, sizes in bytes."""
        return dict(json_safe(asdict(self)))
