"""The kinds whose truth is classes of a row: one of them, or any number."""

from __future__ import annotations

from hpo.tasks.kind import Kind


class _Labels(Kind):
    has_classes = True

    @property
    def num_outputs(self) -> int:
        return len(self.task.labels)


class SingleLabel(_Labels):
    """One class of a row."""

    name = "single_label"
    metrics = ("f1_macro", "f1_micro", "accuracy")
    losses = ("cross_entropy", "focal")
    min_labels = 2


class MultiLabel(_Labels):
    """Any number of classes of a row, none included."""

    name = "multi_label"
    metrics = ("f1_macro", "f1_micro", "exact_match")
    losses = ("bce", "focal")
    is_list = True
    min_labels = 1
