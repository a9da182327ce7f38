"""`hpo compare` as a user types it, with real trials of a second each."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from command_line import finish, hpo_command, ok, start_hpo, wait_until
from jsonl_sets import write_set
from tiny import write_study

from hpo.compare.companion import Request, open_comparison
from hpo.config.study_config import stored_study
from hpo.study.storage import open_storage

SPACE = {
    "fp_precision": {"type": "categorical", "choices": ["fp32", "bf16"]},
    "learning_rate": {"type": "categorical", "choices": [1e-4, 1e-3]},
}
ONE_RATE = {"fp_precision": SPACE["fp_precision"]}
KEYS = {"precision", "question", "metric", "verdict", "difference", "low", "high", "num_seeds", "speed_ratio"}
OPTIONS = ("--top", "1", "--max-seeds", "3", "--precisions", "bf16")


@pytest.fixture
def searched(tmp_path: Path) -> Path:
    """A folder with a study that has run."""
    write_study(tmp_path, n_trials=4, sampler={"name": "grid"}, search_space=SPACE)
    ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    return tmp_path


def test_precisions_and_configurations(searched: Path) -> None:
    found = ok(hpo_command(searched, "compare", "tiny.yaml", *OPTIONS, "--json")).json
    assert all(row.keys() >= KEYS for row in found["verdicts"])
    said = {(row["precision"], row["question"], row["is_noise_floor"]) for row in found["verdicts"]}
    assert said == {("bf16", "paired", False), ("bf16", "tuned", False), ("fp32", "paired", True)}
    assert {row["verdict"] for row in found["verdicts"]} <= {"as_good", "worse", "undecided"}
    assert {row["num_seeds"] for row in found["verdicts"]} == {3}
    with open_storage(f"sqlite:///{searched}/runs/hpo.db") as storage:
        trials = storage.read_study("tiny-compare").trials
    assert all(trial.telemetry["test_metrics"] for trial in trials)
    assert not list(searched.glob("runs/tiny-compare/checkpoints-*/trial-*/best-*"))

    again = ok(hpo_command(searched, "compare", "tiny.yaml"))
    assert found["recommendation"] in again.out
    with open_storage(f"sqlite:///{searched}/runs/hpo.db") as storage:
        assert len(storage.read_study("tiny-compare").trials) == len(trials), "nothing is trained twice"

    waits = ok(hpo_command(searched, "worker", "tiny-compare", "--timeout", "0.1"))
    assert "has added no trials" not in waits.err, "it has ended"
    with open_storage(f"sqlite:///{searched}/runs/hpo.db") as storage:
        storage.store_comparison("tiny", "precisions", found | {"has_ended": False})
    waits = ok(hpo_command(searched, "worker", "tiny-compare", "--timeout", "0.1"))
    assert "`hpo compare` has added no trials to `tiny-compare`" in waits.err
    with open_storage(f"sqlite:///{searched}/runs/hpo.db") as storage:
        storage.store_comparison("tiny", "precisions", found)

    race = ok(hpo_command(searched, "compare", "tiny", "--configurations", "--max-seeds", "3", "--json")).json
    best = ok(hpo_command(searched, "best", "tiny"))
    assert found["recommendation"] in best.out
    assert race["recommendation"] in best.out
    assert any(f"best trial {number}:" in best.out for number in race["too_close"] or [race["best"]])


def test_killed_and_continued(searched: Path) -> None:
    """No trial that has ended runs again."""
    process = start_hpo(searched, "compare", "tiny.yaml", *OPTIONS)
    url = f"sqlite:///{searched}/runs/hpo.db"

    def ended() -> list[int]:
        with open_storage(url) as storage:
            if not storage.has_study("tiny-compare"):
                return []
            return [
                one.number for one in storage.read_study("tiny-compare").trials if one.outcome == "complete"
            ]

    wait_until(lambda: len(ended()) >= 2, process)
    process.send_signal(signal.SIGKILL)
    finish(process)
    done = ended()
    found = ok(hpo_command(searched, "compare", "tiny.yaml", "--json")).json
    assert found["has_ended"]
    with open_storage(url) as storage:
        record = storage.read_study("tiny-compare")
    assert record.slots["open"] == record.slots["running"] == 0
    assert len({str(trial.params) for trial in record.trials}) == len(record.trials) >= len(done)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--precisions", "bf17"], "--precisions: no precision is called 'bf17'. Did you mean `bf16`?"),
        (["--margin", "0"], "Invalid value for '--margin'"),
        (["--seeds", "2"], "Invalid value for '--seeds'"),
        ([], "needs complete trials, but the study `tiny` has none yet"),
    ],
)
def test_bad_input(options: list[str], message: str, tmp_path: Path) -> None:
    write_study(tmp_path, search_space=SPACE)
    ok(hpo_command(tmp_path, "init", "tiny.yaml"))
    refused = hpo_command(tmp_path, "compare", "tiny.yaml", *options)
    assert refused.exit_code == 2
    assert message in refused.err
    with open_storage(f"sqlite:///{tmp_path}/runs/hpo.db") as storage:
        assert not storage.has_study("tiny-compare")


def test_a_test_split_without_labels(tmp_path: Path) -> None:
    """As in a shared task whose truth is held back: the scores are of the validation split."""
    rows: dict[str, Any] = {
        split: [
            {"id": f"{split} {index}", "text": f"{label} {index}", "labels": {"topic": label}}
            for index, label in enumerate("ab" * 8)
        ]
        for split in ("train", "validation")
    }
    rows["test"] = [{"id": "unknown", "text": "x"}]
    write_set(tmp_path / "data", {"topic": {"kind": "single_label", "classes": ["a", "b"]}}, **rows)
    of_file = {"source": "jsonl", "path": "data"}
    write_study(tmp_path, data=of_file, n_trials=2, sampler={"name": "grid"}, search_space=ONE_RATE)
    ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    compared = ok(hpo_command(tmp_path, "compare", "tiny.yaml", *OPTIONS, "--json"))
    assert compared.json["has_ended"]
    assert {row["num_seeds"] for row in compared.json["verdicts"]} == {3}
    said = "Scores are of the validation split: the test split has no labels of `topic`."
    assert said in compared.err


def test_a_precision_that_this_device_lacks(searched: Path) -> None:
    """Nothing is stored, so that a comparison without it can be begun; one that was begun elsewhere stays."""
    refused = hpo_command(searched, "compare", "tiny.yaml", "--precisions", "bf16,tf32", "--json")
    assert (refused.exit_code, refused.out) == (2, "")
    assert "this one does not run tf32. `tf32` needs CUDA with compute capability >= 8.0" in refused.err
    assert "Leave tf32 out of --precisions, or compare on a device that does." in refused.err
    with open_storage(f"sqlite:///{searched}/runs/hpo.db") as storage:
        assert not storage.has_study("tiny-compare")
        record = storage.read_study("tiny")
        config = stored_study("tiny", record.definition)
        request = Request(precisions=("fp32", "bf16", "tf32"), top=1, max_seeds=3)
        elsewhere = open_comparison(storage, record, config, request, runnable=("fp32",), has_test=True)
        storage.create_or_resume_study(elsewhere)
    refused = hpo_command(searched, "compare", "tiny.yaml", "--json")
    assert (refused.exit_code, refused.out) == (2, "")
    assert "Go on on a device that does, or begin anew, without its trials: hpo delete" in refused.err
