"""How texts are cut into windows of tokens, and where their truth lies in them.

Texts longer than `max_length` are either

- truncated: the end is cut off. A span that reaches over the cut keeps the part that is left as its tokens
  (token_classification, span_per_label); a span_extraction answer that is not whole becomes "no answer"; or
- windowed: windows overlap by `stride` tokens, as `stride` counts in Hugging Face tokenizers. A span at a
  window's edge is clipped to it, its tokens keep the tags that they have in the whole text, and an answer
  belongs to the windows that hold it whole. A token that several windows hold is owned by the one in which
  it is further from the edge.

With `pair_segments` (question, context) the two segments are encoded as a pair: the second is cut or
windowed, the first is repeated in every window (at most half of its room) and owned by the first.
Text outside of both segments is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpo.data.examples import SPAN_KINDS, Example
from hpo.data.tasks import IGNORE_INDEX, Task
from hpo.data.token_stream import Layout, TokenStream, covering_tokens, encode, probe_layout
from hpo.data.tokenized_split import (
    BEGINS_BEFORE,
    ENDS_AFTER,
    AnyArray,
    BoolArray,
    Concatenation,
    IntArray,
    TokenizedSplit,
    Windowing,
    WindowSpans,
    ragged_arange,
    split_of_arrays,
)
from hpo.data.word_table import WordTable, treats_words_apart
from hpo.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK = 10_000  # Examples tokenised at once: bounds what the tokenizer's Python lists take.


@dataclass(frozen=True)
class _Windows:
    """How the texts of one chunk are cut: window w shows `length_W` tokens of its example's second
    segment from `start_W` on, after `first_E` tokens of the first segment."""

    example_W: IntArray
    is_first_W: BoolArray
    start_W: IntArray
    length_W: IntArray
    owned_from_W: IntArray
    owned_to_W: IntArray
    first_E: IntArray
    is_cut_E: BoolArray


def _cut(num_first_E: IntArray, num_second_E: IntArray, windowing: Windowing, num_special: int) -> _Windows:
    room = windowing.max_length - num_special
    is_windowed = windowing.long_text == "window"
    stride = windowing.stride if is_windowed else 0
    first_E = np.minimum(num_first_E, room // 2)
    capacity_E = room - first_E
    kept_E = num_second_E if is_windowed else np.minimum(num_second_E, capacity_E)
    smallest = capacity_E[kept_E > capacity_E].min(initial=room)
    if stride >= smallest and (kept_E > capacity_E).any():
        raise DataError(
            f"data.stride, the overlap of two windows, must be less than the {smallest} tokens of text that "
            f"a window of max_length {windowing.max_length} holds, but got {stride}. "
            "Lower the stride or raise max_length."
        )
    step_E = np.maximum(capacity_E - stride, 1)
    windows_E = 1 + np.maximum(0, -(-(kept_E - capacity_E) // step_E))
    example_W = np.repeat(np.arange(len(windows_E)), windows_E)
    number_W = ragged_arange(np.zeros_like(windows_E), windows_E)
    start_W = number_W * step_E[example_W]
    is_last_W = number_W == windows_E[example_W] - 1
    return _Windows(
        example_W=example_W,
        is_first_W=number_W == 0,
        start_W=start_W,
        length_W=np.minimum(kept_E[example_W] - start_W, capacity_E[example_W]),
        owned_from_W=np.where(number_W == 0, 0, start_W + stride // 2),
        owned_to_W=np.where(is_last_W, kept_E[example_W], start_W + step_E[example_W] + stride // 2),
        first_E=first_E,
        is_cut_E=(kept_E < num_second_E) | (first_E < num_first_E),
    )


def tokenize_split(
    examples: Sequence[Example],
    tasks: Sequence[Task],
    tokenizer: PreTrainedTokenizerBase,
    windowing: Windowing,
) -> TokenizedSplit:
    """Return the chunks of `tokenize_chunks` as one split, in memory."""
    concatenation = Concatenation()
    parts = [concatenation.next(chunk) for chunk in tokenize_chunks(examples, tasks, tokenizer, windowing)]
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return split_of_arrays(examples, arrays, concatenation.totals)


def tokenize_chunks(
    examples: Sequence[Example],
    tasks: Sequence[Task],
    tokenizer: PreTrainedTokenizerBase,
    windowing: Windowing,
) -> Iterator[TokenizedSplit]:
    """Tokenise every example and place its truth on the tokens; see the head of this file.

    Yields the split in chunks of examples, each of which counts from 0;
    `hpo.data.tokenized_split.Concatenation` puts them one after the other.

    Raises ModelError for a tokenizer without offsets, and DataError where `max_length` leaves no room for
    text or `stride` no progress.
    """
    if not tokenizer.is_fast:
        raise ModelError(
            f"the tokenizer must be a fast one, which knows the characters of its tokens, "
            f"but {type(tokenizer).__name__} is not. Use an encoder with a tokenizer.json."
        )
    layout = probe_layout(tokenizer, windowing.pair_segments is not None)
    room = windowing.max_length - layout.num_special
    if room < 2:
        raise DataError(
            f"max_length must leave room for text beside {layout.num_special} special tokens, "
            f"but got {windowing.max_length}."
        )
    if not layout.prefix and any(task.kind == "span_extraction" for task in tasks):
        raise ModelError(
            "span_extraction marks 'no answer' at the first token, which must be a special token, "
            f"but {type(tokenizer).__name__} puts none before a text."
        )
    encode_texts = (
        WordTable(tokenizer).encode if treats_words_apart(tokenizer) else partial(encode, tokenizer)
    )
    for i in range(0, max(len(examples), 1), _CHUNK):
        yield _tokenize_chunk(examples[i : i + _CHUNK], tasks, encode_texts, layout, windowing)


def _tokenize_chunk(
    examples: Sequence[Example],
    tasks: Sequence[Task],
    encode_texts: Callable[[Sequence[str], IntArray], TokenStream],
    layout: Layout,
    windowing: Windowing,
) -> TokenizedSplit:
    num_examples = len(examples)
    if windowing.pair_segments is None:
        empty = np.zeros(0, dtype=np.int32)
        first = TokenStream(empty, empty, empty, np.zeros(num_examples + 1, dtype=np.int64))
        second = encode_texts([e.text for e in examples], np.zeros(num_examples, dtype=np.int64))
    else:
        first, second = (
            encode_texts(
                [e.text[slice(*e.segments[name])] for e in examples],
                np.array([e.segments[name][0] for e in examples], dtype=np.int64),
            )
            for name in windowing.pair_segments
        )
    cut = _cut(first.count_E, second.count_E, windowing, layout.num_special)

    # Where the pieces of every window begin among all tokens of the chunk.
    first_W = cut.first_E[cut.example_W]
    size_W = layout.num_special + first_W + cut.length_W
    if not size_W.all():
        row = examples[cut.example_W[size_W.argmin()]].id
        raise DataError(
            f"the tokenizer must make tokens of every text, but makes none of that of row `{row}`."
        )
    window_start_W1 = np.concatenate([[0], np.cumsum(size_W)])
    begin_W = window_start_W1[:-1]
    first_at_W = begin_W + len(layout.prefix)
    middle_at_W = first_at_W + first_W
    second_at_W = middle_at_W + len(layout.middle)
    suffix_at_W = second_at_W + cut.length_W

    num_tokens = int(window_start_W1[-1])
    ids_T = np.zeros(num_tokens, dtype=np.int32)
    char_start_T, char_end_T = (np.full(num_tokens, -1, dtype=np.int32) for _ in range(2))
    owned_T = np.zeros(num_tokens, dtype=bool)
    specials = ((begin_W, layout.prefix), (middle_at_W, layout.middle), (suffix_at_W, layout.suffix))
    for at_W, special in specials:
        for i, token_id in enumerate(special):
            ids_T[at_W + i] = token_id
    for stream, at_W, from_W, count_W in (
        (first, first_at_W, np.zeros_like(first_W), first_W),
        (second, second_at_W, cut.start_W, cut.length_W),
    ):
        to = ragged_arange(at_W, count_W)
        source = ragged_arange(stream.start_E1[cut.example_W] + from_W, count_W)
        ids_T[to] = stream.ids_T[source]
        char_start_T[to] = stream.char_start_T[source]
        char_end_T[to] = stream.char_end_T[source]
    owned_T[ragged_arange(first_at_W, first_W * cut.is_first_W)] = True
    owned_from_W = second_at_W + cut.owned_from_W - cut.start_W
    owned_T[ragged_arange(owned_from_W, cut.owned_to_W - cut.owned_from_W)] = True

    type_ids_T: IntArray | None = None
    if layout.type_ids is not None:
        pieces = (len(layout.prefix), first_W, len(layout.middle), cut.length_W, len(layout.suffix))
        size_W5 = np.stack(np.broadcast_arrays(*pieces), axis=1)
        of_pieces = np.tile(np.array(layout.type_ids, dtype=np.int8), len(size_W5))
        type_ids_T = np.repeat(of_pieces, size_W5.ravel())

    targets, annotated = _window_targets(examples, tasks, cut.example_W)
    spans: dict[str, WindowSpans] = {}
    num_lost: dict[str, int] = {}
    segments = ((first, first_at_W - begin_W, first_W), (second, second_at_W - begin_W, cut.length_W))
    for task in tasks:
        if task.kind in SPAN_KINDS:
            rows_S5, num_lost[task.name] = _window_spans(task, examples, cut, segments)
            counts_W = np.bincount(rows_S5[:, 0], minlength=len(begin_W))
            start_W1 = np.concatenate([[0], np.cumsum(counts_W)])
            spans[task.name] = WindowSpans(np.ascontiguousarray(rows_S5[:, 1:], dtype=np.int32), start_W1)
            if task.kind == "span_extraction":
                whole_S5 = rows_S5[rows_S5[:, 4] == 0]
                targets[task.name][whole_S5[:, 0]] = whole_S5[:, 2:4]
                targets[task.name][~annotated[task.name]] = IGNORE_INDEX
    return TokenizedSplit(
        examples=examples,
        max_length=windowing.max_length,
        input_ids_T=ids_T,
        type_ids_T=type_ids_T,
        char_start_T=char_start_T,
        char_end_T=char_end_T,
        owned_T=owned_T,
        window_start_W1=window_start_W1,
        window_example_W=cut.example_W.astype(np.int32),
        spans=spans,
        targets=targets,
        annotated=annotated,
        num_cut_examples=int(cut.is_cut_E.sum()),
        num_lost_spans=num_lost,
    )


def _window_spans(
    task: Task,
    examples: Sequence[Example],
    cut: _Windows,
    segments: Sequence[tuple[TokenStream, IntArray, IntArray]],
) -> tuple[NDArray[np.int64], int]:
    """Rows (window, label, first, last, cut) of a task's spans, by window, and how many are whole nowhere.

    A segment is its tokens, where it begins in each window, and how many of it each window shows.
    """
    found = [
        (e, label, start, end)
        for e, example in enumerate(examples)
        if example.spans
        for label, name in enumerate(task.labels)
        for start, end in example.spans.get(name, ())
    ]
    example_S, label_S, start_S, end_S = np.array(found, dtype=np.int64).reshape(-1, 4).T
    windows_E = np.bincount(cut.example_W, minlength=len(examples))
    window_start_E = np.cumsum(windows_E) - windows_E
    # Every span in every window of its example.
    count_S = windows_E[example_S]
    span = np.repeat(np.arange(len(found)), count_S)
    window = ragged_arange(window_start_E[example_S], count_S)
    rows: list[NDArray[np.int64]] = []
    is_whole_S = np.zeros(len(found), dtype=bool)
    for number, (stream, at_W, shown_W) in enumerate(segments):
        first_S, last_S = covering_tokens(stream, example_S, start_S, end_S)
        low = cut.start_W[window] if number == 1 else np.zeros_like(window)
        high = low + shown_W[window] - 1
        first, last = np.maximum(first_S[span], low), np.minimum(last_S[span], high)
        edges = BEGINS_BEFORE * (first_S[span] < low) + ENDS_AFTER * (last_S[span] > high)
        shown = first <= last
        to_window = at_W[window] - low
        rows.append(
            np.stack([window, label_S[span], first + to_window, last + to_window, edges], axis=1)[shown]
        )
        is_whole_S[span[shown & (edges == 0)]] = True
    rows_S5 = np.concatenate(rows)
    order = np.lexsort((rows_S5[:, 2], rows_S5[:, 0]))
    return rows_S5[order], int((~is_whole_S).sum())


def _window_targets(
    examples: Sequence[Example], tasks: Sequence[Task], example_W: IntArray
) -> tuple[dict[str, AnyArray], dict[str, BoolArray]]:
    """Targets that a window takes over from its example; span_extraction starts as "no answer"."""
    targets: dict[str, AnyArray] = {}
    annotated: dict[str, BoolArray] = {}
    for task in tasks:
        index = {label: c for c, label in enumerate(task.labels)}
        has_E = np.fromiter((task.name in e.annotated for e in examples), dtype=bool, count=len(examples))
        annotated[task.name] = has_E[example_W]
        labels: list[Any] = [e.labels.get(task.name) for e in examples]
        target_E: AnyArray
        if task.kind == "single_label":
            classes = (index.get(label, IGNORE_INDEX) for label in labels)
            target_E = np.fromiter(classes, dtype=np.int32, count=len(examples))
        elif task.kind == "regression":
            values = (np.nan if label is None else label for label in labels)
            target_E = np.fromiter(values, dtype=np.float32, count=len(examples))
        elif task.kind in ("multi_label", "span_per_label"):
            missing = np.int8(-1 if task.kind == "multi_label" else 0)
            target_E = np.repeat(np.where(has_E, np.int8(0), missing)[:, None], len(index), axis=1)
            held = labels if task.kind == "multi_label" else (e.spans for e in examples)
            ones = [(e, index[label]) for e, of in enumerate(held) for label in of or () if label in index]
            target_E[tuple(np.array(ones, dtype=np.int64).reshape(-1, 2).T)] = 1
        elif task.kind == "span_extraction":
            target_E = np.zeros((len(examples), 2), dtype=np.int32)
        else:
            continue
        targets[task.name] = target_E[example_W]
    return targets, annotated
