from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.command_line import hpo_command, ok, refused
from support.tiny import write_study

HOSTILE = "<img src=x onerror='window.hacked=1'>"
CLASSES = ["freundlich", HOSTILE, *(f"Klasse {n}" for n in range(32))]


def german_study(folder: Path, **changes: Any) -> Path:
    """A study of csv files as a German Excel writes them, with a text that stands in both splits."""
    sizes = {"train": 140, "validation": 60}
    for split, num in sizes.items():
        lines = ["Text;Ton;Schlagwörter;Note"]
        for n in range(num):
            text = (
                "Schon wieder zu SPÄT"
                if n == 0 and split == "train"
                else f"{split} {n} für 5 € bestellt und nie bekommen"
            )
            text = "schon wieder zu spät" if n == 0 and split == "validation" else text
            tags = ("spät,teuer", "", "teuer")[n % 3]
            lines.append(f"{text};{CLASSES[n % len(CLASSES)]};{tags};{n % 7},5")
        (folder / f"{split}.csv").write_text("\r\n".join([*lines, ""]), encoding="cp1252", newline="")
    data = {
        "source": "csv",
        "path": ".",
        "tasks": {
            "ton": {"kind": "single_label", "classes": CLASSES},
            "tags": {"kind": "multi_label"},
            "note": {"kind": "regression"},
        },
        "columns": {"text": "Text", "labels": {"ton": "Ton", "tags": "Schlagwörter", "note": "Note"}},
        "csv": {"encoding": "cp1252", "list_separator": ","},
    }
    return write_study(folder, data=data, **changes)


def test_check_prints_tables_and_what_to_change(tmp_path: Path) -> None:
    german_study(tmp_path)
    finished = ok(hpo_command(tmp_path, "check", "tiny.yaml", width=120))
    for line in (r"train +140 ", r"tags +train +140 +0 % +33.6 %", r"64 +0", r"note"):
        assert re.search(line, finished.out), line
    assert "of validation is in train too" in finished.out
    assert "max_length" in finished.out
    found = ok(hpo_command(tmp_path, "check", "tiny.yaml", "--json")).json
    assert found.keys() >= {"study", "facts", "lengths", "advice"}
    assert found["facts"]["splits"]["train"] == {"num_rows": 140, "num_duplicates": 0}
    assert f"{tmp_path}/train.csv: read with `;`" in finished.err
    assert not (tmp_path / "runs" / "hpo.db").exists()


@pytest.mark.parametrize("command", [("check",), ("verify", "--repeats", "1")])
def test_a_study_of_the_database_by_its_name(tmp_path: Path, command: tuple[str, ...]) -> None:
    path = write_study(tmp_path)
    refused(hpo_command(tmp_path, *command, "tiny"), "Did you mean `./tiny.yaml`?")
    ok(hpo_command(tmp_path, "init", "tiny.yaml"))
    path.unlink()
    assert ok(hpo_command(tmp_path, *command, "tiny", "--json")).json
