"""Texts put together from a table of words against texts tokenised whole."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from tiny_tokenizers import CORPUS, FAMILIES, tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

import hpo.data.word_table
from hpo.data.token_stream import TokenStream, encode
from hpo.data.tokenized_split import IntArray
from hpo.data.word_table import WordTable, treats_words_apart

# White space of all sorts, what BERT deletes, accents alone and in front of a space, letters that lowercase
# to two, ideographs (each a word), and names of added tokens.
PIECES = (
    *" \t\n\r\x0b\x0c\x1c\x85\xa0\u2003\u2028\u3000",
    *"\x00\x07\ufffd\u200d\ufeff\u0301\u0308\u0327",
    *"aBé\u0130ΣσßΩ.,'-#ﬁ中日😔\U00020000",
    "Ann works",
    "  ",
    "[SEP]",
    "[MASK] ",
    " [UNK]x",
    "x" * 101,
)


def bert_tokenizer(
    clean_text: bool = True, chinese: bool = True, accents: bool | None = None, lowercase: bool = True
) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=100))  # type: ignore[call-arg]
    tokenizer.normalizer = normalizers.BertNormalizer(clean_text, chinese, accents, lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special, alphabet = ["[UNK]", "[SEP]", "[MASK]"], list("é\u0301中.\u0308σς")
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def random_texts(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [
        "".join(
            draw.choice(PIECES) if draw.random() < 0.7 else chr(draw.choice([draw.randrange(0xD800), 32]))
            for _ in range(draw.randint(0, 30))
        )
        for _ in range(count)
    ]


def assert_same(ours: TokenStream, whole: TokenStream) -> None:
    for name in ("ids_T", "char_start_T", "char_end_T", "start_E1"):
        one, other = getattr(ours, name), getattr(whole, name)
        np.testing.assert_array_equal(one, other, err_msg=name)
        assert one.dtype == other.dtype


@pytest.mark.parametrize("options", list(product([True, False], [True, False], [None, True, False])))
def test_texts_of_words_are_the_texts_tokenised_whole(options: tuple[bool, bool, bool | None]) -> None:
    for lowercase in (True, False):
        tokenizer = bert_tokenizer(*options, lowercase)
        assert treats_words_apart(tokenizer)
        table = WordTable(tokenizer)
        for seed in (1, 2):
            texts = random_texts(200, seed)
            offset_E = np.arange(len(texts)) * 3
            assert_same(table.encode(texts, offset_E), encode(tokenizer, texts, offset_E))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words that the table has the tokenizer take apart."""
    words: list[str] = []

    def recorded(tokenizer: PreTrainedTokenizerBase, new: list[str], at: IntArray) -> TokenStream:
        words.extend(new)
        return encode(tokenizer, new, at)

    monkeypatch.setattr(hpo.data.word_table, "encode", recorded)
    return words


def test_a_word_is_tokenised_once(asked: list[str]) -> None:
    table = WordTable(tiny_tokenizer("wordpiece"))
    texts, at = ["the dog, the dog", "a dog\tand the cat", ""], np.array([0, 5, 9])
    for _ in range(2):
        assert_same(table.encode(texts, at), encode(tiny_tokenizer("wordpiece"), texts, at))
    assert sorted(asked) == sorted(["", "the", "dog,", "dog", "a", "and", "cat"])
    assert table.encode([], np.zeros(0, dtype=np.int64)).start_E1.tolist() == [0]


def test_a_full_table_is_begun_anew(asked: list[str]) -> None:
    tokenizer = tiny_tokenizer("wordpiece")
    table = WordTable(tokenizer, max_bytes=200)
    for number in range(12):
        texts, at = [f"word{number} again", f"other{number}"], np.zeros(2, dtype=np.int64)
        assert_same(table.encode(texts, at), encode(tokenizer, texts, at))
    assert 1 < asked.count("again") < 12


def add(token: str, normalized: bool) -> Callable[[PreTrainedTokenizerFast], object]:
    return lambda tokenizer: tokenizer.add_tokens([AddedToken(token, normalized=normalized)])


def exchange(part: str, by: object) -> Callable[[PreTrainedTokenizerFast], object]:
    return lambda tokenizer: setattr(tokenizer.backend_tokenizer, part, by)


@pytest.mark.parametrize(
    ("change", "apart"),
    [
        (add("<user>", normalized=False), True),
        (add("two words", normalized=False), False),
        (add("<user>", normalized=True), False),
        (exchange("normalizer", normalizers.NFKC()), False),
        (exchange("pre_tokenizer", pre_tokenizers.ByteLevel()), False),
        (exchange("pre_tokenizer", pre_tokenizers.Metaspace()), False),
    ],
)
def test_only_tokenizers_of_berts_form_treat_words_apart(
    change: Callable[[PreTrainedTokenizerFast], object], apart: bool
) -> None:
    tokenizer = bert_tokenizer()
    change(tokenizer)
    assert treats_words_apart(tokenizer) == apart


@pytest.mark.parametrize("family", FAMILIES)
def test_byte_level_and_sentencepiece_tokenizers_see_whole_texts(family: str) -> None:
    assert treats_words_apart(tiny_tokenizer(family)) == (family == "wordpiece")
