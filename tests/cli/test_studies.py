from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
import sqlalchemy as sa
from support.command_line import finish, hpo_command, ok, refused, saved_steps, start_hpo, stored, wait_until
from support.jsonl_sets import write_set
from support.tiny import ENCODER, write_long_study, write_study

from hpo.study.checkpoints.checkpoint_folders import note_database
from hpo.study.sampling.promotion import WHOLE_ATTR
from hpo.study.store.schema import studies, workers
from hpo.study.store.storage import open_storage

TOPIC = {"tasks": {"topic": {"kind": "single_label", "classes": ["a", "b"]}}}


def rows(word: str) -> list[dict[str, Any]]:
    return [{"id": f"{word}{n}", "text": f"{word} {n}", "labels": {"topic": "ab"[n % 2]}} for n in range(12)]


def elsewhere(folder: Path) -> tuple[Path, str]:
    """An empty folder, and the URL of the database in `folder`."""
    (folder / "elsewhere").mkdir()
    return folder / "elsewhere", f"sqlite:///{folder}/runs/hpo.db"


def change_definition(folder: Path, **changes: Any) -> None:
    """Change keys of the stored study, as whoever can write to its database may."""
    with open_storage(f"sqlite:///{folder}/runs/hpo.db") as storage, storage.engine.begin() as connection:
        row = connection.execute(sa.select(studies)).one()
        definition = json.loads(row.definition) | changes
        connection.execute(sa.update(studies).values(definition=json.dumps(definition)))


@pytest.fixture
def made(tmp_path: Path) -> Path:
    ok(hpo_command(tmp_path, "init", str(write_study(tmp_path))))
    return tmp_path


def test_a_worker_needs_the_database_alone(made: Path) -> None:
    here, url = elsewhere(made)
    (here / "studies").mkdir()
    write_study(here / "studies", n_trials=7, training={"max_steps": 9})  # another study of that name
    finished = ok(hpo_command(here, "worker", "tiny", "--storage", url, "--json"))
    assert finished.json == {
        "study": "tiny",
        "ended": "finished",
        "outcomes": {"complete": 2},
        "left_out": {},
    }
    refused(hpo_command(here, "worker", "studies/tiny.yaml", "--storage", url), "training.max_steps: 4 -> 9")
    ok(hpo_command(here, "worker", str(made / "tiny.yaml"), "--storage", url))
    (listed,) = ok(hpo_command(made, "studies", "--json")).json
    assert (listed["name"], listed["state"], listed["workers"]) == ("tiny", "done", 0)
    assert listed["trials"] == {"open": 0, "running": 0, "done": 2, "total": 2}
    assert "tiny   finished  2 of 2" in ok(hpo_command(made, "studies", width=120)).out


def test_an_unknown_name(made: Path) -> None:
    url = f"sqlite:///{made}/runs/hpo.db"
    messages = ("There is no study `tony` in sqlite:///", "there is no study `tony` in studies")
    refused(hpo_command(made, "worker", "tony", "--storage", url), *messages)


def test_a_definition_of_another_name_is_refused(made: Path) -> None:
    change_definition(made, name="other")
    refused(hpo_command(made, "worker", "tiny"), "is of `other`")


def test_code_of_an_encoder_runs_only_where_it_is_trusted(made: Path) -> None:
    """A worker of a name does not take the database's word, and one of a file takes nothing from there."""
    change_definition(made, model={"encoder": ENCODER, "revision": None, "trust_remote_code": True})
    (made / "studies").mkdir()
    for study, message in (
        ("tiny", "give the option --trust-remote-code"),
        ("./tiny.yaml", "~ model.trust_remote_code: true -> false"),
    ):
        refused(hpo_command(made, "worker", study), message)
    trusted = ok(hpo_command(made, "worker", "tiny", "--trust-remote-code", "--json"))
    assert trusted.json["outcomes"] == {"complete": 2}
    url = f"sqlite:///{made}/runs/hpo.db"
    scored = hpo_command(made / "studies", "best", "tiny", "--evaluate", "test", "--storage", url)
    refused(scored, "give the option --trust-remote-code")


def test_a_worker_needs_a_study(tmp_path: Path) -> None:
    refused(hpo_command(tmp_path, "worker"), "Missing argument 'STUDY'")
    message = "Error: `hpo worker --idle-timeout` was removed. "
    refused(hpo_command(tmp_path, "worker", "--idle-timeout", "3"), message)


@pytest.mark.parametrize("command", ["pause", "cancel"])
def test_trials_of_a_running_study_are_checkpointed_first(tmp_path: Path, command: str) -> None:
    path = write_long_study(tmp_path, 0.1, max_steps=100_000)
    process = start_hpo(tmp_path, "run", str(path))
    wait_until(lambda: bool(saved_steps(tmp_path)), process)
    changed = ok(hpo_command(tmp_path, command, "tiny"))
    state = {"pause": "paused", "cancel": "cancelled"}[command]
    assert f"The study tiny is {state}: 0 of 2 trials ended" in changed.out
    ended = ok(finish(process))
    assert (
        f"The study tiny is {state}: 0 of 2 trials ended. To continue it: hpo resume tiny, then hpo worker"
        in ended.out
    )
    (trial,) = stored(tmp_path).trials
    assert (trial.state, trial.outcome) == ("RUNNING" if command == "pause" else "FAIL", "preempted")
    again = ok(hpo_command(tmp_path, "run", str(path)))
    assert (
        f"The study tiny is {state}: 0 of 2 trials ended. To continue it: hpo resume tiny, then hpo worker"
        in again.out
    )
    assert (
        f"The study is {state}. To continue it: hpo resume tiny"
        in ok(hpo_command(tmp_path, "status", "tiny")).out
    )
    assert f"is no longer {state}" in ok(hpo_command(tmp_path, "resume", "tiny")).out
    assert stored(tmp_path).state == "open"


def test_delete(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`folder` has a study that was run to its end."""
    kept = [*folder.glob("runs/tiny/checkpoints-*")]
    with open_storage(f"sqlite:///{folder}/runs/hpo.db") as storage:
        note_database(kept[0], storage)  # `folder` is a copy
    refused(hpo_command(folder, "delete", "tiny", "--json"), "give --yes")
    with open_storage(f"sqlite:///{folder}/runs/hpo.db") as storage, storage.engine.begin() as connection:
        start = Path(f"/proc/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[19]
        alive = {"state": "live", "pid": os.getpid(), "process_start": start, "last_seen": time.time()}
        alive |= {"host": "\x1b]0;theirs\x07"}
        connection.execute(sa.update(workers).values(alive))
    ended = refused(hpo_command(folder, "delete", "tiny", "--yes"), "`hpo cancel tiny` stops them.")
    assert "\x1b" not in ended.err, "the host of a worker is what its row says"
    assert [*kept[0].glob("trial-*/best-*")]
    monkeypatch.setattr("hpo.api.lifecycle.WAIT_SECONDS", 0.1)
    ended = hpo_command(folder, "cancel", "tiny")
    assert ended.exit_code == 1
    assert "is cancelled, but after 0.1 s it has process" in ended.err
    with open_storage(f"sqlite:///{folder}/runs/hpo.db") as storage, storage.engine.begin() as connection:
        connection.execute(sa.update(workers).values(state="left"))
    deleted = ok(hpo_command(folder, "delete", "tiny", "--yes"))
    assert "other machines may have such a folder too" in deleted.out
    assert not kept[0].exists()
    assert ok(hpo_command(folder, "studies")).out == "The database holds no study.\n"
    assert hpo_command(folder, "delete", "tiny", "--yes").exit_code == 2


def test_data_are_found_on_another_machine_and_must_be_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are where the study says, or under HPO_DATA_DIR by the last parts of that path."""
    monkeypatch.delenv("HPO_DATA_DIR", raising=False)
    (tmp_path / "sets").mkdir()
    data = write_set(tmp_path / "sets" / "mine", TOPIC, train=rows("t"), validation=rows("v"))
    write_study(tmp_path, data={"source": "jsonl", "path": "sets/mine"}, n_trials=4)
    start = hpo_command(tmp_path, "run", "tiny.yaml", "--n-trials", "1")
    ok(start)
    ok(hpo_command(tmp_path, "init", "tiny.yaml"))
    here, url = elsewhere(tmp_path)
    moved = here / "data"
    moved.mkdir()
    data.rename(moved / "mine")
    lost = hpo_command(here, "worker", "tiny", "--storage", url)
    assert lost.exit_code == 2
    assert f"There is no folder {data}. If it lies elsewhere, set HPO_DATA_DIR" in lost.err
    monkeypatch.setenv("HPO_DATA_DIR", str(moved))
    found = ok(hpo_command(here, "worker", "tiny", "--storage", url))
    assert f"{data} is not here; the data are read from {moved / 'mine'}" in found.err
    ok(hpo_command(tmp_path, "init", "tiny.yaml", "--n-trials", "9"))
    write_set(moved / "mine", TOPIC, train=rows("x"))
    other = hpo_command(here, "worker", "tiny", "--storage", url)
    assert other.exit_code == 2
    assert "The data of the study `tiny` have changed since it was made" in other.err
    assert stored(tmp_path).counts["done"] == 4


def test_checkpoints_are_of_the_copy_of_a_study(tmp_path: Path) -> None:
    """Neither `delete` nor `doctor --fix` of the database that it was copied from takes them."""
    ok(hpo_command(tmp_path, "run", str(write_study(tmp_path))))
    other = ("--storage", "sqlite:///other.db")
    ok(hpo_command(tmp_path, "copy", "tiny", "--to", other[1]))
    (folder,) = tmp_path.glob("runs/tiny/checkpoints-*")
    (folder / "trial-00009").mkdir()  # superfluous
    before = sorted(folder.rglob("*"))
    refused(
        hpo_command(tmp_path, "copy", "tiny", "--to", other[1]),
        "Go on with that one, or name another database.",
    )
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
    found = ok(hpo_command(tmp_path, "doctor", "--fix"))
    assert f"Study tiny: {s3} has checkpoints of trials that keep none." in found.out
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


def test_where_checkpoints_are_is_shown_without_escape_sequences(made: Path) -> None:
    """It is what the study's row says."""
    for command, where in ((["doctor"], "/theirs"), (["delete", "tiny", "--yes"], f"{made}/theirs")):
        change_definition(made, checkpoint={"location": f"{where}\x1b]0;x\x07", "top_k": 1})
        finished = hpo_command(made, *command)
        assert where in finished.out, finished.err
        assert "\x1b" not in finished.out + finished.err, command


def test_a_configuration_is_enqueued(tmp_path: Path) -> None:
    space = {
        "learning_rate": {"type": "float", "low": 1e-4, "high": 1e-2, "log": True},
        "fp_precision": {"type": "categorical", "choices": ["fp32", "fp16"]},
        "init_scale": {"type": "categorical", "choices": [8.0, 64.0], "when": {"fp_precision": "fp16"}},
    }
    ok(hpo_command(tmp_path, "init", str(write_study(tmp_path, search_space=space, n_trials=1))))
    for params, message in (
        (["learning_rate=1"], r"Error: learning_rate=1 is outside 0\.0001 to 0\.01\.$"),
        (
            ["warmup_ratio=0.1"],
            "Error: The study does not search `warmup_ratio`. It searches fp_",
        ),
        (["init_scale=8"], "Error: init_scale is searched only with fp_precision=fp16. Give that, too."),
        (["init_scale=8", "fp_precision=fp32"], "only with fp_precision=fp16, not with fp_precision=fp32."),
        (["fp_precision=bf16"], "Error: fp_precision=bf16 is none of its choices, which are fp32, fp16."),
        (["learning_rate=fast"], "Error: learning_rate=fast: must be a number, but got `fast`."),
        (["nonsense"], "Error: nonsense: must be written as NAME=VALUE."),
    ):
        options = [part for one in params for part in ("--param", one)]
        ended = hpo_command(tmp_path, "enqueue", "tiny", *options)
        assert ended.exit_code == 2
        assert re.search(message, " ".join(ended.err.split())), ended.err
    given = ("--param", "fp_precision=16-mixed", "--param", "init_scale=8")
    told = ok(hpo_command(tmp_path, "enqueue", "tiny", *given, "--whole", "--json")).json
    params = {"fp_precision": "fp16", "init_scale": 8.0}
    assert told == {"study": "tiny", "enqueued": params, "ahead": 0, "whole": True}
    [waiting] = stored(tmp_path).trials
    assert waiting.attributes[WHOLE_ATTR] is True
    refused(
        hpo_command(tmp_path, "enqueue", "tiny", *given),
        "must have a trial left to begin, but has 1, and 1 are enqueued",
    )
    ok(hpo_command(tmp_path, "worker", "tiny"))
    [trial] = stored(tmp_path).trials
    assert told["enqueued"].items() <= trial.params.items()
