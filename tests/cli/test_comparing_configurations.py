from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.command_line import hpo_command, ok, refused
from support.jsonl_sets import write_set
from support.tiny import write_study

from hpo.api.study import Study
from hpo.errors import InputError

SPACE = {
    "fp_precision": {"type": "categorical", "choices": ["fp32", "bf16"]},
    "learning_rate": {"type": "categorical", "choices": [1e-4, 1e-3]},
}
LIMIT = "With 24 labelled rows of test, "


def test_the_best_configurations_on_new_seeds(tmp_path: Path) -> None:
    write_study(tmp_path, n_trials=4, sampler={"name": "grid"}, search_space=SPACE)
    ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    told = ok(hpo_command(tmp_path, "compare", "tiny.yaml", "--configurations", "--top", "2"))
    assert told.err.index(LIMIT) < told.err.index("At most 6 trials, about ")
    found = ok(hpo_command(tmp_path, "compare", "tiny", "--configurations", "--json")).json
    assert found["recommendation"] in told.out
    assert found["in_advance"][0].startswith(LIMIT)
    first, second = found["configurations"]
    assert first["trial"] != second["trial"]
    assert first["low"] < first["mean"] < first["high"]
    assert first["num_runs"] == 3
    number = ok(hpo_command(tmp_path, "best", "tiny", "--json")).json["trials"][0]["number"]
    assert f"(test has a detailed evaluation of trial {number})" in told.out, "at the end of the search"
    assert "no precision" not in told.err
    best = ok(hpo_command(tmp_path, "best", "tiny"))
    assert f"Comparison of configurations on new seeds: {found['recommendation']}" in best.out
    ok(hpo_command(tmp_path, "report", "tiny"))
    page = (tmp_path / "runs" / "tiny" / "report" / "report.html").read_text()
    assert "labelled rows of test" in page
    assert Study("tiny", storage=f"sqlite:///{tmp_path}/runs/hpo.db").compare("configurations") == found


@pytest.mark.parametrize(
    "options",
    [
        ("--precisions", "bf16"),
        ("--margin", "1"),
        ("--over", "fp_precision"),
        ("--over", "base_precision"),
        ("--max-seeds", "5"),
    ],
)
def test_options_of_the_other_questions_are_refused(folder: Path, options: tuple[str, ...]) -> None:
    message = f"--configurations takes no {options[0]}: each configuration is trained in its own precision"
    refused(hpo_command(folder, "compare", "tiny.yaml", "--configurations", *options), message)


def test_a_comparison_of_precisions_states_its_limit_too(folder: Path) -> None:
    options = ("--precisions", "bf16", "--top", "1", "--max-seeds", "3")
    told = ok(hpo_command(folder, "compare", "tiny.yaml", *options))
    assert LIMIT in told.err
    assert "At most 6 trials, about " in told.err
    found = ok(hpo_command(folder, "compare", "tiny.yaml", "--json")).json
    limit, trials = found["in_advance"]
    assert limit.startswith(LIMIT)
    assert "no precision can be shown to be as good" in limit
    assert trials.startswith("At most 6 trials, about ")


def test_the_plan_of_a_search_states_the_limit(folder: Path) -> None:
    planned = hpo_command(folder, "plan", "tiny.yaml", "--json")
    assert ok(planned).json["limit"].startswith(LIMIT)
    assert LIMIT in ok(hpo_command(folder, "plan", "tiny.yaml")).out


def test_the_plan_of_a_measured_search_needs_no_data(tmp_path: Path) -> None:
    rows = {
        split: [
            {"id": f"{split} {n}", "text": f"x {n}", "labels": {"topic": "ab"[n % 2]}} for n in range(num)
        ]
        for split, num in (("train", 32), ("validation", 8))
    }
    kind = {"kind": "single_label", "classes": ["a", "b"]}
    data = write_set(tmp_path / "data", {"topic": kind}, **rows)
    write_study(tmp_path, n_trials=1, data={"source": "jsonl", "path": str(data)})
    ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    shutil.rmtree(data)
    told = ok(hpo_command(tmp_path, "plan", "tiny"))
    assert "The losses that `hpo compare` cannot exclude are unknown here: " in told.err
    assert "Device time in all: about" in told.out


def test_a_plan_in_label_units_has_no_default_margin(tmp_path: Path) -> None:
    write_study(tmp_path, objective={"metric": "burden/mae", "direction": "minimize"})
    assert ok(hpo_command(tmp_path, "plan", "tiny.yaml", "--json")).json["limit"] == ""


def test_the_question_is_one_of_four(folder: Path) -> None:
    study = Study("tiny", storage=f"sqlite:///{folder}/runs/hpo.db")
    with pytest.raises(InputError, match="precisions, base_precision, optimizer_state, configurations"):
        study.compare("winner")  # type: ignore[arg-type]
