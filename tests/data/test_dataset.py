import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.jsonl_sets import load_set, write_set

from hpo.data.dataset import DataSet
from hpo.errors import DataError

TASKS = {"tone": {"kind": "single_label", "classes": ["calm", "angry"]}}


def rows(count: int, first: int = 0, **more: Any) -> list[dict[str, Any]]:
    numbers, tone = range(first, first + count), [{"tone": "calm"}, {"tone": "angry"}]
    return [{"id": f"row{i}", "text": f"text {i}", "labels": tone[i % 2], **more} for i in numbers]


def ids(dataset: DataSet, split: str) -> list[str]:
    return [example.id for example in dataset.splits[split]]


def test_a_row_becomes_an_example(tmp_path: Path) -> None:
    line = {
        "id": "a",
        "text": "Who? Ann, café.",
        "labels": {"tone": "calm", "topics": [], "grade": 2},
        "spans": {"person": [[4, 8]], "place": [[9, 14]]},  # with white space, which is removed
        "group": "g",
        "segments": {"question": [0, 4]},
        "alt_spans": {"person": [[5, 9], [5, 8]]},
    }
    tasks = {
        "tone": {"kind": "single_label", "classes": ["calm", "angry"]},
        "topics": {"kind": "multi_label", "classes": ["work"]},
        "grade": {"kind": "regression"},
        "names": {"kind": "token_classification", "span_names": ["person", "place"]},
        "proof": {"kind": "span_per_label", "span_names": ["work"], "evidence_for": "topics"},
    }
    write_set(tmp_path, tasks, train=[line], validation=[{**line, "id": "v", "group": None}])
    dataset = load_set(tmp_path)
    example = dataset.splits["train"][0]
    assert (example.id, example.text, example.group) == ("a", "Who? Ann, café.", "g")
    assert example.labels == {"tone": "calm", "topics": [], "grade": 2.0}
    assert example.spans == {"person": [(5, 8)], "place": [(10, 14)]}
    assert example.segments == {"question": (0, 4)}
    assert example.alt_spans == {"person": [(5, 8), (5, 9)]}
    assert example.annotated == set(tasks)
    assert [task.name for task in dataset.tasks] == list(tasks)
    assert list(dataset.splits) == ["train", "validation"]


def test_evidence_without_its_classes_is_not_annotated(tmp_path: Path) -> None:
    tasks = {
        "topics": {"kind": "multi_label", "classes": ["work"]},
        "proof": {"kind": "span_per_label", "span_names": ["work"], "evidence_for": "topics"},
    }
    base = {"id": "a", "text": "work", "labels": {"topics": ["work"]}, "spans": {"work": [[0, 4]]}}
    lines = [base, {**base, "id": "b", "labels": {}}, {"id": "c", "text": "x", "labels": {"topics": []}}]
    dataset = load_set(write_set(tmp_path, tasks, train=lines, validation=[{**base, "id": "v"}]))
    annotated = [example.annotated for example in dataset.splits["train"]]
    assert annotated == [{"proof", "topics"}, set(), {"topics"}]


def test_absent_splits_are_drawn_by_id_in_any_order(tmp_path: Path) -> None:
    options = {"validation_fraction": 0.2, "test_fraction": 0.1}
    dataset = load_set(write_set(tmp_path, TASKS, train=rows(2000)), **options)
    sizes = {split: len(examples) for split, examples in dataset.splits.items()}
    assert sum(sizes.values()) == 2000
    assert sizes["validation"] == pytest.approx(400, abs=60)
    assert sizes["test"] == pytest.approx(200, abs=50)
    again = load_set(write_set(tmp_path, TASKS, train=rows(2000)[::-1]), **options)
    for split in sizes:
        assert ids(again, split) == ids(dataset, split)[::-1]


def test_drawn_splits_keep_groups_and_existing_splits(tmp_path: Path) -> None:
    train = [{**line, "group": f"g{i // 10}"} for i, line in enumerate(rows(300))]
    write_set(tmp_path, TASKS, train=train, test=rows(10, first=1000))
    dataset = load_set(tmp_path, validation_fraction=0.2, test_fraction=0.2)
    assert ids(dataset, "test") == [f"row{i}" for i in range(1000, 1010)]
    trained, validated = ({row.group for row in dataset.splits[split]} for split in ("train", "validation"))
    assert len(trained) + len(validated) == 30


def test_a_split_is_drawn_from_few_groups(tmp_path: Path) -> None:
    train = [{**line, "group": "ab"[i > 2] if i < 20 else "c"} for i, line in enumerate(rows(40))]
    dataset = load_set(write_set(tmp_path, TASKS, train=train), validation_fraction=0.1)
    assert ids(dataset, "validation") == ["row0", "row1", "row2"], "of 3, 17 and 20 rows, 3 are next to 4"
    write_set(tmp_path, TASKS, train=[{**line, "group": "a"} for line in train])
    with pytest.raises(DataError, match="40 training rows with 1 group are too few to draw"):
        load_set(tmp_path)


def test_groups_of_evidence_join_declared_groups_and_repeated_texts(tmp_path: Path) -> None:
    lines = [{**line, "group": "a"} for line in rows(2)] + rows(3, first=2)
    lines[4]["text"] = "TEXT 2"
    dataset = load_set(write_set(tmp_path, TASKS, train=rows(4, first=50), validation=lines))
    assert dataset.evidence_groups("validation") == [0, 0, 1, 2, 1]


def test_limits_sample_the_file_and_larger_ones_keep_the_sample(tmp_path: Path) -> None:
    write_set(tmp_path, TASKS, train=rows(500), validation=rows(20, first=1000))
    small = load_set(tmp_path, limits={"train": 50})
    large = load_set(tmp_path, limits={"train": 100, "validation": 99})
    assert len(small.splits["train"]) == 50
    assert [len(examples) for examples in large.splits.values()] == [100, 20]
    assert set(ids(small, "train")) < set(ids(large, "train"))
    assert ids(large, "train") == sorted(ids(large, "train"), key=lambda name: int(name[3:]))
    assert max(int(name[3:]) for name in ids(small, "train")) > 250


def test_missing_classes_come_from_the_training_rows(tmp_path: Path) -> None:
    tasks = {
        "tone": {"kind": "single_label"},
        "topics": {"kind": "multi_label"},
        "proof": {"kind": "span_per_label", "evidence_for": "topics"},
    }
    line = {"text": "work", "spans": {"b": [[0, 4]]}}
    train = [
        {**line, "id": "1", "labels": {"tone": "z", "topics": ["b", "a"]}},
        {**line, "id": "2", "labels": {"tone": "y", "topics": ["b"]}},
    ]
    write_set(tmp_path, tasks, train=train, validation=[{**train[0], "id": "3"}])
    found = {task.name: task.labels for task in load_set(tmp_path).tasks}
    assert found == {"tone": ("y", "z"), "topics": ("a", "b"), "proof": ("a", "b")}


def test_fingerprint_is_equal_in_every_process(tmp_path: Path) -> None:
    tasks = {name: {"kind": "multi_label", "classes": ["a", "b"]} for name in "pqrstuvw"}
    lines = [{"id": str(i), "text": "x", "labels": {name: ["a", "b"] for name in tasks}} for i in range(2)]
    write_set(tmp_path, tasks, train=lines[:1], validation=lines[1:])
    code = "import sys; from support import jsonl_sets; print(jsonl_sets.load_set(sys.argv[1]).fingerprint)"
    fingerprint = load_set(tmp_path).fingerprint
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", code, str(tmp_path)]
        output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        assert output.strip() == fingerprint
    write_set(tmp_path, tasks, train=[{**lines[0], "text": "other"}])
    assert load_set(tmp_path).fingerprint != fingerprint
