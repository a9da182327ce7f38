"""Bad data end as one DataError with file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.jsonl_sets import load, load_set, write_set

from hpo.errors import DataError

TASKS: dict[str, Any] = {
    "tone": {"kind": "single_label", "classes": ["calm", "angry"]},
    "topics": {"kind": "multi_label", "classes": ["work", "home"]},
    "names": {"kind": "token_classification", "span_names": ["person", "place"], "spans_may_overlap": False},
    "answer": {"kind": "span_extraction", "span_names": ["answer"], "inside_segment": "context"},
    "proof": {"kind": "span_per_label", "span_names": ["work", "home"], "evidence_for": "topics"},
    "grade": {"kind": "regression"},
}
GOOD: dict[str, Any] = {
    "id": "a",
    "text": "Who works? Ann works in Rome.",
    "labels": {"tone": "calm", "topics": ["work"], "grade": 1.5},
    "spans": {"person": [[11, 14]], "place": [[24, 28]], "answer": [[11, 14]], "work": [[11, 29]]},
    "segments": {"question": [0, 10], "context": [11, 29]},
}


def write(folder: Path, *rows: object, tasks: object = TASKS) -> Path:
    """Write a data set with the good row and `rows` for training."""
    return write_set(folder, tasks, train=[GOOD, *rows], validation=[{**GOOD, "id": "v"}])


def refused(message: str, folder: Path, **options: Any) -> None:
    with pytest.raises(DataError, match=message):
        load_set(folder, **options)


def changed(**changes: Any) -> dict[str, Any]:
    """Return the good row with another id and these keys; None removes a key."""
    row = {**GOOD, "id": "b", **changes}
    return {key: value for key, value in row.items() if value is not None}


def label(**labels: Any) -> dict[str, Any]:
    return changed(labels={**GOOD["labels"], **labels})


def span(**spans: Any) -> dict[str, Any]:
    return changed(spans={**GOOD["spans"], **spans})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"id": "b", ', "must be one JSON object in UTF-8, but Expecting property name"),
        ('{"id": "b", "text": "a", "text": "c"}', "the key `text` must occur once in its object"),
        (changed(id="a"), "`id` must be unique, but `a` is that of {train}:1 too"),
        (changed(text=None), "`text` must be a string, but the row has no such key"),
        (changed(text=" \n\t"), "`text` is empty"),
        ('{"id": "b", "text": "a \\ud83d"}', "half of a surrogate pair"),
        (changed(labels=None, lables={}), "unknown key `lables`. Did you mean `labels`?"),
        (label(names="x"), "labels.names: `token_classification` is annotated in `spans`"),
        (label(tone="clam", grade="x"), "labels.grade must be a finite number, but got 'x'"),
        (label(grade=float("nan")), "labels.grade must be a finite number, but got nan"),
        (
            {"id": "b", "text": "Zoë", "spans": {"person": [[0, 4]]}},
            "the text of 3 characters: 0 <= start < end <= 3 (spans count characters, not its 4 bytes)",
        ),
        (span(person=[[0.0, 3.0]]), "a span must be [start, end] in whole characters, but got [0.0, 3.0]"),
        (span(person=[[10, 11]]), "spans.person: [10, 11] covers only white space"),
        (span(person=[[11, 14], [11, 14]]), "spans.person has the same span twice"),
        (span(place=[[12, 16]]), "spans.person [11, 14] and spans.place [12, 16] overlap, but `names` has"),
        (span(answer=[[11, 14], [24, 28]]), "`answer` takes one span a row, but got 2"),
        (span(answer=[[0, 3]]), "spans.answer: [0, 3] must lie inside segment `context` [11, 29]"),
        (span(home=[[11, 14]]), "spans.home is evidence for a class that labels.topics does not name"),
    ],
)
def test_a_bad_row_is_refused_with_file_and_line(tmp_path: Path, row: object, message: str) -> None:
    train = write(tmp_path, row) / "train.jsonl"
    with pytest.raises(DataError) as caught:
        load_set(tmp_path)
    first, *listed = str(caught.value).splitlines()
    assert first == "1 bad row in the data; mend or remove:"
    assert all(line.startswith(f"  {train}:2: ") for line in listed)
    assert any(message.replace("{train}", str(train)) in line for line in listed)


def test_three_examples_of_each_kind_of_problem_are_reported(tmp_path: Path) -> None:
    words = ["clam", "angri", "None", "x`y", "a, but b"]
    train = [{**label(tone=words[i % 5]), "id": str(i)} for i in range(1030)]
    validation = [{**label(**{f"t{chr(97 + i)}": "x"}), "id": str(i)} for i in range(12)]
    write_set(tmp_path, TASKS, train=train, validation=validation)
    with pytest.raises(DataError) as caught:
        load_set(tmp_path)
    first, *listed = str(caught.value).splitlines()
    assert first == "1,042 bad rows in the data; mend or remove:"
    assert listed[0].endswith("train.jsonl:1: labels.tone: unknown class `clam`. Did you mean `calm`?")
    assert listed[3] == "  ... and 1,027 more like these"
    assert len(listed) == 4 + 9 + 1, "ten kinds"
    assert listed[-1] == "  ... and 3 other kinds of problems"


def test_an_id_or_group_in_two_splits_is_refused(tmp_path: Path) -> None:
    validation = [GOOD, changed(id="c", group="g")]
    write_set(tmp_path, TASKS, train=[GOOD, changed(group="g")], validation=validation)
    with pytest.raises(DataError) as caught:
        load_set(tmp_path)
    _, first, second = str(caught.value).splitlines()
    path = tmp_path / "validation.jsonl"
    assert first == f"  {path}:1: `id` must be unique, but `a` is that of {tmp_path / 'train.jsonl'}:1 too"
    assert second == f"  {path}:2: a group must stay in one split, but `g` is in train and validation"


def test_missing_and_empty_files_are_named_with_the_nearest(tmp_path: Path) -> None:
    refused(r"tasks\.json: no such file.*There is no folder", tmp_path / "nowhere")
    write(tmp_path)
    (tmp_path / "validation.jsonl").write_text("\n")
    refused(r"validation\.jsonl: the validation split must have rows, but it is empty", tmp_path)
    (tmp_path / "train.jsonl").rename(tmp_path / "trian.jsonl")
    refused(r"train\.jsonl: no such file; the train split.*Did you mean `trian.jsonl`", tmp_path)


def test_unusable_files_are_refused(tmp_path: Path) -> None:
    path = write_set(tmp_path, TASKS, train=[GOOD]) / "train.jsonl"
    refused(r"1 training rows are too few to draw a (train|validation) split from", tmp_path)
    path.write_bytes(path.read_bytes() + '{"id": "b", "text": "é"}'.encode("latin-1"))
    refused(r"train\.jsonl:2: must be one JSON object in UTF-8, but 'utf-8' codec", tmp_path)
    (tmp_path / "train.parquet").write_text("no")
    refused(r"train\.parquet: must be a parquet file, but", tmp_path, source="parquet")
    with pytest.raises(DataError, match=r"data\.hub\.name: `datasets` cannot load"):
        load(source="hub", tasks=TASKS, hub={"name": str(tmp_path / "nowhere" / "at" / "all")})


@pytest.mark.parametrize(
    ("content", "columns", "message"),
    [
        ("text,tone\nhello,calm\nhello\n", {}, "train.csv:3: must have 2 cells as the header has, but got 1"),
        ('text,tone\n"a\nb",calm\nhello,clam\n', {}, "train.csv:4: labels.tone: unknown class `clam`"),
        ("text,tone,tone\na,calm,calm\n", {}, "must have the column `tone` once, but has `tone`, `tone`"),
        ("text,tone\n", {"labels": {"tune": "tone"}}, "no task with labels is called `tune`. Did you"),
    ],
)
def test_bad_csv_files_are_refused(content: str, columns: Any, message: str, tmp_path: Path) -> None:
    for split in ("train", "validation"):
        (tmp_path / f"{split}.csv").write_text(content)
    columns = {"labels": {"tone": "tone"}, **columns}
    refused(message, tmp_path, source="csv", tasks={"tone": TASKS["tone"]}, columns=columns)
