"""Several sources as one data set."""

import re
from pathlib import Path

import pytest
from support.jsonl_sets import load, load_set, write_set
from support.several_sources import SIZES, TASKS, write_sources
from support.tiny_tokenizers import tiny_tokenizer, tokenize_split

from hpo.errors import DataError
from hpo.tasks.tokenized_split import Windowing


def test_sources_are_joined_row_by_row(tmp_path: Path) -> None:
    data = load(**write_sources(tmp_path))
    alone = {name: load_set(tmp_path / name) for name in TASKS}
    assert [task.name for task in data.tasks] == ["topic", "tone", "size"]
    assert list(data.sources) == ["train", "validation", "test"]
    for split, rows in data.splits.items():
        assert data.sources[split] == {name: SIZES[name][split] for name in TASKS}
        expected = [(name, row) for name in TASKS for row in alone[name].splits[split]]
        assert [row.id for row in rows] == [f"{name}/{row.id}" for name, row in expected]
        assert [row.group for row in rows] == [f"{name}/{row.group}" for name, row in expected]
        assert [(row.text, row.labels) for row in rows] == [(row.text, row.labels) for _, row in expected]
    news, mail = data.splits["train"][0], data.splits["train"][-1]
    assert (news.annotated, mail.annotated) == ({"topic", "tone"}, {"size", "tone"})


def test_a_shared_regression_is_scaled_by_the_rows_of_all_sources(tmp_path: Path) -> None:
    data = write_sources(tmp_path)
    copy = {**data["sources"][1], "name": "copy", "limits": {"train": 5}}
    both = load(sources=[data["sources"][1], copy])
    (size,) = (task for task in both.tasks if task.name == "size")
    targets = [row.labels["size"] for row in both.splits["train"]]
    assert len(targets) == 17
    assert size.target_mean == pytest.approx(sum(targets) / 17)


def test_a_task_is_renamed(tmp_path: Path) -> None:
    other = {"kind": "single_label", "classes": ["good", "bad"]}
    section = write_sources(tmp_path, tasks={**TASKS["mail"], "tone": other})
    message = "the task `tone` must be the same in `news` and `mail`.*`rename: {tone: mail_tone}` for `mail`"
    with pytest.raises(DataError, match=message):
        load(**section)
    section["sources"][1]["rename"] = {"tone": "mail_tone"}
    data = load(**section)
    assert [task.name for task in data.tasks] == ["topic", "tone", "size", "mail_tone"]
    assert data.splits["train"][-1].annotated == {"size", "mail_tone"}
    assert data.splits["train"][-1].labels.keys() == {"size", "mail_tone"}


def test_evidence_follows_a_renamed_task() -> None:
    synthetic = {"num_train": 20, "num_validation": 20, "num_test": 20}
    source = {"source": "synthetic", "synthetic": synthetic}
    rename = {name: f"other_{name}" for name in ("criteria", "evidence", "severity", "burden")}
    data = load(sources=[{"name": "a", **source}, {"name": "b", **source, "rename": rename}])
    evidence = {task.name: task.evidence_for for task in data.tasks if task.evidence_for}
    assert evidence == {"evidence": "criteria", "other_evidence": "other_criteria"}


def test_the_fingerprint_depends_on_rows_names_and_order(tmp_path: Path) -> None:
    section = write_sources(tmp_path)
    renamed = {"sources": [section["sources"][0], {**section["sources"][1], "name": "post"}]}
    turned = {"sources": section["sources"][::-1]}
    prints = [load(**one).fingerprint for one in (section, section, renamed, turned)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
    (tmp_path / "mail" / "test.jsonl").unlink()
    assert load(**section).fingerprint not in prints


def test_spans_belong_to_the_tasks_of_their_source(tmp_path: Path) -> None:
    """Two sources have span tasks whose span names are the same."""
    for name, text in (("a", "Anna met Bert and Carl"), ("b", "Dora")):
        spans = [[start.start(), start.end()] for start in re.finditer(r"[A-Z]\w+", text)]
        row = {"text": text, "spans": {"person": spans}}
        tasks = {name: {"kind": "token_classification", "span_names": ["person"]}}
        rows = {split: [row | {"id": split}] for split in ("train", "validation")}
        write_set(tmp_path / name, {"tasks": tasks}, **rows)
    sources = [{"name": name, "source": "jsonl", "path": str(tmp_path / name)} for name in ("a", "b")]
    data = load(sources=sources)
    tokens = tokenize_split(data.splits["train"], data.tasks, tiny_tokenizer("wordpiece"), Windowing(4))
    assert {name: len(spans.rows_S4) for name, spans in tokens.spans.items()} == {"a": 1, "b": 1}
    assert tokens.num_lost_spans == {"a": 2, "b": 0}
