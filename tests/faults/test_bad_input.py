"""Bad data and broken models end as one error that names the file, the key and the remedy."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.jsonl_sets import load, load_set, write_set
from support.tiny_encoders import BERT, make_model, save_encoder
from transformers import CanineTokenizer

from hpo.errors import DataError, ModelError
from hpo.models.encoder import load_tokenizer

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


WORDS = "embeddings.word_embeddings.weight"
WEIGHT = "encoder.layer.1.output.dense.weight"
NONFINITE = rf"must be finite, .* infinite numbers in {WEIGHT}\. Download"
MPNET = BERT | {"model_type": "mpnet"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Intact folder of an encoder, for a test to break."""
    return save_encoder(tmp_path / "encoder")


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


Weights = dict[str, torch.Tensor]


def change_weights(change: Callable[[Weights], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def leave_pointer(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_text("version https://git-lfs.github.com")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"must hold a config\.json, but there is none"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is no valid JSON: Expecting"),
        (lambda folder: change_config(folder, vocab_size=31000), f"shapes .*, but {WORDS} is .30522, 32. "),
        (
            lambda folder: os.truncate(folder / "model.safetensors", 10**6),
            "model.safetensors is damaged.*Download",
        ),
        (
            leave_pointer,
            r"pytorch_model\.bin is damaged, or a pointer .*`git lfs pull` gets the file\)\. Download",
        ),
        (change_weights(lambda all_: all_.update({"other": all_.pop(WEIGHT)})), f"missing .*: {WEIGHT}"),
        (change_weights(lambda all_: all_[WEIGHT][0, 0].fill_(math.nan)), NONFINITE),
        (change_weights(lambda all_: all_[WEIGHT][0, 0].fill_(-math.inf)), NONFINITE),
    ],
)
def test_damaged_folder_is_refused(damage: Callable[[Path], Any], message: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=message):
        make_model(str(folder))


def remove_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


def save_slow_tokenizer(folder: Path) -> None:
    remove_tokenizer(folder)
    CanineTokenizer().save_pretrained(folder)


def raise_token_id(folder: Path) -> None:
    """Move one id beyond the encoder's embeddings, with as many tokens as before."""
    saved = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = saved["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.__getitem__)] = 40000
    (folder / "tokenizer.json").write_text(json.dumps(saved))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_tokenizer, "a tokenizer must have a vocabulary, but there is none"),
        (save_slow_tokenizer, r"must be a fast one, .* but CanineTokenizer is not"),
        (lambda folder: change_config(folder, vocab_size=30000), r"vocab_size is 30000 .* has 30522 tokens"),
        (raise_token_id, r"vocab_size is 30522 .* 30522 tokens with ids up to 40000"),
    ],
)
def test_unfit_tokenizer_is_refused(damage: Callable[[Path], Any], message: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=message):
        load_tokenizer(str(folder))


def test_code_of_a_model_runs_only_if_trusted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = tmp_path / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    monkeypatch.syspath_prepend(str(modules))
    names = {"AutoConfig": "homemade.HomemadeConfig", "AutoModel": "homemade.HomemadeModel"}
    change_config(folder, model_type="homemade", auto_map=names)
    (folder / "homemade.py").write_text(
        "from pathlib import Path\n"
        "from transformers import BertConfig, BertModel\n"
        "Path(__file__).with_name('ran').touch()\n"
        "class HomemadeConfig(BertConfig):\n"
        "    model_type = 'homemade'\n"
        "class HomemadeModel(BertModel):\n"
        "    config_class = HomemadeConfig\n"
    )
    with pytest.raises(ModelError, match=r"set `model\.trust_remote_code: true`"):
        make_model(str(folder))
    assert not list(tmp_path.rglob("ran"))
    trusted = make_model(str(folder), trust_remote_code=True)
    assert type(trusted.encoder).__name__ == "HomemadeModel"
    assert list(tmp_path.rglob("ran"))


@pytest.mark.parametrize(
    ("encoder", "settings", "message"),
    [
        (BERT | {"hidden_sise": 64}, {}, r"`hidden_sise` is not a key of bert\. Did you mean `hidden_size`"),
        (BERT | {"vocab_size": 100}, {}, r"vocab_size is 100 and the tokenizer .* has 30522 tokens"),
        ({"model_type": "t5"}, {}, "trains encoders and decoders, but t5 is both"),
        (BERT, {"max_length": 65}, "at most the 64 positions of this BertModel, but it is 65"),
        (BERT, {"freeze_layers": 3}, "between 0 and the encoder's 2 layers, but it is 3"),
        (MPNET, {"attention": "eager", "gradient_checkpointing": True}, "MPNetModel does not support it"),
    ],
)
def test_impossible_configuration_is_refused(
    encoder: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        make_model(encoder, **settings)
