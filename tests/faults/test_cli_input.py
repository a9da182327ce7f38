"""Bad input of every kind, given to `hpo run`: one message, the right exit code, and nothing left behind."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from command_line import Finished, hpo_command, ok
from postgres import PASSWORD, PostgresServer
from tiny import write_study

from hpo.models.encoder import load_encoder, load_tokenizer
from hpo.study.storage import open_storage

Prepare = Callable[[Path], object]
SPACE: dict[str, Any] = {"learning_rate": {"type": "float", "low": 1e-4, "high": 1e-3, "log": True}}
TASKS: dict[str, Any] = {"tasks": {"tone": {"kind": "single_label", "classes": ["calm", "angry"]}}}
SPAN_TASKS = {"tasks": {"names": {"kind": "token_classification", "span_names": ["person"]}}}
ROW: dict[str, Any] = {"id": "b", "text": "Ann works.", "labels": {"tone": "calm"}}


def check_refused(folder: Path, finished: Finished, message: str, exit_code: int = 2) -> None:
    assert finished.exit_code == exit_code, finished
    assert finished.err.startswith("Error: ")
    assert finished.err.count("Error") == 1
    assert "Traceback" not in finished.err
    assert re.search(message, finished.err, re.DOTALL), finished.err
    assert not list(folder.glob("runs/**/trial-*")), "no trial has begun"
    assert not list(folder.glob("runs/**/*.tmp"))
    assert not list(folder.glob("runs/hpo.db*")), "no study is made"


def study(**changes: Any) -> Prepare:
    """The tiny study with these keys."""
    return lambda folder: write_study(folder, **changes)


def data(*rows: Any, tasks: Any = TASKS, validation: str | None = None, **options: Any) -> Prepare:
    """A study on a JSONL data set: a good row and `rows`; strings stand in the file as they are."""

    def prepare(folder: Path) -> None:
        good = {**ROW, "id": "a"} if "tone" in tasks.get("tasks", {}) else {"id": "a", "text": ROW["text"]}
        (folder / "tasks.json").write_text(json.dumps(tasks))
        lines = [row if isinstance(row, str) else json.dumps(row) for row in (good, *rows)]
        (folder / "train.jsonl").write_text("\n".join(lines))
        others = json.dumps({**good, "id": "v"}) if validation is None else validation
        (folder / "validation.jsonl").write_text(others)
        write_study(folder, data={"source": "jsonl", "path": ".", **options})

    return prepare


def encoder_folder(*, with_weights: bool = True, code: bool = False) -> Prepare:
    """A study with an encoder of its own in the folder `encoder`."""

    def prepare(folder: Path) -> None:
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        encoder: Any = load_encoder({"model_type": "bert", **sizes, "intermediate_size": 64})
        encoder.save_pretrained(folder / "encoder")
        load_tokenizer({"model_type": "bert"}).save_pretrained(folder / "encoder")
        if not with_weights:
            (folder / "encoder" / "model.safetensors").unlink()
        if code:
            path = folder / "encoder" / "config.json"
            config = json.loads(path.read_text())
            config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModel": "mine.M"}}
            path.write_text(json.dumps(config))
            (folder / "encoder" / "mine.py").write_text("raise SystemExit('code ran')\n")
        write_study(folder, model={"encoder": "encoder"})

    return prepare


DATA: dict[str, tuple[Prepare, str]] = {
    "unknown task kind": (
        data(tasks={"tasks": {"tone": {"kind": "singel_label", "classes": ["a", "b"]}}}),
        r"tasks\.json.*tone.*singel_label.*Did you mean `single_label`",
    ),
    "no task": (data(tasks={"tasks": {}}), r"tasks\.json: `tasks` must name at least one task"),
    "no such folder": (
        study(data={"source": "jsonl", "path": "nowhere"}),
        r"There is no folder \S+/nowhere",
    ),
    "span outside the text": (
        data({"id": "b", "text": "Ann", "spans": {"person": [[0, 9]]}}, tasks=SPAN_TASKS),
        r"train\.jsonl:2: spans\.person: \[0, 9\] must lie inside the text of 3 characters",
    ),
    "unknown class": (
        data({**ROW, "labels": {"tone": "clam"}}),
        r"train\.jsonl:2: labels\.tone: unknown class `clam`\. Did you mean `calm`",
    ),
    "empty text": (data({**ROW, "text": ""}), r"train\.jsonl:2: `text` is empty"),
    "broken JSON": (data('{"id": "b", "text"'), r"train\.jsonl:2: must be one JSON object"),
    "wrong type": (data({**ROW, "text": 7}), r"train\.jsonl:2: `text` must be a string, but got 7"),
    "duplicate id": (
        data({**ROW, "id": "a"}),
        r"train\.jsonl:2: `id` must be unique, but `a` is that of .*train\.jsonl:1 too",
    ),
    "empty split": (data(validation=""), r"the validation split must have rows, but it is empty"),
    "many at once": (
        data(*[{**ROW, "id": f"r{number}", "text": ""} for number in range(30)]),
        r"train\.jsonl:2: .*train\.jsonl:21: (?!.*train\.jsonl:22)",
    ),
}

MODELS: dict[str, tuple[Prepare, str]] = {
    "folder without weights": (encoder_folder(with_weights=False), r"an encoder's folder must hold weights"),
    "code that is not trusted": (
        encoder_folder(code=True),
        r"comes with its own Python code.*`model\.trust_remote_code: true`",
    ),
    "hub name while offline": (
        study(model={"encoder": "no-such-owner/no-such-model"}),
        r"`no-such-owner/no-such-model` is no folder here and not in the Hugging Face cache",
    ),
    "unknown name": (
        study(model={"encoder": "minilmm"}),
        r"`minilmm` is no folder here.*name a local folder or `minilm`",
    ),
    "layers that are not there": (
        study(training={"freeze_layers": 9}),
        r"freeze_layers must be between 0 and the encoder's 2 layers",
    ),
    "metric of no task": (
        study(objective={"metric": "criteria/f1_mikro"}),
        r"objective\.metric: no task of this study has 'criteria/f1_mikro'\. Did you mean",
    ),
}


@pytest.mark.parametrize("command", ["run", "worker", "init", "train", "verify"])
def test_study_file(tmp_path: Path, command: str) -> None:
    """What may be wrong with a study file is in test_bad_study_files.py."""
    write_study(tmp_path, n_trials=-1, prunner={}, pruner={"name": "medium"})
    message = r"n_trials: .*\n.*pruner\.name: .*Did you mean `median`.*\n.*prunner: .*Did you mean `pruner`"
    check_refused(tmp_path, hpo_command(tmp_path, command, "tiny.yaml"), message)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("case", DATA)
def test_data(tmp_path: Path, case: str) -> None:
    prepare, message = DATA[case]
    prepare(tmp_path)
    check_refused(tmp_path, hpo_command(tmp_path, "run", "tiny.yaml"), message)


@pytest.mark.parametrize("case", MODELS)
def test_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    prepare, message = MODELS[case]
    prepare(tmp_path)
    check_refused(tmp_path, hpo_command(tmp_path, "run", "tiny.yaml"), message)


def test_data_that_were_edited_since_the_study_was_made(tmp_path: Path) -> None:
    rows = [{"id": str(i), "text": f"Ann works {i}.", "labels": {"tone": "calm"}} for i in range(8)]
    data(*rows)(tmp_path)
    study_file, train = tmp_path / "tiny.yaml", tmp_path / "train.jsonl"
    ok(hpo_command(tmp_path, "run", study_file, "--n-trials", "1"))
    content = train.read_text()
    train.write_text(content.replace("calm", "angry", 1))
    for command in (("run", "--n-trials", "2"), ("best", "--evaluate", "validation")):
        refused = hpo_command(tmp_path, command[0], study_file, *command[1:])
        assert refused.exit_code == 2
        assert "The data of the study `tiny` have changed since it was made" in refused.err
    train.write_text(content)
    ok(hpo_command(tmp_path, "run", study_file, "--n-trials", "2"))


def test_bad_data_is_reported_by_several_workers_as_by_one(tmp_path: Path) -> None:
    prepare, message = DATA["unknown class"]
    prepare(tmp_path)
    finished = hpo_command(tmp_path, "run", "tiny.yaml", "--workers", "2")
    assert finished.exit_code == 2
    assert re.search(message, finished.err)
    assert "Traceback" not in finished.err
    assert not list(tmp_path.glob("runs/hpo.db*"))


# Storage


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", r"The storage must be a URL such as .*, but it is `nonsense`"),
        ("mysql://me:secret@host/db", r"must be SQLite or PostgreSQL .* names `mysql`"),
        ("sqlite://", r"A study in memory would be lost"),
        ("sqlite:////no/such/folder/hpo.db", r"The folder `/no/such/folder` .* must exist"),
        ("sqlite:///tiny.yaml", r"must be a SQLite database"),
        ("postgresql://me:secret@host.invalid/db", r"the host cannot be found"),
    ],
)
@pytest.mark.parametrize("command", ["run", "status"])
def test_storage_url(tmp_path: Path, command: str, url: str, message: str) -> None:
    write_study(tmp_path)
    finished = hpo_command(tmp_path, command, "tiny.yaml", "--storage", url)
    if command == "status" and "folder" in url:
        message = "There is no study database"
    check_refused(tmp_path, finished, message)
    assert "secret" not in finished.err


def test_server_that_is_not_there(tmp_path: Path) -> None:
    write_study(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"postgresql://me:secret@127.0.0.1:{free.getsockname()[1]}/db"
        finished = hpo_command(tmp_path, "run", "tiny.yaml", "--storage", url)
    check_refused(tmp_path, finished, "no database answers there. Check host and port")
    assert "secret" not in finished.err


@pytest.mark.postgres
def test_wrong_password(tmp_path: Path, postgres_server: PostgresServer, postgres_url: str) -> None:
    write_study(tmp_path)
    url = postgres_server.url(postgres_url.rpartition("/")[2], password="secret")
    finished = hpo_command(tmp_path, "run", "tiny.yaml", "--storage", url)
    check_refused(tmp_path, finished, "the server refuses this user and password")
    assert "secret" not in finished.err


@pytest.mark.postgres
def test_no_rights(tmp_path: Path, postgres_server: PostgresServer, postgres_url: str) -> None:
    write_study(tmp_path)
    name = postgres_url.rpartition("/")[2]
    with postgres_server.connect(name) as connection:
        connection.execute("DROP ROLE IF EXISTS visitor")
        connection.execute("CREATE ROLE visitor LOGIN PASSWORD 'secret'")
    url = postgres_server.url(name, user="visitor", password="secret")
    finished = hpo_command(tmp_path, "run", "tiny.yaml", "--storage", url)
    check_refused(tmp_path, finished, "must be allowed to create tables")
    assert "secret" not in finished.err
    assert PASSWORD not in finished.err


def test_database_of_a_newer_optuna(tmp_path: Path) -> None:
    write_study(tmp_path)
    ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    url = f"sqlite:///{tmp_path}/runs/hpo.db"
    with open_storage(url) as storage, storage.engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = 'v9.9.9.a'"))
        connection.execute(sa.text("UPDATE version_info SET library_version = '9.9.9'"))
    for command in ("run", "status", "worker", "best"):
        refused = hpo_command(tmp_path, command, "tiny.yaml")
        assert refused.exit_code == 2
        assert re.search(r"must be of Optuna 5\..*, but they are of Optuna 9\.9\.9\. Update", refused.err)


def test_read_only_file(tmp_path: Path) -> None:
    write_study(tmp_path)
    ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    before = (tmp_path / "runs" / "hpo.db").read_bytes()
    url = f"sqlite:///file:{tmp_path}/runs/hpo.db?mode=ro&uri=true"
    refused = hpo_command(tmp_path, "run", "tiny.yaml", "--n-trials", "5", "--storage", url)
    assert refused.exit_code == 2
    assert "the database must be writable" in refused.err
    assert (tmp_path / "runs" / "hpo.db").read_bytes() == before
    status = ok(hpo_command(tmp_path, "status", "tiny.yaml", "--storage", url, "--json")).json
    assert status["trials"]["done"] == 2, "reading needs no right to write"


def test_full_disk_during_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_study(tmp_path)
    ok(hpo_command(tmp_path, "run", "tiny.yaml", "--n-trials", "1"))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hpo.training.checkpoint.save_file", full)
    failed = hpo_command(tmp_path, "run", "tiny.yaml")
    assert failed.exit_code == 1
    assert "could not be written: [Errno 28] No space left on device. Free some space" in failed.err
    assert "Traceback" not in failed.err
    assert not list(tmp_path.glob("runs/**/.*.tmp"))
    status = hpo_command(tmp_path, "status", "tiny.yaml", "--json").json
    assert status["trials"] == {"open": 1, "running": 0, "done": 1}

    monkeypatch.undo()
    ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    with open_storage(f"sqlite:///{tmp_path}/runs/hpo.db") as storage:
        assert [trial.outcome for trial in storage.read_study("tiny").trials] == ["complete", "complete"]
