import os
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
import sqlalchemy as sa
from support.command_line import (
    change_definition,
    finish,
    hpo_command,
    ok,
    refused,
    saved_steps,
    start_hpo,
    stored,
    wait_until,
)
from support.jsonl_sets import write_set
from support.tiny import ENCODER, write_long_study, write_study

from hpo.study.checkpoints.checkpoint_folders import note_database
from hpo.study.store.schema import workers
from hpo.study.store.storage import open_storage

TOPIC = {"tasks": {"topic": {"kind": "single_label", "classes": ["a", "b"]}}}


def rows(word: str) -> list[dict[str, Any]]:
    return [{"id": f"{word}{n}", "text": f"{word} {n}", "labels": {"topic": "ab"[n % 2]}} for n in range(12)]


def elsewhere(folder: Path) -> tuple[Path, str]:
    """An empty folder, and the URL of the database in `folder`."""
    (folder / "elsewhere").mkdir()
    return folder / "elsewhere", f"sqlite:///{folder}/runs/hpo.db"


@pytest.fixture
def made(tmp_path: Path) -> Path:
    ok(hpo_command(tmp_path, "init", str(write_study(tmp_path))))
    return tmp_path


def test_a_worker_needs_only_the_database(made: Path) -> None:
    here, url = elsewhere(made)
    (here / "studies").mkdir()
    write_study(here / "studies", n_trials=7, training={"max_steps": 9})  # another study of that name
    worked = ok(hpo_command(here, "worker", "tiny", "--storage", url, "--json")).json
    assert worked == {"study": "tiny", "ended": "finished", "outcomes": {"complete": 2}, "left_out": {}}
    refused(hpo_command(here, "worker", "studies/tiny.yaml", "--storage", url), "training.max_steps: 4 -> 9")
    unknown = hpo_command(here, "worker", "tony", "--storage", url)
    refused(unknown, "There is no study `tony` in sqlite:///", "there is no study `tony` in studies")
    (listed,) = ok(hpo_command(made, "studies", "--json")).json
    assert (listed["name"], listed["state"], listed["workers"]) == ("tiny", "done", 0)
    assert listed["trials"] == {"open": 0, "running": 0, "done": 2, "total": 2}
    assert "tiny   finished  2 of 2" in ok(hpo_command(made, "studies", width=120)).out
    assert "raise --n-trials of `hpo run`" in ok(hpo_command(made, "worker", "tiny")).out
    assert ok(hpo_command(made, "resume", "tiny")).out.endswith("was not paused: 2 of 2 trials ended.\n")


def test_a_definition_with_another_name_is_refused(made: Path) -> None:
    change_definition(made, name="other")
    refused(hpo_command(made, "worker", "tiny"), "is of `other`")


def test_code_of_an_encoder_runs_only_if_it_is_trusted(made: Path) -> None:
    """The database cannot ask for it, neither by a study's name nor by its file."""
    change_definition(made, model={"encoder": ENCODER, "revision": None, "trust_remote_code": True})
    refused(hpo_command(made, "worker", "tiny"), "give the option --trust-remote-code")
    refused(hpo_command(made, "worker", "./tiny.yaml"), "~ model.trust_remote_code: true -> false")
    trusted = ok(hpo_command(made, "worker", "tiny", "--trust-remote-code", "--json"))
    assert trusted.json["outcomes"] == {"complete": 2}
    here, url = elsewhere(made)
    scored = hpo_command(here, "best", "tiny", "--evaluate", "test", "--storage", url)
    refused(scored, "give the option --trust-remote-code")


@pytest.mark.parametrize(("command", "state"), [("pause", "paused"), ("cancel", "cancelled")])
def test_pause_and_cancel_checkpoint_running_trials(tmp_path: Path, command: str, state: str) -> None:
    path = write_long_study(tmp_path, 0.1, max_steps=100_000)
    process = start_hpo(tmp_path, "run", str(path))
    wait_until(lambda: bool(saved_steps(tmp_path)), process)
    assert f"The study tiny is {state}: 0 of 2 trials ended" in ok(hpo_command(tmp_path, command, "tiny")).out
    closed = f"The study tiny is {state}: 0 of 2 trials ended. To continue it: hpo resume tiny, then hpo work"
    assert closed in ok(finish(process)).out
    (trial,) = stored(tmp_path).trials
    assert (trial.state, trial.outcome) == ("RUNNING" if command == "pause" else "FAIL", "preempted")
    assert closed in ok(hpo_command(tmp_path, "run", str(path))).out
    status = ok(hpo_command(tmp_path, "status", "tiny")).out
    assert f"The study is {state}. To continue it: hpo resume tiny" in status
    assert f"is no longer {state}" in ok(hpo_command(tmp_path, "resume", "tiny")).out
    assert stored(tmp_path).state == "open"


def test_delete_needs_consent_and_a_study_without_workers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kept,) = folder.glob("runs/tiny/checkpoints-*")
    with open_storage(f"sqlite:///{folder}/runs/hpo.db") as storage:
        note_database(kept, storage)  # `folder` is a copy
        refused(hpo_command(folder, "delete", "tiny", "--json"), "give --yes")
        start = Path(f"/proc/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[19]
        alive = {"state": "live", "pid": os.getpid(), "process_start": start, "last_seen": time.time()}
        with storage.engine.begin() as connection:
            connection.execute(sa.update(workers).values({**alive, "host": "\x1b]0;theirs\x07"}))
        ended = refused(hpo_command(folder, "delete", "tiny", "--yes"), "`hpo cancel tiny` stops them.")
        assert "\x1b" not in ended.err, "the host comes from the database"
        assert [*kept.glob("trial-*/best-*")]
        monkeypatch.setattr("hpo.api.managed.WAIT_SECONDS", 0.1)
        ended = hpo_command(folder, "cancel", "tiny")
        assert ended.exit_code == 1
        assert "is cancelled, but after 0.1 s it has process" in ended.err
        with storage.engine.begin() as connection:
            connection.execute(sa.update(workers).values(state="left"))
    deleted = ok(hpo_command(folder, "delete", "tiny", "--yes"))
    assert "other machines may have such a folder too" in deleted.out
    assert not kept.exists()
    assert ok(hpo_command(folder, "studies")).out == "The database holds no study.\n"


def test_data_on_another_machine_must_be_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are at the study's path, or under HPO_DATA_DIR by the last parts of that path."""
    monkeypatch.delenv("HPO_DATA_DIR", raising=False)
    (tmp_path / "sets").mkdir()
    data = write_set(tmp_path / "sets" / "mine", TOPIC, train=rows("t"), validation=rows("v"))
    write_study(tmp_path, data={"source": "jsonl", "path": "sets/mine"}, n_trials=4)
    ok(hpo_command(tmp_path, "run", "tiny.yaml", "--n-trials", "1"))
    ok(hpo_command(tmp_path, "init", "tiny.yaml"))
    here, url = elsewhere(tmp_path)
    moved = here / "data"
    moved.mkdir()
    data.rename(moved / "mine")
    worker = ("worker", "tiny", "--storage", url)
    refused(hpo_command(here, *worker), f"There is no folder {data}. If it lies elsewhere, set HPO_DATA_DIR")
    monkeypatch.setenv("HPO_DATA_DIR", str(moved))
    read = ok(hpo_command(here, *worker))
    assert f"{data} is not here; the data are read from {moved / 'mine'}" in read.err
    ok(hpo_command(tmp_path, "init", "tiny.yaml", "--n-trials", "9"))
    write_set(moved / "mine", TOPIC, train=rows("x"))
    changed = "The data of the study `tiny` have changed since it was made"
    for command in (worker, ("best", "tiny", "--storage", url, "--evaluate", "validation")):
        finished = hpo_command(here, *command)
        assert finished.exit_code == 2
        assert changed in finished.err
    assert stored(tmp_path).counts["done"] == 4


def test_checkpoints_belong_to_the_copy_of_a_study(tmp_path: Path) -> None:
    """Neither `delete` nor `doctor --fix` of the first database removes them."""
    ok(hpo_command(tmp_path, "run", str(write_study(tmp_path))))
    other = ("--storage", "sqlite:///other.db")
    ok(hpo_command(tmp_path, "copy", "tiny", "--to", other[1]))
    (folder,) = tmp_path.glob("runs/tiny/checkpoints-*")
    (folder / "trial-00009").mkdir()  # superfluous
    before = sorted(folder.rglob("*"))
    again = hpo_command(tmp_path, "copy", "tiny", "--to", other[1])
    refused(again, "Go on with that one, or name another database.")
    ok(hpo_command(tmp_path, "doctor", "--fix"))
    deleted = ok(hpo_command(tmp_path, "delete", "tiny", "--yes"))
    shown = folder.relative_to(tmp_path)
    assert f"Its checkpoints stay in {shown}: {tmp_path}/other.db has" in deleted.out
    assert sorted(folder.rglob("*")) == before
    ok(hpo_command(tmp_path, "best", "tiny", "--evaluate", "test", *other))
    assert "trial-00009 (0.0 MiB) is of trial 9" in ok(hpo_command(tmp_path, "doctor", "--fix", *other)).out
    deleted = ok(hpo_command(tmp_path, "delete", "tiny", "--yes", "--json", *other))
    assert deleted.json["removed_here"] is True
    assert not folder.exists()


def test_delete_removes_uploaded_checkpoints(
    tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPO_ALLOW", s3)
    path = write_study(tmp_path, checkpoint={"location": s3, "top_k": 2})
    ok(hpo_command(tmp_path, "run", str(path)))
    filesystem, root = fsspec.url_to_fs(s3, use_listings_cache=False)

    def uploaded() -> list[str]:
        return [name for name in filesystem.find(root) if name.endswith("/model.safetensors")]

    before = uploaded()
    assert before
    (note,) = tmp_path.glob("runs/tiny/checkpoints-*/database")
    change_definition(tmp_path, checkpoint={"location": s3, "top_k": 1, "every_seconds": 30})
    fixed = ok(hpo_command(tmp_path, "doctor", "--fix"))
    assert f"Study tiny: {s3} has checkpoints of trials that keep none." in fixed.out
    left = uploaded()
    assert 0 < len(left) < len(before)
    note.unlink()
    ok(hpo_command(tmp_path, "copy", "tiny", "--to", "sqlite:///other.db"))
    deleted = ok(hpo_command(tmp_path, "delete", "tiny", "--yes"))
    assert f"Its checkpoints stay in {s3}: nothing on this machine says" in deleted.out
    assert uploaded() == left
    deleted = ok(hpo_command(tmp_path, "delete", "tiny", "--yes", "--storage", "sqlite:///other.db"))
    assert f"Its checkpoints in {s3} are removed" in deleted.out
    assert not uploaded()
