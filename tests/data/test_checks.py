from pathlib import Path
from typing import Any

import pytest
from support.jsonl_sets import load, load_set, write_set
from support.tiny_tokenizers import tiny_tokenizer, tokenize_split

from hpo.data.checks import DataFacts, Leak, data_facts, length_facts
from hpo.tasks.tokenized_split import Windowing

TASKS: dict[str, Any] = {
    "tone": {"kind": "single_label", "classes": ["calm", "angry", "shy"]},
    "tags": {"kind": "multi_label", "classes": ["late", "dear"]},
    "grade": {"kind": "regression"},
    "who": {"kind": "token_classification", "span_names": ["person", "place"]},
}


def row(number: int, text: str, spans: Any = None, **labels: Any) -> dict[str, Any]:
    more = {} if spans is None else {"spans": spans}
    return {"id": f"r{number}", "text": text, "labels": labels, **more}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> DataFacts:
    folder = tmp_path_factory.mktemp("set")
    train = [
        row(0, "Ann in Rome", {"person": [[0, 3]], "place": [[7, 11]]}, tone="calm", tags=["late", "dear"]),
        row(1, "Ann in Rome", {}, tone="angry", tags=["dear", "late"], grade=1.0),
        row(2, "ann  in\nrome ", tone="calm", tags=[], grade=3.0),
        row(3, "Bob", {"person": [[0, 3]]}, tone="calm"),
    ]
    validation = [
        row(10, "BOB", {}, tone="shy", tags=["late"], grade=2.0),
        row(11, "Bob", tone="calm"),
        row(12, "new", tone="calm"),
    ]
    return data_facts(
        load_set(write_set(folder, TASKS, train=train, validation=validation, test=[row(20, "x")]))
    )


def test_repeated_texts_are_counted_without_regard_to_case(facts: DataFacts) -> None:
    found = {name: (of.num_rows, of.num_duplicates) for name, of in facts.splits.items()}
    assert found == {"train": (4, 2), "validation": (3, 1), "test": (1, 0)}
    assert facts.leaks == [Leak("validation", "train", 2, ("r10", "r3"))]


def test_classes_spans_and_numbers_are_counted(facts: DataFacts) -> None:
    tone, tags, grade, who = facts.tasks
    assert tone.num_annotated == {"train": 4, "validation": 3, "test": 0}
    assert tone.counts["train"] == {"calm": 3, "angry": 1, "shy": 0}
    assert tone.counts["validation"] == {"calm": 2, "angry": 0, "shy": 1}
    assert tags.counts["train"] == {"late": 2, "dear": 2}
    assert (tags.num_annotated["train"], tags.num_empty["train"]) == (3, 1)
    assert (who.num_annotated["train"], who.num_empty["train"]) == (3, 1)
    assert who.counts["train"] == {"person": 2, "place": 1}
    assert grade.numbers["train"] == {"minimum": 1.0, "mean": 2.0, "std": 1.0, "maximum": 3.0}
    assert "test" not in grade.numbers


def test_lengths_and_losses_by_cuts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="hpo.data")
    sizes = {"num_train": 60, "num_validation": 20, "num_test": 20, "max_sentences": 12}
    dataset = load(source="synthetic", synthetic=sizes)
    tokenizer, windowings = tiny_tokenizer("wordpiece"), [Windowing(24), Windowing(40, "window", 6)]
    found = length_facts(dataset, tokenizer, windowings, tmp_path)
    for name, examples in dataset.splits.items():
        whole = tokenize_split(examples, dataset.tasks, tokenizer, Windowing(10**6))
        lengths = whole.lengths_W
        assert found.num_tokens[name] == whole.num_tokens
        assert (found.quantiles[name][0], found.quantiles[name][100]) == (lengths.min(), lengths.max())
        total = sum(len(spans) for example in examples for spans in example.spans.values())
        assert found.num_spans["evidence"][name] == total
        for cut, windowing in zip(found.cuts, windowings, strict=True):
            split = tokenize_split(examples, dataset.tasks, tokenizer, windowing)
            assert cut.num_over[name] == (lengths > windowing.max_length).sum() > 0
            assert cut.num_windows[name] == split.num_windows
            assert cut.num_lost_spans["evidence"][name] == split.num_lost_spans["evidence"]
    caplog.clear()
    assert length_facts(dataset, tokenizer, windowings, tmp_path) == found
    assert caplog.messages == []
