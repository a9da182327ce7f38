"""The result of a deployment, as plain values."""

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
    """Primary metric of a task and its loss against fp32, in points."""

    metric: str
    value: Interval
    drop: Interval


@dataclass(frozen=True)
class Judged:
    """Score of a form on a split, and the verdict on it."""

    verdict: VerdictName
    reason: str
    """Sentence about a form that is not as good."""
    score: Interval | None = None
    """Value of the objective. None: a logit is not finite."""
    drop: Interval | None = None
    """Loss against fp32 in `Deployment.unit`; below 0 the form is better."""
    tasks: Mapping[str, TaskDrop] = field(default_factory=dict)
    baseline: float = math.nan
    """Score of the best constant prediction in `Deployment.unit`; higher is better."""
    num_rows: int = 0
    """Rows with labels for the objective."""


@dataclass(frozen=True)
class DeployedArtifact:
    """One form of the model, scored on validation."""

    artifact: str
    judged: Judged
    weight_bytes: int
    timings: Mapping[int, Timing] = field(default_factory=dict)
    """Timing for each number of texts in a batch."""


@dataclass(frozen=True)
class Confirmation:
    """Verdict of the test split on the chosen form."""

    num_examples: int
    fp32_score: Interval
    judged: Judged


@dataclass(frozen=True)
class Deployment:
    """The forms of a model, and the chosen one."""

    study: str
    trial: int
    num_examples: int
    """Rows of validation with labels for the objective."""
    objective: str
    unit: str
    """Unit of drops: `points` (hundredths), or `label units`."""
    max_drop: float
    batch_size: int
    """Texts in a batch whose latency decides."""
    num_threads: int
    device: Mapping[str, Any]
    versions: Mapping[str, str]
    artifacts: tuple[DeployedArtifact, ...]
    chosen: int
    """Index in `artifacts` of the fastest form that is as good on validation and not worse on test."""
    test: Confirmation | None
    """None: no test split has labels."""
    left_out: Mapping[str, str]
    """Reason for each form that is missing."""
    notes: tuple[str, ...] = ()
    """Sentences that limit the meaning of the numbers."""

    @property
    def best(self) -> DeployedArtifact:
        return self.artifacts[self.chosen]

    def as_json(self) -> dict[str, Any]:
        """Return plain containers; times in milliseconds, sizes in bytes."""
        return dict(json_safe(asdict(self)))
