"""Texts tokenised by their distinct words, where a tokenizer cuts texts at spaces anyway.

BERT's tokenizers take a text apart at white space first, so what a word becomes does not depend on the words
beside it, and most words of a corpus are among its few frequent ones (Zipf). A table holds the tokens of
every word met so far, and a text is put together from it with array operations.

A word is what stands between space, tab, newline and carriage return. Other white space stays inside the
word, for the tokenizer to treat: BERT's normaliser deletes some of it (U+000B, a control character) and
cuts at some (U+00A0).

Suffixes: V words of the table; N words of all texts in order; E texts; T tokens.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import count, islice
from typing import TYPE_CHECKING

import numpy as np

from hpo.data.token_stream import TokenStream, concatenated, empty_stream, encode
from hpo.data.tokenized_split import IntArray, ragged_arange, starts

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


class WordTable:
    """The tokens of the words met so far, of a tokenizer that `treats_words_apart`.

    A new table is begun when the words take more than `max_bytes`: half a million words, or fewer long ones.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_bytes: int = 32 << 20) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._clear()

    def _clear(self) -> None:
        self._number = defaultdict[str, int](count().__next__)  # Counts on for every new word.
        self._tokens_V = empty_stream(0)
        self._num_bytes = 0

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

        at_N = starts(np.fromiter(map(len, words), dtype=np.int64) + 1)[:-1]
        at_E = starts(np.fromiter(map(len, texts), dtype=np.int64) + 1)[:-1]
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
            start_E1=starts(count_N)[first_word_E1],
        )

    def _numbered(self, words: Sequence[str]) -> IntArray:
        """The number of each word in the table, which learns those that are new."""
        num_known = len(self._number)
        word_N = np.fromiter(map(self._number.__getitem__, words), dtype=np.int64, count=len(words))
        new = list(islice(self._number, num_known, None))
        if new:
            more = encode(self._tokenizer, new, np.zeros(len(new), dtype=np.int64))
            self._tokens_V = concatenated(self._tokens_V, more)
            self._num_bytes += sum(map(sys.getsizeof, new))
        return word_N
