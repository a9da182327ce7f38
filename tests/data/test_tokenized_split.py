from __future__ import annotations

from tiny_tokenizers import tiny_tokenizer, tokenize_split

from hpo.data.examples import Example
from hpo.data.tokenized_split import Windowing


def test_the_windows_of_a_text_share_it() -> None:
    rows = [Example("long", "a b c d e f g h", {}, {}), Example("short", "a", {}, {})]
    whole = tokenize_split(rows, (), tiny_tokenizer("wordpiece"), Windowing(64))
    assert whole.example_share_W.tolist() == [1, 1]
    cut = tokenize_split(rows, (), tiny_tokenizer("wordpiece"), Windowing(6, "window"))
    assert cut.example_share_W.tolist() == [0.5, 0.5, 1]
