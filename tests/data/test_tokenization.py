import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from support.tiny_tokenizers import FAMILIES, tiny_tokenizer, tokenize_split
from transformers import PreTrainedTokenizerBase

from hpo.tasks.example import Example
from hpo.tasks.kind import Task
from hpo.tasks.tokenized_split import BEGINS_BEFORE, ENDS_AFTER, TokenizedSplit, Windowing

NAMES = Task("names", "token_classification", ("x", "y"), spans_may_overlap=True)
ANSWER = Task("answer", "span_extraction", ("x",))
WINDOWED = {"long_text": "window"}

TEXT = "Ann works in Rome again café naïve Zoë 3.50 € 日本語 😔 👩‍👩‍👧 ﬁne e\u0301t\u00e9"
WORDS = TEXT.split()
GAPS = [" ", " ", " ", "  ", "\n", "\t", ", ", "-", "\u00a0", " \u3000 ", ""]


def example(text: str, number: int = 0, **more: Any) -> Example:
    given = {"labels": {}, "spans": {}, "annotated": frozenset(["names", "answer"]), **more}
    return Example(f"e{number}", text, **given)


def windows_of(rows: Sequence[Example], tasks: Sequence[Task], max_length: int, **how: Any) -> TokenizedSplit:
    return tokenize_split(rows, tasks, tiny_tokenizer("wordpiece"), Windowing(max_length, **how))


def random_examples(count: int, seed: int) -> list[Example]:
    """Return texts of words, symbols and odd spaces, with spans between any two characters."""
    draw = random.Random(seed)
    examples = []
    for number in range(count):
        text = "".join(draw.choice(WORDS) + draw.choice(GAPS) for _ in range(draw.randint(1, 30))).strip()
        spans: dict[str, list[tuple[int, int]]] = {"x": [], "y": []}
        for _ in range(6):
            start, end = sorted((draw.randrange(len(text)), draw.randint(1, len(text))))
            end = min(end, start + draw.choice([1, 3, 10, 40]))
            if inner := text[start:end].strip():
                start = text.index(inner, start)
                spans[draw.choice("xy")].append((start, start + len(inner)))
        spans = {name: sorted(set(found)) for name, found in spans.items()}
        examples.append(example(text, number, spans=spans))
    return examples


def by_window(split: TokenizedSplit, values_T: np.ndarray) -> list[list[int]]:
    return [values.tolist() for values in np.split(values_T, split.window_start_W1[1:-1])]


def shown_spans(split: TokenizedSplit, task: str) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (window, label, first and last token in the whole split, cut) of every span of every window."""
    spans = split.spans[task]
    for window in range(split.num_windows):
        for label, first, last, cut in spans.rows_S4[spans.start_W1[window] : spans.start_W1[window + 1]]:
            begin = split.window_start_W1[window]
            yield window, int(label), int(begin + first), int(begin + last), int(cut)


def touched(tokenizer: PreTrainedTokenizerBase, text: str, start: int, end: int) -> list[int]:
    """Return the tokens of the whole text with a character of the span, other than white space."""
    tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    inside = {i for i in range(start, end) if not text[i].isspace()}
    return [number for number, span in enumerate(tokens["offset_mapping"]) if inside & set(range(*span))]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_span_becomes_the_smallest_covering_run_of_tokens(family: str) -> None:
    tokenizer = tiny_tokenizer(family)
    examples = random_examples(60, seed=1)
    split = tokenize_split(examples, [NAMES], tokenizer, Windowing(max_length=4096))
    assert split.num_windows == len(examples)
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for window, label, first, last, cut in shown_spans(split, "names"):
        assert cut == 0
        found.setdefault((window, label), []).append((first, last))
    num_spans = 0
    for number, row in enumerate(examples):
        begin, end = split.window_start_W1[number : number + 2]
        text_tokens = np.flatnonzero(split.char_start_T[begin:end] >= 0)
        for label, name in enumerate(NAMES.labels):
            runs = [touched(tokenizer, row.text, *span) for span in row.spans[name]]
            # Some spans have no token, such as a joiner alone.
            expected = [(begin + text_tokens[min(run)], begin + text_tokens[max(run)]) for run in runs if run]
            assert sorted(found.get((number, label), [])) == sorted(expected)
            num_spans += len(expected)
    assert num_spans > 200


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stride", [0, 1, 7])
def test_windows_own_every_token_once_and_in_order(family: str, stride: int) -> None:
    tokenizer = tiny_tokenizer(family)
    examples = random_examples(40, seed=2)
    whole = tokenize_split(examples, [NAMES], tokenizer, Windowing(max_length=4096))
    split = tokenize_split(examples, [NAMES], tokenizer, Windowing(max_length=24, stride=stride, **WINDOWED))
    assert split.num_windows > len(examples)
    assert split.lengths_W.max() <= 24
    example_T = np.repeat(split.window_example_W, split.lengths_W)
    owned = split.owned_T
    for name in ("input_ids_T", "char_start_T", "char_end_T"):
        assert np.array_equal(getattr(split, name)[owned], getattr(whole, name)[whole.owned_T])
    assert np.array_equal(example_T[owned], np.repeat(whole.window_example_W, whole.lengths_W)[whole.owned_T])
    assert np.array_equal(whole.owned_T, whole.char_start_T >= 0)
    assert not (owned & (split.char_start_T < 0)).any()  # special tokens have no owner
    assert split.num_cut_examples == 0


def test_the_window_with_most_context_owns_a_token() -> None:
    text = " ".join("abcdefghijklmnopqrst")  # 20 tokens
    split = windows_of([example(text)], [NAMES], max_length=12, stride=4, **WINDOWED)
    windows = by_window(split, np.arange(split.num_tokens))
    shown = ["".join(text[split.char_start_T[t]] for t in w if split.char_start_T[t] >= 0) for w in windows]
    owned = ["".join(text[split.char_start_T[t]] for t in w if split.owned_T[t]) for w in windows]
    assert shown == ["abcdefghij", "ghijklmnop", "mnopqrst"]
    assert owned == ["abcdefgh", "ijklmn", "opqrst"]


@pytest.mark.parametrize("long_text", ["truncate", "window"])
@pytest.mark.parametrize("family", FAMILIES)
def test_windows_equal_the_tokenizer_s_own(family: str, long_text: str) -> None:
    tokenizer = tiny_tokenizer(family)
    examples = random_examples(20, seed=3)
    split = tokenize_split(examples, [], tokenizer, Windowing(max_length=20, stride=5, long_text=long_text))
    texts, how = [row.text for row in examples], {"truncation": True, "max_length": 20, "stride": 5}
    theirs = tokenizer(texts, **how, return_overflowing_tokens=long_text == "window")
    assert by_window(split, split.input_ids_T) == theirs["input_ids"]
    if long_text == "window":
        assert split.window_example_W.tolist() == theirs["overflow_to_sample_mapping"]
    else:
        whole = [len(tokenizer(text, verbose=False)["input_ids"]) for text in texts]
        assert split.num_cut_examples == sum(length > 20 for length in whole)


def test_a_span_over_the_cut_is_clipped() -> None:
    text = "a b c d e f g h"
    spans = {"x": [(2, 5), (6, 11)], "y": [(12, 15)]}
    rows = [example(text, spans=spans)]
    split = windows_of(rows, [NAMES], max_length=6)  # a b c d
    shown = [span for _, *span in shown_spans(split, "names")]  # label, first, last, cut
    assert shown == [[0, 2, 3, 0], [0, 4, 4, ENDS_AFTER]]
    assert split.num_lost_spans == {"names": 2}
    assert split.num_cut_examples == 1


def test_a_span_over_a_window_s_edge_is_clipped_in_both() -> None:
    rows = [example("a b c d e f g h", spans={"x": [(4, 11)]})]  # c d e f
    split = windows_of(rows, [NAMES], max_length=6, **WINDOWED)
    assert split.window_start_W1[1] == 6
    shown = [(window, *span) for window, _, *span in shown_spans(split, "names")]
    assert shown == [(0, 3, 4, ENDS_AFTER), (1, 6 + 1, 6 + 2, BEGINS_BEFORE)]
    assert split.num_lost_spans == {"names": 1}


def test_an_answer_belongs_to_windows_with_the_whole_answer() -> None:
    text = "a b c d e f g h"
    rows = [example(text, spans={"x": [(6, 9)]}), example(text, 1), example("a b", annotated=())]  # d e
    split = windows_of(rows, [ANSWER], max_length=6, stride=2, **WINDOWED)
    # Windows: abcd cdef efgh, twice, and ab.
    assert split.targets["answer"].tolist() == [[0, 0], [2, 3], [0, 0], *[[0, 0]] * 3, [-100, -100]]
    assert split.annotated["answer"].tolist() == [True] * 6 + [False]


PAIR = ("question", "context")


def pair_example(question: str, context: str, answer: str, number: int = 0) -> Example:
    text = f"{question}\n{context}"
    start = len(question) + 1 + context.index(answer)
    segments = {"question": (0, len(question)), "context": (len(question) + 1, len(text))}
    return example(text, number, spans={"x": [(start, start + len(answer))]}, segments=segments)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pair_is_encoded_as_the_tokenizer_does(family: str) -> None:
    tokenizer = tiny_tokenizer(family)
    rows = [
        pair_example("What is the capital?", "Paris is the capital and the lazy dog sleeps.", "dog", 0),
        pair_example("Who works?", "Ann works in Rome.", "Ann", 1),
    ]
    how = {"max_length": 30, "stride": 4}
    split = tokenize_split(rows, [NAMES], tokenizer, Windowing(**how, pair_segments=PAIR, **WINDOWED))
    texts = ([row.text[slice(*row.segments[name])] for row in rows] for name in PAIR)
    how |= {"truncation": "only_second", "return_overflowing_tokens": True, "return_token_type_ids": True}
    theirs = tokenizer(*texts, **how)
    assert by_window(split, split.input_ids_T) == theirs["input_ids"]
    if "token_type_ids" in tokenizer.model_input_names:
        assert split.type_ids_T is not None
        assert by_window(split, split.type_ids_T) == theirs["token_type_ids"]
    whole = {(window, first, last) for window, _, first, last, cut in shown_spans(split, "names") if not cut}
    chars = {(split.window_example_W[w], split.char_start_T[i], split.char_end_T[j]) for w, i, j in whole}
    assert {rows[number].text[start:end] for number, start, end in chars} == {"dog", "Ann"}
    # The question is repeated in every window and owned once.
    for number, row in enumerate(rows):
        of_row = np.repeat(split.window_example_W, split.lengths_W) == number
        owned = of_row & split.owned_T
        shown = zip(split.char_start_T[owned], split.char_end_T[owned], strict=True)
        assert "".join(row.text[a:b] for a, b in shown) == "".join(row.text.split())


def test_a_long_question_takes_at_most_half_of_the_room() -> None:
    row = pair_example("q " * 40 + "q", "a b c d e f g h", "g")
    split = windows_of([row], [ANSWER], 13, stride=2, pair_segments=PAIR, **WINDOWED)
    assert split.lengths_W.tolist() == [13, 13]  # [CLS] 5 q [SEP] 5 of the context [SEP]
    assert split.num_cut_examples == 1
    start, end = split.targets["answer"][-1] + split.window_start_W1[-2]
    assert row.text[split.char_start_T[start] : split.char_end_T[end]] == "g"


def test_a_text_without_tokens_is_a_window_of_special_tokens() -> None:
    split = windows_of([example("\u200b"), example("a", 1)], [NAMES], 16)
    assert split.lengths_W.tolist() == [2, 3]
    assert split.owned_T.tolist() == [False, False, False, True, False]
