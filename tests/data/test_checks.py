from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.jsonl_sets import load, load_set, write_set
from support.tiny import study_of
from support.tiny_tokenizers import tiny_tokenizer, tokenize_split

from hpo.data.checks import (
    CutFacts,
    DataFacts,
    Leak,
    LengthFacts,
    SplitFacts,
    TaskFacts,
    data_advice,
    data_facts,
    length_facts,
)
from hpo.data.span_ends import SpanEnds
from hpo.tasks.tokenized_split import Windowing

TASKS: dict[str, Any] = {
    "tone": {"kind": "single_label", "classes": ["calm", "angry", "shy"]},
    "tags": {"kind": "multi_label", "classes": ["late", "dear"]},
    "grade": {"kind": "regression"},
    "who": {"kind": "token_classification", "span_names": ["person", "place"]},
}
TASKS_OF_TONE = {"tone": TASKS["tone"]}


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
    validation = [row(10, "BOB", {}, tone="shy", tags=["late"], grade=2.0)]
    validation += [row(11, "Bob", tone="calm"), row(12, "new", tone="calm")]
    write_set(folder, TASKS, train=train, validation=validation, test=[row(20, "x")])
    return data_facts(load_set(folder))


def test_repeated_texts_are_counted_without_regard_to_case(facts: DataFacts) -> None:
    found = {name: (of.num_rows, of.num_duplicates) for name, of in facts.splits.items()}
    assert found == {"train": (4, 2), "validation": (3, 1), "test": (1, 0)}
    assert facts.leaks == [Leak("validation", "train", 2, ("r10", "r3"))]


def test_near_duplicates_and_groups_are_counted_in_splits_for_evaluation(tmp_path: Path) -> None:
    text = " ".join(f"word{n}" for n in range(60))
    texts = ["a", "b", "A ", text, text.replace("word30", "other"), "c"]
    validation = [
        row(n, one, tone="calm") | {"group": "bc"[n > 4] * (n in (1, 2))} for n, one in enumerate(texts)
    ]
    train = [row(n, text, tone="angry") for n in range(10, 12)]
    splits = data_facts(
        load_set(write_set(tmp_path, TASKS_OF_TONE, train=train, validation=validation))
    ).splits
    assert splits["validation"] == SplitFacts(6, 1, num_alike=4, num_groups=3)
    assert splits["train"] == SplitFacts(2, 1)
    facts = DataFacts({"validation": SplitFacts(1000, 100, 300, 812)}, [], [], {})
    (sentence,) = facts.evidence()
    assert sentence.startswith(
        "The 1,000 rows of validation are 812 independent pieces of evidence: 300 rows"
    )


@pytest.mark.parametrize("source", ["jsonl", "csv", "parquet", "hub"])
def test_advice_about_groups_names_the_key_of_the_format(source: str) -> None:
    at: dict[str, Any] = {"hub": {"name": "x"}} if source == "hub" else {"path": "x"}
    at |= {} if source == "jsonl" else {"columns": {"labels": {"tone": "tone"}}}
    (sentence,) = advice(leaks=LEAK, source=source, tasks=TASKS_OF_TONE, **at)
    assert ("same `group`." in sentence) == (source == "jsonl"), sentence
    assert ("same `group` (`columns.group` in `data` names its column)." in sentence) == (source != "jsonl")


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


SPLITS = ("train", "validation")
ROWS = dict.fromkeys(SPLITS, 100)


def task(labels: Mapping[str, int], kind: str = "single_label", **facts: Any) -> TaskFacts:
    """Return the facts of a task with these numbers of rows of each class in both splits."""
    given = {"num_rows": ROWS, "num_annotated": ROWS, "counts": {one: dict(labels) for one in SPLITS}}
    return TaskFacts("tone", kind, tuple(labels), **(given | facts))


def advice(*tasks: TaskFacts, leaks: Any = (), lost: int = 0, over: int = 0, **data: Any) -> list[str]:
    """Return the advice about tasks, with `lost` of 100 spans and `over` of 200 texts at `max_length` 16."""
    rows = dict.fromkeys(SPLITS, SplitFacts(100, 0))
    cut = CutFacts(16, {"train": over}, {"train": 100}, {"who": {"train": lost}})
    lengths = LengthFacts(ROWS, {"train": [45] * 101}, {"who": {"train": 100}}, [cut])
    config = study_of(data={"source": "synthetic", **data})
    return data_advice(DataFacts(rows, tasks, list(leaks), {}), lengths, config)


def test_good_data_need_no_advice() -> None:
    assert advice(task({"calm": 50, "angry": 50})) == []


LEAK = [Leak("validation", "train", 2, ("v1", "r1"))]
CSV = {"source": "csv", "path": "x", "tasks": {"tone": {"kind": "multi_label"}}}
EQUAL = dict.fromkeys(("minimum", "maximum"), 5.0)
BOTH, CALM = {"calm": 1, "angry": 1}, {"calm": 1, "angry": 0}


@pytest.mark.parametrize(
    ("facts", "more", "text"),
    [
        ([], {"leaks": LEAK}, "2 of 100 texts (2.0 %) of validation are in train too (row `v1` is `r1`)"),
        ([], {"over": 50}, "50 of 200 texts (25.0 %) of the data are cut at `max_length` 16: set"),
        ([], {"lost": 100}, "100 of 100 spans (100.0 %) of `who` are lost at `max_length` 16: set"),
        ([], {"lost": 100, "long_text": "window"}, "16: raise `max_length`, or `data.stride` for"),
        ([task(BOTH, num_annotated=ROWS | {"train": 4})], {}, "96 of 100 rows (96.0 %) of train are not"),
        ([task(BOTH, num_annotated=ROWS | {"train": 1}, num_rows=ROWS | {"train": 1})], {}, "be learnt"),
        ([task({"calm": 0, "angry": 1})], {}, "`tone`: no row has `calm`: is the spelling that of the data?"),
        ([task(BOTH, counts={"train": BOTH, "validation": CALM})], {}, "its metrics say nothing"),
        ([task(BOTH, counts={"train": CALM, "validation": BOTH})], {}, "no model can learn"),
        ([task({}, "regression", numbers={"train": EQUAL})], {}, "all 100 numbers of train are 5: there is"),
        ([task({}, "regression", numbers={"validation": EQUAL})], {}, "numbers of validation are 5: r2 is"),
        ([task({}, "regression", num_annotated=ROWS | {"validation": 1})], {}, "validation has no `score`"),
        ([task(BOTH, "multi_label", num_empty={"train": 99})], CSV, "set `data.csv.empty: unlabelled`."),
        (
            [task(BOTH, span_warnings=SpanEnds(9, 4, "r2", "[Ann]a").warnings())],
            {},
            "`tone`: 4 of 9 spans (44.4 %) begin",
        ),
    ],
)
def test_a_fault_of_the_data_is_reported(facts: list[TaskFacts], more: dict[str, Any], text: str) -> None:
    found = advice(*facts, **more)
    assert sum(text in one for one in found) == 1, found


ALIKE = [("Ice cream", "ice-cream"), ("caf\u00e9", "cafe\u0301"), ("late", "la\u200bte"), ("1", "1.0")]
OTHER = [("A", "A-"), ("1-2", "12"), ("-1", "1"), ("5.1", "5.10"), ("late", "later")]


def test_similar_classes_are_reported() -> None:
    for pair in ALIKE:
        (text,) = advice(task(dict.fromkeys(pair, 1)))
        assert "are different classes, but" in text
    assert not any(advice(task(dict.fromkeys(pair, 1))) for pair in OTHER)


def test_unknown_and_equal_tokens_are_reported(tmp_path: Path) -> None:
    words = [letter * 150 for letter in "abc"]  # too long for a word: one unknown token
    task = {"mood": {"kind": "single_label", "classes": ["a", "b"]}}
    rows = [row(n, words[n] if n < 3 else f"the text {n}", mood="ab"[n % 2]) for n in range(6)]
    dataset = load_set(write_set(tmp_path / "set", task, train=rows, validation=[row(9, "other", mood="a")]))
    found = length_facts(dataset, tiny_tokenizer("wordpiece"), [Windowing(24)], tmp_path)
    assert (found.num_unknown_tokens >= 3, found.num_texts_of_equal_tokens >= 3) == (True, True)
    told = data_advice(data_facts(dataset), found, study_of(data={"source": "synthetic"}))
    assert any("unknown to the tokenizer" in one for one in told)
    assert any("equal in tokens to a different text" in one for one in told)
