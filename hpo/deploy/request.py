"""What `hpo deploy` is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpo.deploy.artifacts import NAMES
from hpo.deploy.float_layers import SearchLimits
from hpo.deploy.timing import Effort


@dataclass(frozen=True)
class DeploymentRequest:
    """What is asked for."""

    names: tuple[str, ...] = NAMES
    """Of the artifacts; fp32 is always there."""
    split: str = "test"
    max_drop: float = 1.0
    """More is refused: in points, of mae and rmse in the labels' units."""
    batch_size: int = 1
    """That whose latency decides, one of `timing.BATCH_SIZES`."""
    effort: Effort = field(default_factory=Effort)
    limits: SearchLimits = field(default_factory=SearchLimits)
