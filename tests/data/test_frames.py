"""Frames in memory: DataFrames and data sets of `datasets`."""

from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pytest
from support.jsonl_sets import load_set

from hpo.data.frames import write_frames
from hpo.errors import DataError


def test_frames_are_parquet_files_named_by_content(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"text": ["a", "b", "c"], "tone": ["x", None, "y"], "n": [1.0, float("nan"), 2]}, index=[5, 6, 7]
    )
    folder = write_frames({"train": frame, "validation": frame[:2]}, tmp_path)
    assert (
        write_frames({"validation": frame[:2], "train": pd.concat([frame[:1], frame[1:]])}, tmp_path)
        == folder
    )
    assert write_frames({"train": frame, "validation": frame[:1]}, tmp_path) != folder
    assert write_frames(frame, tmp_path).parent == tmp_path.absolute()
    tasks = {"tone": {"kind": "single_label", "classes": ["x", "y"]}, "n": {"kind": "regression"}}
    data = load_set(folder, "parquet", tasks=tasks, columns={"labels": {"tone": "tone", "n": "n"}})
    assert [row.labels for row in data.splits["train"]] == [
        {"tone": "x", "n": 1.0},
        {},
        {"tone": "y", "n": 2.0},
    ]
    assert sorted(path.name for path in folder.iterdir()) == ["train.parquet", "validation.parquet"]


def test_numbers_of_a_data_set_become_names(tmp_path: Path) -> None:
    names = datasets.ClassLabel(names=["O", "B-PER", "I-PER"])
    features = datasets.Features(
        {"tokens": datasets.List(datasets.Value("string")), "tags": datasets.List(names), "tone": names}
    )
    rows = {"tokens": [["Ann", "B"], ["so"], ["in"]], "tags": [[1, 2], [0], [0]], "tone": [0, -1, 2]}
    data = datasets.Dataset.from_dict(rows, features=features).select([2, 0, 1])
    folder = write_frames(datasets.DatasetDict({"train": data, "validation": data}), tmp_path)
    tasks = {"ner": {"kind": "token_classification", "span_names": ["PER"]}, "tone": {"kind": "single_label"}}
    columns = {"tokens": "tokens", "tags": {"ner": "tags"}, "labels": {"tone": "tone"}}
    read = load_set(folder, "parquet", tasks=tasks, columns=columns).splits["train"]
    assert [(row.text, row.labels, dict(row.spans)) for row in read] == [
        ("in", {"tone": "I-PER"}, {}),
        ("Ann B", {"tone": "O"}, {"PER": [(0, 5)]}),
        ("so", {}, {}),
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"test": pd.DataFrame()}, "the splits must be train, validation, test or less, but got"),
        ({"train": [1]}, "must be a DataFrame or a Dataset, but got list"),
        ({"train": pd.DataFrame({"a": [1, "x"]})}, "each column must have a name and a type of its own"),
        ({"train": pd.DataFrame([[1, 2]], columns=["a", "a"])}, "each column must have a name"),
    ],
)
def test_other_frames_are_refused(data: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        write_frames(data, tmp_path)
