"""What turns the scores of a task into predictions. It is stored with a model, and read without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DecodingThresholds:
    """What turns a task's scores into predictions; a kind uses what it needs and ignores the rest.

    `threshold`: multi_label and span_per_label predict what has a probability above it.
    `null_offset`: span_extraction answers when the answer's logits exceed those of no answer by more.
    `merge_gap`: span_per_label joins two runs with at most so many tokens between them.
    """

    threshold: float = 0.5
    null_offset: float = 0.0
    merge_gap: int = 0
