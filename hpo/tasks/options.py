"""Settings of a task's loss, and thresholds that turn its scores into predictions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpo.extensions import options_of
from hpo.section import Section


@dataclass(frozen=True)
class LossOptions:
    """A trial's loss settings, shared by its tasks.

    `label_smoothing` in [0, 1) moves that share of a target to the uniform distribution over classes
    (over positions in span_extraction, over {0, 1} for binary targets); regression has none.
    `focal_gamma` >= 0 matters to the loss `focal` alone; 0 makes it cross-entropy.
    """

    loss: str = "auto"
    label_smoothing: float = 0.0
    focal_gamma: float = 2.0
    option: Mapping[str, Any] = field(default_factory=dict)
    """Options of kinds and losses from the study's own code."""

    @property
    def gamma(self) -> float:
        """0 for every loss but `focal`."""
        return self.focal_gamma if self.loss == "focal" else 0.0

    def of(self, name: str) -> Section:
        """Return the options of a kind or loss of the study's own code."""
        return options_of(name, self.option)


@dataclass(frozen=True)
class DecodingThresholds:
    """Thresholds that turn a task's scores into predictions. They are stored with a model.

    A kind uses the thresholds that it needs and ignores the rest.

    `threshold`: multi_label and span_per_label predict classes with a probability above it.
    `null_offset`: span_extraction answers when the answer's logits exceed those of no answer by more.
    `merge_gap`: span_per_label joins two runs with at most so many tokens between them.
    """

    threshold: float = 0.5
    null_offset: float = 0.0
    merge_gap: int = 0
