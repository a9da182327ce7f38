import json
import re
import shutil
import socket
from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub.constants
import pytest
from support.command_line import finish, hpo_command, ok, refused, start_python
from support.readme import README

from hpo.config.study_config import load_study
from hpo.data.dataset import load_data


@pytest.fixture(scope="session")
def exported(ran: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the finished study, the export `model` of its best trial, and `test.jsonl`."""
    folder = Path(shutil.copytree(ran, tmp_path_factory.mktemp("exported") / "it"))
    ok(hpo_command(folder, "best", "tiny.yaml", "--export", "model"))
    examples = load_data(load_study(folder / "tiny.yaml").data).splits["test"]
    rows = [{"id": example.id, "text": example.text} for example in examples]
    (folder / "test.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def rows_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_the_command_of_the_readme(exported: Path) -> None:
    section = README.read_text().split("## Using the model", 1)[1].split("\n## ", 1)[0]
    (command,) = re.findall(r"`hpo (predict .*?)`", section)
    (exported / "texts.csv").write_text("text\nI sleep badly.\n")
    ok(hpo_command(exported, *command.split()))
    (row,) = rows_of((exported / "predictions.jsonl").read_text())
    assert row.keys() == {"id", "text", "labels", "spans", "scores"}


def test_unreadable_rows_are_listed(exported: Path, tmp_path: Path) -> None:
    texts, out = tmp_path / "texts.txt", tmp_path / "out.jsonl"
    texts.write_text("I sleep badly.\n\nAll is well.\n \nI am tired.\n\n")  # the last line is no row
    predict = ("predict", "model", str(texts), "--output", str(out))
    left_out = [f"{texts}:{number}: `text` is empty" for number in (2, 4)]
    finished = refused(hpo_command(exported, *predict), f"2 rows of {texts} cannot be read")
    assert f"\n  {left_out[0]}\n  {left_out[1]}\n" in finished.err
    assert not out.exists()
    finished = ok(hpo_command(exported, *predict, "--skip-bad-rows", "--json"))
    assert finished.json == {"num_predictions": 3, "left_out": left_out, "output": str(out)}
    assert [row["id"] for row in rows_of(out.read_text())] == ["row-1", "row-3", "row-5"]
    shown = ok(hpo_command(exported, *predict[:3], "--skip-bad-rows", "--json"))
    assert (shown.err, shown.json["predictions"]) == ("", rows_of(out.read_text()))
    texts.write_text("\n")
    refused(hpo_command(exported, *predict, "--skip-bad-rows"), "must hold at least one text, but is")


def test_an_export_is_read_without_a_network(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[object] = []

    def refuse(*arguments: object, **_: object) -> NoReturn:
        requests.append(arguments)
        raise OSError("no network in this test")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    ok(hpo_command(exported, "predict", "model", "test.jsonl"))
    assert requests == []


def test_an_export_works_alone_in_a_new_process(exported: Path, tmp_path: Path) -> None:
    """`import hpo` itself imports no PyTorch."""
    shutil.copytree(exported / "model", tmp_path / "elsewhere")
    script = (
        "import sys, hpo; assert 'torch' not in sys.modules; model = hpo.load('elsewhere', device='cpu'); "
        "print(model.predict(['I sleep badly.'])[0]['severity'].label)"
    )
    done = ok(finish(start_python(tmp_path, "-W", "error::UserWarning", "-c", script)))
    assert done.out.strip() in ("none", "mild", "moderate", "severe")
