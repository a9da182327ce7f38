"""What the kinds have in common whose truth is spans of characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpo.tasks.kind import Kind

if TYPE_CHECKING:
    from hpo.data.examples import Example
    from hpo.data.tokenized_split import BoolArray, IntArray, TokenizedSplit


class SpanKind(Kind):
    """A kind whose truth is spans."""

    metrics = ("span_f1", "span_overlap_f1", "f1_macro")
    level = "token"
    in_spans = True

    @property
    def num_outputs(self) -> int:
        return len(self.task.labels)

    def held(self, example: Example) -> Sequence[str]:
        return [name for name in self.task.labels for _ in example.spans.get(name, ())]

    def _known(self, split: TokenizedSplit, windows_B: IntArray, is_text_BL: BoolArray) -> BoolArray:
        """The tokens whose truth is known: [B, L]."""
        return is_text_BL & split.annotated[self.task.name][windows_B][:, None]
