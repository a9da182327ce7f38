from __future__ import annotations

from pathlib import Path

import pytest
from tiny_tokenizers import tiny_tokenizer, tokenize_split

from hpo.config.data_config import DataConfig
from hpo.data.dataset import load_data
from hpo.data.lengths import length_facts
from hpo.data.tokenized_split import Windowing


def test_lengths_and_what_is_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="hpo.data")
    sizes = {"num_train": 60, "num_validation": 20, "num_test": 20, "max_sentences": 12}
    dataset = load_data(DataConfig.model_validate({"source": "synthetic", "synthetic": sizes}))
    tokenizer, windowings = tiny_tokenizer("wordpiece"), [Windowing(24), Windowing(40, "window", 6)]
    found = length_facts(dataset, tokenizer, windowings, tmp_path)
    assert caplog.messages[0] == "tokenising 60 texts of the train split (whole)"
    for name, examples in dataset.splits.items():
        whole = tokenize_split(examples, dataset.tasks, tokenizer, Windowing(10**6))
        assert found.num_tokens[name] == whole.num_tokens
        assert found.quantiles[name][0] == whole.lengths_W.min()
        assert found.quantiles[name][100] == whole.lengths_W.max()
        total = sum(len(spans) for example in examples for spans in example.spans.values())
        assert found.num_spans["evidence"][name] == total
        for cut, windowing in zip(found.cuts, windowings, strict=True):
            split = tokenize_split(examples, dataset.tasks, tokenizer, windowing)
            assert cut.num_over[name] == (whole.lengths_W > windowing.max_length).sum() > 0
            assert cut.num_windows[name] == split.num_windows
            assert cut.num_lost_spans["evidence"][name] == split.num_lost_spans["evidence"]
    caplog.clear()
    assert length_facts(dataset, tokenizer, windowings, tmp_path) == found
    assert caplog.messages == []
