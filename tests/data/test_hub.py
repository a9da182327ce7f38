"""Data sets of the hub: their cards, csv files and classes."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from support.jsonl_sets import load

from hpo.config.data_config import DataConfig
from hpo.data.dataset import DataSet, load_data
from hpo.errors import DataError

SPLITS = ("train", "validation")
FILES = [{"split": split, "path": f"{split}.*"} for split in SPLITS]
LABEL = {"class_label": {"names": {"0": "calm", "1": "angry"}}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    return folder


def write_csv(folder: Path, *rows: str, encoding: str = "utf-8") -> None:
    """Write rows such as `one,a` with an id in front; {} is the split."""
    for split in SPLITS:
        lines = [row.replace("{}", split) for row in rows]
        (folder / f"{split}.csv").write_text("\n".join(lines), encoding=encoding)


def write_card(folder: Path, content: dict[str, Any]) -> None:
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(content)}---\n")


def hub(folder: Path, **more: Any) -> DataSet:
    at = {"columns": {"id": "id", "labels": {"t": "t"}}, "tasks": {"t": {"kind": "single_label"}}}
    return load(source="hub", hub={"name": str(folder)}, **at, **more)


def test_settings_of_the_study_replace_the_card(folder: Path) -> None:
    write_csv(folder, "id^text^t", "{}1^caf\u00e9^a", "{}2^two^b", encoding="cp1252")
    form = {"sep": ",", "encoding": "utf-8", "engine": "python"}
    write_card(folder, {"configs": [{"config_name": "default", "data_files": FILES, **form}]})
    rows = hub(folder, csv={"delimiter": "^", "encoding": "cp1252"}).splits["train"]
    assert [row.text for row in rows] == ["caf\u00e9", "two"]


@pytest.mark.parametrize("cells", [["1.0", "", "angry ", "0"], ["angry", " ", "1", "calm"]])
def test_csv_has_names_or_numbers_of_classes(cells: list[str], folder: Path) -> None:
    write_card(folder, {"dataset_info": {"features": [{"name": "t", "dtype": LABEL}]}})
    rows = ["id,text,t", *(f"{{}}{n},word,{cell}" for n, cell in enumerate([*cells, "-1"]))]
    write_csv(folder, *rows)
    labels = [row.labels.get("t") for row in hub(folder).splits["train"]]
    assert labels == ["angry", None, "angry", "calm", None]
    write_csv(folder, *rows, "{}7,word,2", "{}8,word,1.5", "{}9,word,clam")
    with pytest.raises(DataError, match=r"6 bad rows(.|\n)*labels\.t must be a class .* mean `calm`"):
        hub(folder)


def test_classes_stored_as_numbers_get_their_names(folder: Path) -> None:
    kinds = {"tone": "single_label", "stars": "single_label", "topics": "multi_label"}
    named = {"tone": datasets.ClassLabel(names=["calm", "angry"]), "stars": datasets.Value("int32")}
    named |= {"topics": datasets.List(datasets.ClassLabel(names=["work", "home"]))}
    features = datasets.Features({"text": datasets.Value("string"), **named})
    rows = {"text": ["one", "two", "three"], "tone": [1, 0, -1], "stars": [5, 1, 5]}
    table = datasets.Dataset.from_dict(rows | {"topics": [[1], [0, 1], []]}, features=features)
    table.to_parquet(folder / "train.parquet")
    table.to_parquet(folder / "dev.parquet")
    config = {
        "source": "hub",
        "hub": {"name": folder.name, "splits": {"validation": "validation"}},  # beside the study file
        "tasks": {name: {"kind": kind} for name, kind in kinds.items()},
        "columns": {"labels": {name: name for name in kinds}},
    }
    dataset = load_data(DataConfig.model_validate(config, context={"folder": folder.parent}))
    assert [json.dumps(example.labels) for example in dataset.splits["validation"]] == [
        '{"tone": "angry", "stars": "5", "topics": ["home"]}',
        '{"tone": "calm", "stars": "1", "topics": ["work", "home"]}',
        '{"stars": "5", "topics": []}',
    ]
