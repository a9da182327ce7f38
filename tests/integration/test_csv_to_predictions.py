"""From csv files as a German Excel writes them to predictions of new texts: the four commands of a reader."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import Finished, hpo_command, ok
from excel_files import excel
from tiny import ENCODER

from hpo.config.study_config import load_study
from hpo.data.dataset import load_data

HEADER = ["Nr", "Text", "Ton", "Schlagwörter", "Note", "Stelle"]
TASKS: dict[str, Any] = {
    "ton": {"kind": "single_label", "classes": ["freundlich", "ärgerlich"]},
    "tags": {"kind": "multi_label", "classes": ["spät", "teuer", "defekt"]},
    "note": {"kind": "regression"},
    "stelle": {"kind": "token_classification", "span_names": ["grund"]},
}
COLUMNS: dict[str, Any] = {
    "id": "Nr",
    "text": "Text",
    "labels": {"ton": "Ton", "tags": "Schlagwörter", "note": "Note"},
    "spans": {"stelle": "Stelle"},
}
TEXTS = [
    "Größer als erwartet; schön und günstig",
    'Schon wieder zu spät,\nund dann "kaputt"',
    "Für 25 € viel zu teuer!",
    "Überall Lob – alles gut",
]


def cells(number: int) -> list[str]:
    """A row of data: each text stands in many, with a number before it so that none is repeated."""
    text = f"{number}. {TEXTS[number % 4]}"
    word = ("schön", "spät", "teuer", "Lob")[number % 4]
    at = text.index(word)
    return [
        f"K-{number}",
        text,
        ("freundlich", "ärgerlich", "ärgerlich", "" if number % 8 == 3 else "freundlich")[number % 4],
        ("", "spät|defekt", '["teuer"]', "[]")[number % 4],
        "" if number % 5 == 0 else f"{number % 4},{number % 10}",
        f"[[{at}, {at + len(word)}]]" if number % 3 else "",
    ]


def truth(number: int) -> dict[str, Any]:
    """What `cells` say of the text as a whole; an empty cell of several classes says that none holds."""
    ton, note = cells(number)[2], cells(number)[4].replace(",", ".")
    tags = {"tags": ([], ["spät", "defekt"], ["teuer"], [])[number % 4]}
    return tags | ({"ton": ton} if ton else {}) | ({"note": float(note)} if note else {})


def write(path: Path, rows: list[list[str]], encoding: str) -> None:
    path.write_bytes(excel(rows, ";", ",").encode(encoding))


def test_from_german_csv_to_predictions(tmp_path: Path) -> None:
    """The training file is in the encoding that the study names; the others are in UTF-8."""
    form = {"list_separator": ",", "encoding": "cp1252"}
    data = tmp_path / "daten"
    data.mkdir()
    numbers = list(range(64))
    random.Random(0).shuffle(numbers)
    write(data / "train.csv", [HEADER, *map(cells, numbers[:48])], "cp1252")
    write(data / "validation.csv", [HEADER, *map(cells, numbers[48:])], "utf-8-sig")
    study = {
        "name": "my",
        "n_trials": 2,
        "sampler": {"name": "random", "seed": 1},
        "data": {"source": "csv", "path": "daten", "tasks": TASKS, "columns": COLUMNS, "csv": form},
        "model": {"encoder": ENCODER},
        "training": {"max_steps": 6, "batch_size": 8, "max_length": 32},
        "search_space": {"learning_rate": {"type": "float", "low": 1e-4, "high": 1e-3, "log": True}},
    }
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(study, allow_unicode=True, sort_keys=False))

    def hpo(command: str) -> Finished:
        return ok(hpo_command(tmp_path, *command.split()))

    checked = hpo("check my.yaml")
    for split in ("train", "validation"):
        assert f"{data / split}.csv: read with `;`" in checked.err
    examples = load_data(load_study(tmp_path / "my.yaml").data).splits["train"]
    for example, number in zip(examples, numbers[:48], strict=True):
        assert (example.id, example.text) == tuple(cells(number)[:2])
        assert example.labels == truth(number)
        assert ("stelle" in example.annotated) == bool(number % 3)

    ran = hpo("run my.yaml")
    assert "Study my (new): 0 of 2 trials done" in ran.out
    exported = hpo("best my --export model")
    assert exported.out.endswith("is exported to model.\n")

    new = ["Wieder; zu spät und „kaputt“", "Schön\nund günstig", 'Das "Ü-Gerät" für 5 €']
    write(
        tmp_path / "neue_texte.csv",
        [["Text", "Nr"], *([text, f"N{i}"] for i, text in enumerate(new))],
        "utf-8",
    )
    predicted = hpo("predict model neue_texte.csv --output vorhersagen.csv")
    assert "neue_texte.csv: read with `;`" in predicted.err
    assert "data.csv" not in predicted.err
    assert "3 predictions are in vorhersagen.csv." in predicted.err
    with (tmp_path / "vorhersagen.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["id"], row["text"]) for row in rows] == [(f"N{i}", text) for i, text in enumerate(new)]
    for row in rows:
        assert row["labels.ton"] in TASKS["ton"]["classes"]
        assert set(json.loads(row["labels.tags"])) <= set(TASKS["tags"]["classes"])
        assert -10 < float(row["labels.note"]) < 20  # the numbers of the data lie from 0 to 4
        of_tone = json.loads(row["scores.ton"])
        assert max(of_tone, key=of_tone.__getitem__) == row["labels.ton"]
        assert sum(of_tone.values()) == pytest.approx(1)
        for spans in json.loads(row["spans.stelle"]).values():
            assert all(0 <= start < end <= len(row["text"]) for start, end in spans)
