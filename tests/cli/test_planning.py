"""`hpo check` and `hpo plan`: before a study runs."""

import shutil
from pathlib import Path

import pytest
from support.command_line import hpo_command, ok, refused
from support.jsonl_sets import write_set
from support.tiny import write_study


def test_check_describes_the_data_of_a_file_or_a_stored_study(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    refused(hpo_command(tmp_path, "check", "tiny"), "Did you mean `./tiny.yaml`?")
    shown = ok(hpo_command(tmp_path, "check", "tiny.yaml", width=120)).out
    assert "criteria" in shown
    assert not (tmp_path / "runs" / "hpo.db").exists()
    ok(hpo_command(tmp_path, "init", "tiny.yaml"))
    path.unlink()
    checked = ok(hpo_command(tmp_path, "check", "tiny", "--json")).json
    assert checked.keys() >= {"study", "facts", "lengths", "advice"}
    assert checked["facts"]["splits"]["train"]["num_rows"] == 48
    assert "independent pieces" in shown


def test_plan_measures_first_and_then_uses_the_trials(tmp_path: Path) -> None:
    rows = {
        split: [{"id": f"{split}{n}", "text": f"x {n}", "labels": {"topic": "ab"[n % 2]}} for n in range(num)]
        for split, num in (("train", 32), ("validation", 24))
    }
    kind = {"kind": "single_label", "classes": ["a", "b"]}
    data = write_set(tmp_path / "data", {"topic": kind}, **rows)
    write_study(tmp_path, n_trials=2, data={"source": "jsonl", "path": str(data)})
    before = ok(hpo_command(tmp_path, "plan", "tiny.yaml", "--workers", "2", "--json")).json
    assert [one["measured_by"] for one in before["costs"]] == ["13 steps"]
    assert before["limit"].startswith("With 24 labelled rows of validation, ")
    assert before["hours"] == pytest.approx(2 * before["costs"][0]["seconds"] / 3600)
    assert before["hours_to_the_end"] == pytest.approx(before["hours"] / 2)
    assert not (tmp_path / "runs/hpo.db").exists(), "nothing is stored"
    ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    shutil.rmtree(data)  # a measured study needs no data
    after = hpo_command(tmp_path, "plan", "tiny.yaml", "--json")
    assert [one["measured_by"] for one in ok(after).json["costs"]] == ["2 complete trials"]
    assert after.json["spent_hours"] > 0
    text = ok(hpo_command(tmp_path, "plan", "tiny.yaml", "--hours", "0.01"))
    assert "of the budget of 36 s" in text.out
    assert "The losses that `hpo compare` cannot exclude are " in text.err


def test_a_plan_in_label_units_has_no_default_margin(tmp_path: Path) -> None:
    write_study(tmp_path, objective={"metric": "burden/mae", "direction": "minimize"})
    assert ok(hpo_command(tmp_path, "plan", "tiny.yaml", "--json")).json["limit"] == ""
