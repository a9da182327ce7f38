"""Lengths and losses that follow from whole texts are those that tokenising at each length counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jsonl_sets import load_set, write_set
from tiny_tokenizers import tiny_tokenizer, tokenize_split

from hpo.config.data_config import DataConfig
from hpo.data.dataset import DataSet, load_data
from hpo.data.lengths import length_facts
from hpo.data.tokenized_split import Windowing


def posts() -> DataSet:
    sizes = {"num_train": 60, "num_validation": 20, "num_test": 20, "max_sentences": 12}
    return load_data(DataConfig.model_validate({"source": "synthetic", "synthetic": sizes}))


def pairs(folder: Path) -> DataSet:
    """Questions and contexts of many lengths, with answers near their ends."""

    def row(number: int) -> dict[str, Any]:
        question, words = "what is it? " * (1 + number % 5), [f"word{i}" for i in range(3 + 5 * number)]
        context = " ".join(words)
        at = len(question) + context.index(words[-2])
        return {
            "id": f"{number}",
            "text": question + context,
            "labels": {},
            "spans": {"answer": [[at, at + len(words[-2])]]},
            "segments": {
                "question": [0, len(question) - 1],
                "context": [len(question), len(question) + len(context)],
            },
        }

    tasks = {"reply": {"kind": "span_extraction", "span_names": ["answer"], "inside_segment": "context"}}
    rows = [row(number) for number in range(20)]
    write_set(folder, tasks, train=rows[1:], validation=[rows[0]])
    return load_set(folder, pair_segments=["question", "context"])


@pytest.mark.parametrize("long_text", ["truncate", "window"])
@pytest.mark.parametrize("family", ["wordpiece", "suffix_only", "byte_level"])
@pytest.mark.parametrize("are_pairs", [False, True])
def test_what_is_cut_is_what_tokenising_cuts(
    are_pairs: bool, family: str, long_text: str, tmp_path: Path
) -> None:
    if are_pairs and family == "suffix_only":
        pytest.skip("span_extraction needs a special token before the text")
    dataset = pairs(tmp_path / "set") if are_pairs else posts()
    segments = ("question", "context") if are_pairs else None
    windowings = [Windowing(length, long_text, 6, segments) for length in (24, 40, 80)]
    tokenizer = tiny_tokenizer(family)
    found = length_facts(dataset, tokenizer, windowings, tmp_path / "cache")
    num_over = 0
    for cut, windowing in zip(found.cuts, windowings, strict=True):
        assert cut.max_length == windowing.max_length
        for name, examples in dataset.splits.items():
            split = tokenize_split(examples, dataset.tasks, tokenizer, windowing)
            assert cut.num_windows[name] == split.num_windows
            lost = {task: by[name] for task, by in cut.num_lost_spans.items()}
            assert lost == split.num_lost_spans
            if long_text == "truncate":
                assert cut.num_over[name] == split.num_cut_examples
            num_over += cut.num_over[name]
    assert num_over > 20, "or nothing was shown"
    for name, examples in dataset.splits.items():
        whole = tokenize_split(examples, dataset.tasks, tokenizer, Windowing(10**6, pair_segments=segments))
        assert found.num_tokens[name] == whole.num_tokens
        assert found.quantiles[name][0] == whole.lengths_W.min()
        assert found.quantiles[name][100] == whole.lengths_W.max()
        total = sum(len(spans) for example in examples for spans in example.spans.values())
        assert {by[name] for by in found.num_spans.values()} == {total}


def test_a_second_look_takes_the_tokens_from_the_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="hpo.data")
    dataset, tokenizer = posts(), tiny_tokenizer("wordpiece")
    first = length_facts(dataset, tokenizer, [Windowing(24)], tmp_path)
    assert caplog.messages[0] == "tokenising 60 texts of the train split (whole)"
    caplog.clear()
    assert length_facts(dataset, tokenizer, [Windowing(24)], tmp_path) == first
    assert caplog.messages == []
