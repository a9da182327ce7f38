"""Texts as streams of tokens, each token with its characters.

Some tokenizers count the space before a word to its token. So a token loses white space at its edges, and a
span becomes the smallest covering run of tokens. Texts are tokenised without special tokens, so a stream can
be cut anywhere; a probe finds the special tokens.

Suffixes: T tokens of all texts one after the other; E texts; S spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from hpo.tasks.tokenized_split import IntArray, starts

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
