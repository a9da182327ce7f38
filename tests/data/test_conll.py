"""Sentences of CoNLL files."""

from pathlib import Path
from typing import Any

import pytest
from support.jsonl_sets import load_set

from hpo.data.dataset import DataSet
from hpo.errors import DataError

TASKS = {"ner": {"kind": "token_classification", "span_names": ["PER", "LOC"]}}


def read(folder: Path, content: str, tokens: int = 0, **columns: Any) -> DataSet:
    for split in ("train", "validation"):
        (folder / f"{split}.conll").write_text(content)
    columns = {"tokens": tokens, "tags": {"ner": -1}, **columns}
    return load_set(folder, "conll", tasks=TASKS, columns=columns)


def shown(data: DataSet) -> list[tuple[str, dict[str, Any]]]:
    return [(row.text, dict(row.spans)) for row in data.splits["train"]]


def test_sentences_of_spaces_and_documents(tmp_path: Path) -> None:
    rows = "-DOCSTART- -X- O\n\n# NN O\nAnn  NNP I-PER\n\n# a comment of a sentence\nRome NNP I-LOC\n"
    data = read(tmp_path, f"{rows}\n-DOCSTART- -X- O\n\nAnn NNP I-PER\n\n\n", group="document")
    assert shown(data) == [
        ("# Ann", {"PER": [(2, 5)]}),
        ("Rome", {"LOC": [(0, 4)]}),
        ("Ann", {"PER": [(0, 3)]}),
    ]
    assert [row.group for row in data.splits["train"]] == [f"train.conll {n}" for n in (1, 1, 2)]
    assert [row.id for row in data.splits["train"]] == ["train-1", "train-2", "train-3"]
    assert not data.span_warnings("ner")


def test_sentences_of_tabs_and_extra_words(tmp_path: Path) -> None:
    rows = "# newdoc\n# text = x\n1-2\tau\tO\n1\ta\u00a0b\tB-PER\n2\tle\tI-LOC\n2.1\tx\tO\n\n1\t#\tB-LOC\n"
    data = read(tmp_path, rows, tokens=1)
    expected = [("a\u00a0b le", {"PER": [(0, 3)], "LOC": [(4, 6)]}), ("#", {"LOC": [(0, 1)]})]
    assert shown(data) == expected
    (warning,) = data.span_warnings("ner")
    assert warning.startswith("2 of 6 tags are faults of BIO (IOB2)")


@pytest.mark.parametrize(
    ("content", "columns", "message"),
    [
        ("Ann B-PER\nRome\n", {}, r"train.conll:1: each line must have 2 columns, but one has 1"),
        ("Ann B-PER\n", {"tags": {"ner": 2}}, r"has no column `2`"),
        ("Ann B-PER\n", {"group": "document"}, "has no -DOCSTART- or `# newdoc`"),
        ("Ann PER\n", {}, r"train.conll:1: tags.ner: a tag must be `O`"),
    ],
)
def test_bad_files_are_refused(content: str, columns: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, content, **columns)
