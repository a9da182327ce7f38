"""Windows of tokens from texts, and the spans in each window.

A text longer than `max_length` is either

- truncated: its end is cut off. A span over the cut keeps its remaining tokens (token_classification,
  span_per_label); an incomplete answer of span_extraction becomes "no answer"; or
- windowed: windows overlap by `stride` tokens, counted as in Hugging Face tokenizers. A span at a window's
  edge is clipped to it, its tokens keep their tags of the whole text, and an answer belongs to all windows
  with the whole answer. Of several windows with one token, the window with the token furthest from an edge
  owns it.

With `pair_segments` (question, context) the two segments are encoded as a pair: the second is cut or
windowed, the first is repeated in every window (at most half of its room) and owned by the first window.
Text outside of both segments is ignored.

Some tokenizers count the space before a word to its token. So a token loses white space at its edges, and a
span becomes the smallest covering run of tokens. Texts are tokenised without special tokens, so a stream can
be cut anywhere; a probe finds the special tokens.

Suffixes: T tokens of all texts one after the other; E texts; S spans; W windows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from hpo.errors import DataError, ModelError
from hpo.tasks.example import Example
from hpo.tasks.kind import Task, kind_of
from hpo.tasks.tokenized_split import (
    BEGINS_BEFORE,
    ENDS_AFTER,
    AnyArray,
    BoolArray,
    IntArray,
    TokenizedSplit,
    Windowing,
    WindowSpans,
    ragged_arange,
    starts,
)

_SPACES = np.zeros(0x3002, dtype=bool)
_SPACES[[code for code in range(0x3001) if chr(code).isspace()]] = True


@dataclass(frozen=True)
class TokenStream:
    """Tokens of many texts in sequence, without special tokens. Text e has the tokens
    `start_E1[e] : start_E1[e + 1]`."""

    ids_T: IntArray
    char_start_T: IntArray
    char_end_T: IntArray
    start_E1: IntArray

    @property
    def count_E(self) -> IntArray:
        return np.diff(self.start_E1)


def empty_stream(num_texts: int) -> TokenStream:
    empty = np.zeros(0, dtype=np.int32)
    return TokenStream(empty, empty, empty, np.zeros(num_texts + 1, dtype=np.int64))


def concatenated(*streams: TokenStream) -> TokenStream:
    return TokenStream(
        np.concatenate([stream.ids_T for stream in streams]),
        np.concatenate([stream.char_start_T for stream in streams]),
        np.concatenate([stream.char_end_T for stream in streams]),
        starts(np.concatenate([stream.count_E for stream in streams])),
    )


@dataclass(frozen=True)
class Layout:
    """The special tokens of a tokenizer around one text or a pair."""

    special: TokenStream
    """Special tokens before the first text, between the two, and after the last: three texts without
    characters."""
    type_ids: NDArray[np.int8] | None
    """Types of the five pieces of a window (before, first, between, second, after); None: the encoder has no
    types."""


def probe_layout(tokenizer: PreTrainedTokenizerBase, pair: bool) -> Layout:
    """Find the special tokens by a call of the tokenizer."""
    texts = ("a", "b") if pair else ("a",)
    probe = tokenizer(*texts, truncation=False, padding=False, return_token_type_ids=True)
    segment = probe.sequence_ids(0)
    ids, types = probe["input_ids"], probe.get("token_type_ids")
    begin, end = segment.index(0), len(segment) - segment[::-1].index(len(texts) - 1)
    between = [i for i in range(begin, end) if segment[i] is None]
    ids_T = np.array([*ids[:begin], *(ids[i] for i in between), *ids[end:]], dtype=np.int32)
    no_char_T = np.full_like(ids_T, -1)
    count_3 = np.array([begin, len(between), len(ids) - end])
    type_ids = None
    if pair and types is not None and "token_type_ids" in tokenizer.model_input_names:
        piece_types = (types[0], types[begin], types[between[0]] if between else 0, types[end - 1], types[-1])
        type_ids = np.array(piece_types, dtype=np.int8)
    return Layout(TokenStream(ids_T, no_char_T, no_char_T, starts(count_3)), type_ids)


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], offset_E: IntArray) -> TokenStream:
    encoded = tokenizer(
        list(texts),
        add_special_tokens=False,
        truncation=False,
        padding=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    count_E = np.fromiter(map(len, encoded["input_ids"]), dtype=np.int64)
    ids_T = np.fromiter(chain.from_iterable(encoded["input_ids"]), dtype=np.int32)
    flat = chain.from_iterable(chain.from_iterable(encoded["offset_mapping"]))
    start_T, end_T = np.fromiter(flat, dtype=np.int64).reshape(-1, 2).T
    start_T, end_T = _without_outer_space(texts, count_E, start_T, end_T)
    offset_T = np.repeat(offset_E, count_E)
    return TokenStream(
        ids_T=ids_T,
        char_start_T=(start_T + offset_T).astype(np.int32),
        char_end_T=(end_T + offset_T).astype(np.int32),
        start_E1=starts(count_E),
    )


def _without_outer_space(
    texts: Sequence[str], count_E: IntArray, start_T: IntArray, end_T: IntArray
) -> tuple[IntArray, IntArray]:
    """Remove white space from the edges of every token; a token of white space alone becomes empty."""
    code = np.frombuffer("".join(texts).encode("utf-32-le"), dtype=np.uint32)
    is_space = np.append(_SPACES[np.minimum(code, len(_SPACES) - 1)], False)
    length_E = np.fromiter(map(len, texts), dtype=np.int64)
    base_T = np.repeat(starts(length_E)[:-1], count_E)
    start_T, end_T = start_T + base_T, end_T + base_T
    while (leading_T := (start_T < end_T) & is_space[start_T]).any():
        start_T = start_T + leading_T
    while (trailing_T := (start_T < end_T) & is_space[end_T - 1]).any():
        end_T = end_T - trailing_T
    return start_T - base_T, end_T - base_T


def covering_tokens(
    stream: TokenStream, example_S: IntArray, start_S: IntArray, end_S: IntArray
) -> tuple[IntArray, IntArray]:
    """Return the first and last token of the smallest run that covers each span, counted from the text's
    first token. If no token has a character of the span, first > last.
    """
    # One key orders the characters of all examples, so that one binary search serves all spans.
    width = np.int64(1) << 32
    base_T = np.repeat(np.arange(len(stream.count_E)) * width, stream.count_E)
    # A tokenizer may reorder characters. The running maximum and minimum restore the order.
    end_T = np.maximum.accumulate(base_T + stream.char_end_T)
    start_T = np.minimum.accumulate((base_T + stream.char_start_T)[::-1])[::-1]
    base_S = example_S * width
    first_S = np.searchsorted(end_T, base_S + start_S, side="right")
    last_S = np.searchsorted(start_T, base_S + end_S, side="left") - 1
    offset_S = stream.start_E1[example_S]
    return first_S - offset_S, last_S - offset_S


_Segments = tuple[TokenStream, TokenStream]

_CHUNK = 10_000  # Examples tokenised at once: limits the memory of the tokenizer's Python lists.


@dataclass(frozen=True)
class Windows:
    """Parts of texts in windows.

    Window w shows the tokens `from_2W[s, w]` to `to_2W[s, w]` (exclusive) of segment s of its example, and
    owns the tokens `owned_from_2W[s, w]` to `owned_to_2W[s, w]`.
    """

    example_W: IntArray
    from_2W: IntArray
    to_2W: IntArray
    owned_from_2W: IntArray
    owned_to_2W: IntArray
    is_cut_E: BoolArray


def cut_windows(
    num_first_E: IntArray, num_second_E: IntArray, windowing: Windowing, num_special: int
) -> Windows:
    """Cut texts with these numbers of tokens in their two segments.

    Raises DataError if the stride leaves no progress.
    """
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
    is_first_W, is_last_W = number_W == 0, number_W == windows_E[example_W] - 1
    first_W, kept_W, step_W = first_E[example_W], kept_E[example_W], step_E[example_W]
    from_W = number_W * step_W
    none_W = np.zeros_like(from_W)
    return Windows(
        example_W=example_W,
        from_2W=np.stack([none_W, from_W]),
        to_2W=np.stack([first_W, np.minimum(kept_W, from_W + capacity_E[example_W])]),
        owned_from_2W=np.stack([none_W, np.where(is_first_W, 0, from_W + stride // 2)]),
        owned_to_2W=np.stack(
            [first_W * is_first_W, np.where(is_last_W, kept_W, from_W + step_W + stride // 2)]
        ),
        is_cut_E=(kept_E < num_second_E) | (first_E < num_first_E),
    )


def tokenize_chunks(
    examples: Sequence[Example],
    tasks: Sequence[Task],
    tokenizer: PreTrainedTokenizerBase,
    windowing: Windowing,
) -> Iterator[TokenizedSplit]:
    """Tokenise every example and find its spans among the tokens.

    Yields chunks of `_CHUNK` examples; each chunk counts its examples, tokens and spans from 0. Raises
    DataError if `max_length` leaves no room for text or `stride` no progress, and ModelError if the tokenizer
    lacks a special token that a task or a pair needs.
    """
    layout = probe_layout(tokenizer, windowing.pair_segments is not None)
    num_special = len(layout.special.ids_T)
    if windowing.max_length < num_special + 2:
        raise DataError(
            f"max_length must leave room for text beside {num_special} special tokens, "
            f"but got {windowing.max_length}."
        )
    for task in tasks:
        if (marked := kind_of(task).at_first_token) is not None and not layout.special.count_E[0]:
            raise ModelError(
                f"{task.kind} marks '{marked}' at the first token, which must be a special token, "
                f"but {type(tokenizer).__name__} puts none before a text."
            )
    if windowing.pair_segments is not None and not layout.special.count_E[1]:
        raise ModelError(
            "data.pair_segments: the tokenizer must put a special token between two segments, but "
            f"{type(tokenizer).__name__} puts none. Choose another encoder."
        )
    for i in range(0, max(len(examples), 1), _CHUNK):
        yield _tokenize_chunk(examples[i : i + _CHUNK], tasks, tokenizer, layout, windowing)


def _tokenize_chunk(
    examples: Sequence[Example],
    tasks: Sequence[Task],
    tokenizer: PreTrainedTokenizerBase,
    layout: Layout,
    windowing: Windowing,
) -> TokenizedSplit:
    segments = _segments(examples, tokenizer, windowing.pair_segments)
    num_first_E, num_second_E = (segment.count_E for segment in segments)
    windows = cut_windows(num_first_E, num_second_E, windowing, len(layout.special.ids_T))
    arrays, at_2W = _lay_out(segments, windows, layout)
    length_W = np.diff(arrays["window_start_W1"])
    if not length_W.all():
        row = examples[windows.example_W[length_W.argmin()]].id
        raise DataError(f"the tokenizer must make tokens of every text, but makes none of row `{row}`.")
    spans: dict[str, WindowSpans] = {}
    num_lost: dict[str, int] = {}
    targets: dict[str, AnyArray] = {}
    annotated: dict[str, BoolArray] = {}
    for task in tasks:
        name, kind = task.name, kind_of(task)
        has_E = np.fromiter((name in e.annotated for e in examples), dtype=bool, count=len(examples))
        annotated[name] = has_E[windows.example_W]
        if (row_targets := kind.row_targets(examples, has_E)) is not None:
            targets[name] = row_targets[windows.example_W]
        if kind.in_spans:
            spans[name], num_lost[name] = _window_spans(task, examples, segments, windows, at_2W)
            if (window_targets := kind.window_targets(spans[name], annotated[name])) is not None:
                targets[name] = window_targets
    return TokenizedSplit(
        examples=examples,
        max_length=windowing.max_length,
        window_example_W=windows.example_W.astype(np.int32),
        spans=spans,
        targets=targets,
        annotated=annotated,
        num_cut_examples=int(windows.is_cut_E.sum()),
        num_lost_spans=num_lost,
        **arrays,
    )


def _segments(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, names: tuple[str, str] | None
) -> _Segments:
    """Return the tokens of both segments; without a pair the text is the second, and the first is empty."""
    if names is None:
        begin_E = np.zeros(len(examples), dtype=np.int64)
        return empty_stream(len(examples)), encode(tokenizer, [e.text for e in examples], begin_E)
    first, second = (
        encode(
            tokenizer,
            [e.text[slice(*e.segments[name])] for e in examples],
            np.array([e.segments[name][0] for e in examples], dtype=np.int64),
        )
        for name in names
    )
    return first, second


def _lay_out(segments: _Segments, windows: Windows, layout: Layout) -> tuple[dict[str, Any], IntArray]:
    """Return the arrays over the tokens of all windows, and the position of each segment in its window."""
    # A window has five pieces: special tokens, first segment, special tokens, second segment, special tokens.
    pool = concatenated(layout.special, *segments)
    first_W = windows.example_W + 3
    text_5W = np.stack(np.broadcast_arrays(0, first_W, 1, first_W + len(segments[0].count_E), 2))
    from_5W, count_5W = pool.start_E1[text_5W], pool.count_E[text_5W]
    from_5W[[1, 3]] += windows.from_2W
    count_5W[[1, 3]] = windows.to_2W - windows.from_2W
    count_N = count_5W.T.ravel()
    token_T = ragged_arange(from_5W.T.ravel(), count_N)

    window_start_W1 = starts(count_5W.sum(axis=0))
    at_2W = (np.cumsum(count_5W, axis=0) - count_5W)[[1, 3]]
    owned_at_2W = window_start_W1[:-1] + at_2W + windows.owned_from_2W - windows.from_2W
    owned_count_2W = windows.owned_to_2W - windows.owned_from_2W
    owned_T = np.zeros(len(token_T), dtype=bool)
    owned_T[ragged_arange(owned_at_2W.ravel(), owned_count_2W.ravel())] = True
    type_ids = layout.type_ids
    arrays = {
        "input_ids_T": pool.ids_T[token_T],
        "type_ids_T": None if type_ids is None else np.repeat(np.tile(type_ids, len(first_W)), count_N),
        "char_start_T": pool.char_start_T[token_T],
        "char_end_T": pool.char_end_T[token_T],
        "owned_T": owned_T,
        "window_start_W1": window_start_W1,
    }
    return arrays, at_2W


def _window_spans(
    task: Task, examples: Sequence[Example], segments: _Segments, windows: Windows, at_2W: IntArray
) -> tuple[WindowSpans, int]:
    """Return a task's spans in every window, and the number of spans not whole in any."""
    true_spans = [
        (e, label, start, end)
        for e, example in enumerate(examples)
        if task.name in example.annotated
        for label, name in enumerate(task.labels)
        for start, end in example.spans.get(name, ())
    ]
    example_S, label_S, start_S, end_S = np.array(true_spans, dtype=np.int64).reshape(-1, 4).T
    windows_E = np.bincount(windows.example_W, minlength=len(examples))
    # Every span in every window of its example.
    count_S = windows_E[example_S]
    span = np.repeat(np.arange(len(true_spans)), count_S)
    window = ragged_arange(starts(windows_E)[example_S], count_S)
    rows: list[NDArray[np.int64]] = []
    is_whole_S = np.zeros(len(true_spans), dtype=bool)
    for number, segment in enumerate(segments):
        first_S, last_S = covering_tokens(segment, example_S, start_S, end_S)
        low, high = windows.from_2W[number, window], windows.to_2W[number, window] - 1
        first, last = np.maximum(first_S[span], low), np.minimum(last_S[span], high)
        edges = BEGINS_BEFORE * (first_S[span] < low) + ENDS_AFTER * (last_S[span] > high)
        shown = first <= last
        to_window = at_2W[number, window] - low
        rows.append(
            np.stack([window, label_S[span], first + to_window, last + to_window, edges], axis=1)[shown]
        )
        is_whole_S[span[shown & (edges == 0)]] = True
    rows_S5 = np.concatenate(rows)
    rows_S5 = rows_S5[np.lexsort((rows_S5[:, 2], rows_S5[:, 0]))]
    start_W1 = starts(np.bincount(rows_S5[:, 0], minlength=len(windows.example_W)))
    rows_S4 = np.ascontiguousarray(rows_S5[:, 1:], dtype=np.int32)
    return WindowSpans(rows_S4, start_W1), int((~is_whole_S).sum())
