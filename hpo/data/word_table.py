"""Texts tokenised by their distinct words, where a tokenizer cuts texts at spaces anyway.

BERT's tokenizers take a text apart at white space before they look at anything else, so what a word becomes
does not depend on the words beside it, and a word that was seen before need not be tokenised again: most
words of a corpus are among its few frequent ones (Zipf). A table holds the tokens of every word met so far,
and a text is put together from it with array operations.

A word is what stands between space, tab, newline and carriage return. Other white space stays inside the
word, for the tokenizer to treat: BERT's normaliser deletes some of it (U+000B, a control character) and
cuts at some (U+00A0).

Suffixes: V words of the table; N words of all texts in order; E texts; T tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from hpo.data.token_stream import TokenStream, encode
from hpo.data.tokenized_split import IntArray, ragged_arange

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def treats_words_apart(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True for tokenizers of BERT's form, whose tokens of a text are those of its words.

    Byte-level and SentencePiece tokenizers are not: to them a space is a part of the next word.
    """
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer

    backend = tokenizer.backend_tokenizer
    return (
        isinstance(backend.model, WordPiece)
        and isinstance(backend.pre_tokenizer, BertPreTokenizer)
        and (backend.normalizer is None or isinstance(backend.normalizer, BertNormalizer))
        # Added tokens are looked for in the whole text: one that holds a space could be of two words.
        and all(
            not token.normalized and not any(map(str.isspace, token.content))
            for token in backend.get_added_tokens_decoder().values()
        )
    )


class _Numbers(dict[str, int]):
    """A number for every word that is asked for, counted from 0 on."""

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        return number


class WordTable:
    """The tokens of the words met so far, of a tokenizer that `treats_words_apart`.

    A new table is begun when the words take more than `max_bytes`: half a million words, or fewer long ones.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_bytes: int = 32 << 20) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._clear()

    def _clear(self) -> None:
        empty = np.zeros(0, dtype=np.int32)
        self._number = _Numbers()
        self._tokens_V = TokenStream(empty, empty, empty, np.zeros(1, dtype=np.int64))
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._number)

    def encode(self, texts: Sequence[str], offset_E: IntArray) -> TokenStream:
        """As `hpo.data.token_stream.encode` with the table's tokenizer."""
        if self._num_bytes > self._max_bytes:
            self._clear()
        joined = " ".join(texts)
        for space in "\t\n\r":
            joined = joined.replace(space, " ")
        # Two spaces in a row have an empty word between them, which has no tokens.
        words = joined.split(" ") if texts else []
        word_N = self._numbered(words)

        size_N = np.fromiter(map(len, words), dtype=np.int64, count=len(words)) + 1
        size_E = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts)) + 1
        at_N, at_E = np.cumsum(size_N) - size_N, np.cumsum(size_E) - size_E
        first_word_E1 = np.append(np.searchsorted(at_N, at_E), len(words))
        at_N -= np.repeat(at_E - offset_E, np.diff(first_word_E1))

        table = self._tokens_V
        count_N = table.count_E[word_N]
        of_table = ragged_arange(table.start_E1[word_N], count_N)
        at_T = np.repeat(at_N.astype(np.int32), count_N)
        return TokenStream(
            ids_T=table.ids_T[of_table],
            char_start_T=table.char_start_T[of_table] + at_T,
            char_end_T=table.char_end_T[of_table] + at_T,
            start_E1=np.append(0, np.cumsum(count_N))[first_word_E1],
        )

    def _numbered(self, words: Sequence[str]) -> IntArray:
        """The number of each word in the table, which learns those that are new."""
        num_known = len(self._number)
        word_N = np.fromiter(map(self._number.__getitem__, words), dtype=np.int64, count=len(words))
        new = list(islice(self._number, num_known, None))
        if new:
            old, more = self._tokens_V, encode(self._tokenizer, new, np.zeros(len(new), dtype=np.int64))
            self._tokens_V = TokenStream(
                np.append(old.ids_T, more.ids_T),
                np.append(old.char_start_T, more.char_start_T),
                np.append(old.char_end_T, more.char_end_T),
                np.append(old.start_E1, old.start_E1[-1] + more.start_E1[1:]),
            )
            self._num_bytes += sum(map(sys.getsizeof, new))
        return word_N
