"""What a deployment has found, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hpo.deploy.artifacts import Artifact
from hpo.deploy.float_layers import FloatLayers
from hpo.deploy.timing import Timing
from hpo.evaluation.intervals import Interval
from hpo.json_safe import json_safe
from hpo.non_inferiority import VerdictName


@dataclass(frozen=True)
class DeployedArtifact:
    """One artifact of one trial's model."""

    trial: int
    artifact: Artifact
    folder: str
    """Its name among the artifacts."""
    verdict: VerdictName
    """On the drops from its own fp32 and from the best trial's: the worse of both."""
    reason: str
    """Why it is not as good, or not known to be; and what became of mending it."""
    weight_bytes: int
    folder_bytes: int
    score: Interval | None = None
    """The objective on the split; None: its logits are not finite."""
    drop: Interval | None = None
    """What it has lost of its own fp32's, in `Deployment.unit`; below 0 it has gained."""
    behind_best: Interval | None = None
    """Likewise of the fp32 of the best trial."""
    largest_change: float | None = None
    """Of any probability of a class or tag of a text; None: no task has probabilities, or not finite."""
    batch_change: float | None = None
    """Likewise between texts that are predicted alone, as those of the score are, and in the batches of
    `predict`; None also where the batch changes nothing but rounding."""
    metrics: Mapping[str, Mapping[str, Interval]] = field(default_factory=dict)
    """{task: {metric: ...}}, values as in an evaluation."""
    task_drops: Mapping[str, Interval] = field(default_factory=dict)
    """In the primary metric of each task, in points."""
    timings: Mapping[int, Timing] = field(default_factory=dict)
    """By the number of texts in a batch."""
    mended: FloatLayers | None = None
    """How the layers that stay in float were found."""


@dataclass(frozen=True)
class Deployment:
    """All artifacts of the best trials of a study, and the one to use."""

    study: str
    split: str
    num_examples: int
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
    """Index in `artifacts` of the fastest that is as good."""
    left_out: Mapping[str, str]
    """Artifacts that are not there, with the reason."""
    notes: tuple[str, ...] = ()
    """Whole sentences that limit what the numbers say."""

    @property
    def best(self) -> DeployedArtifact:
        """The artifact to use."""
        return self.artifacts[self.chosen]

    def as_json(self) -> dict[str, Any]:
        """Plain containers; times in milliseconds, sizes in bytes."""
        rows = []
        for found in self.artifacts:
            row = asdict(found)
            artifact = row.pop("artifact")
            rows.append(
                {
                    "trial": found.trial,
                    "artifact": artifact["name"],
                    "float_layers": list(artifact["keep_float"]),
                    **row,
                }
            )
        return dict(json_safe({**asdict(self), "artifacts": rows}))
