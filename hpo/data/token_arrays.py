"""A tokenised split as arrays with names, and how those of its chunks follow each other.

A large split is made and written chunk by chunk, so that no more than one chunk is in memory. A chunk counts
its examples, tokens and spans from 0; `Concatenation` counts on from the chunks before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpo.data.examples import Example
from hpo.data.tokenized_split import AnyArray, TokenizedSplit, WindowSpans

_FLAT = (
    "input_ids_T",
    "type_ids_T",
    "char_start_T",
    "char_end_T",
    "owned_T",
    "window_start_W1",
    "window_example_W",
)


class Concatenation:
    """The chunks of a split, concatenated in their order.

    `next` says which arrays to append for a chunk. `totals` are the numbers of the whole split, which
    JSON can hold.
    """

    def __init__(self) -> None:
        self.totals: dict[str, Any] = {}
        self._num_examples = 0
        self._ends: dict[str, int] = {}

    def next(self, chunk: TokenizedSplit) -> dict[str, AnyArray]:
        """The arrays of a chunk, to be appended by name to those of the chunks before it."""
        arrays: dict[str, AnyArray] = {name: getattr(chunk, name) for name in _FLAT}
        arrays = {name: array for name, array in arrays.items() if array is not None}
        for task, spans in chunk.spans.items():
            arrays[f"span_rows.{task}"], arrays[f"span_start.{task}"] = spans.rows_S4, spans.start_W1
        arrays |= {f"target.{task}": array for task, array in chunk.targets.items()}
        arrays |= {f"annotated.{task}": array for task, array in chunk.annotated.items()}

        example_W = arrays["window_example_W"]
        arrays["window_example_W"] = example_W + example_W.dtype.type(self._num_examples)
        for name in ("window_start_W1", *(f"span_start.{task}" for task in chunk.spans)):
            start_W1 = arrays[name]
            # The first start of a chunk is the last end of the one before.
            arrays[name] = start_W1[1:] + self._ends[name] if name in self._ends else start_W1
            self._ends[name] = self._ends.get(name, 0) + int(start_W1[-1])
        self._num_examples += len(chunk.examples)
        self.totals = {
            "max_length": chunk.max_length,
            "num_cut_examples": self.totals.get("num_cut_examples", 0) + chunk.num_cut_examples,
            "num_lost_spans": {
                task: self.totals.get("num_lost_spans", {}).get(task, 0) + lost
                for task, lost in chunk.num_lost_spans.items()
            },
        }
        return arrays


def split_of_arrays(
    examples: Sequence[Example], arrays: Mapping[str, AnyArray], totals: Mapping[str, Any]
) -> TokenizedSplit:
    """The split of these arrays and totals. Raises KeyError where one is not there."""

    def of_tasks(kind: str) -> dict[str, AnyArray]:
        prefix = f"{kind}."
        return {n.removeprefix(prefix): array for n, array in arrays.items() if n.startswith(prefix)}

    starts = of_tasks("span_start")
    flat: dict[str, Any] = {name: arrays[name] for name in _FLAT if name != "type_ids_T"}
    return TokenizedSplit(
        examples=examples,
        type_ids_T=arrays.get("type_ids_T"),
        spans={task: WindowSpans(rows, starts[task]) for task, rows in of_tasks("span_rows").items()},
        targets=of_tasks("target"),
        annotated=of_tasks("annotated"),
        max_length=totals["max_length"],
        num_cut_examples=totals["num_cut_examples"],
        num_lost_spans=totals["num_lost_spans"],
        **flat,
    )
