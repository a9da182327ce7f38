"""Whole studies through the command line."""

import itertools
import json
import re
import shutil
import socket
import traceback
from pathlib import Path
from typing import Any

import pytest
import yaml
from sklearn.metrics import f1_score, log_loss, mean_absolute_error
from support.command_line import ROOT, finish, hpo_command, kill, ok, start_hpo, stored, wait_until
from support.every_kind import write_every_kind
from support.resumed_trials import check_resume_is_exact, check_same_weights
from support.several_sources import write_sources
from support.tiny import tiny_executor, write_study

import hpo
from hpo.config.study_config import load_study
from hpo.report.report import write_report
from hpo.report.tables import StudyTables
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import TrialRecord, best_trials
from hpo.study.running import stopping
from hpo.study.running.open_study import open_study
from hpo.study.running.stopping import WORKERS_ON_DEVICE
from hpo.study.running.worker import run_study
from hpo.study.sampling.promotion import RESUMED_ATTR
from hpo.training import loop
from hpo.trial import base_run

SPACE: dict[str, Any] = {"learning_rate": {"type": "float", "low": 1e-4, "high": 1e-3, "log": True}}
TRAINING: dict[str, Any] = {"max_steps": 4, "max_length": 64, "dropout": 0.0}
ON_SOURCES: dict[str, Any] = {"batch_size": 8, "max_length": 32, "dropout": 0.0, "fp_precision": "fp32"}


def test_two_workers_run_exactly_n_trials(tmp_path: Path) -> None:
    space = SPACE | {"batch_size": {"type": "categorical", "choices": [8, 16]}}
    write_study(tmp_path, n_trials=5, search_space=space, training=TRAINING, device="cpu")
    text = ok(hpo_command(tmp_path, "run", "tiny.yaml", "--workers-per-device", "2")).out
    record = stored(tmp_path)
    assert record.counts == {"open": 0, "running": 0, "done": 5}
    assert [trial.outcome for trial in record.trials] == ["complete"] * 5
    assert len({trial.attributes["worker"] for trial in record.trials}) <= 2
    assert len({str(trial.params) for trial in record.trials}) == 5
    line = r"^trial +\d  complete +score 0\.\d+  batch_size=\d+ learning_rate="
    assert len(re.findall(line, text, re.MULTILINE)) == 5
    assert all(trial.telemetry["device"]["shared"] for trial in record.trials)
    assert not StudyTables(record).trials["counts_for_speed"].any()
    for number in range(2):
        [_] = tmp_path.glob(f"runs/tiny/worker-{socket.gethostname()}-*-{number}.log")
    assert len([*tmp_path.glob("runs/*/checkpoints-*/trial-*")]) == 3

    ok(hpo_command(tmp_path, "run", "tiny.yaml", "--n-trials", "6"))
    last = StudyTables(stored(tmp_path)).trials.iloc[-1]
    assert (last["shared"], last["counts_for_speed"]) == (False, True)


def test_mistake_leaves_nothing_behind(tmp_path: Path) -> None:
    """So the mended file is not another definition of a stored study."""
    write_study(tmp_path, objective={"metric": "criteria/f1_mikro"})
    for command in (("run",), ("run", "--workers", "2"), ("worker",), ("init",)):
        refused = hpo_command(tmp_path, *command, "tiny.yaml")
        assert (refused.exit_code, refused.out) == (2, ""), "no study is announced"
        assert "Did you mean `criteria/f1_micro`?" in refused.err
    assert not list(tmp_path.glob("runs/hpo.db*"))
    write_study(tmp_path)
    ok(hpo_command(tmp_path, "run", "tiny.yaml"))


@pytest.mark.parametrize(
    ("command", "num_failed", "supervised", "exit_code"),
    [("run", 3, False, 1), ("run", 1, False, 0), ("worker", 2, False, 1), ("worker", 2, True, 0)],
)
def test_exit_code_of_mostly_failed_trials(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    num_failed: int,
    supervised: bool,
    exit_code: int,
) -> None:
    """A supervisor counts the trials of all its workers, and must not start one again for this."""
    write_study(tmp_path, n_trials=3, max_retries=0)
    make, made = base_run.MixedPrecision, itertools.count()
    monkeypatch.setattr(
        base_run, "MixedPrecision", lambda *args: make(*args) if next(made) >= num_failed else 1 / 0
    )
    if supervised:
        monkeypatch.setenv(WORKERS_ON_DEVICE, "1")
        monkeypatch.setattr(stopping, "stop_at_end_of_input", lambda *_: None)
    finished = hpo_command(tmp_path, command, "tiny.yaml")
    assert finished.exit_code == exit_code
    assert ("Error: 2 of 3 trials failed here." in finished.err) == (bool(exit_code) and num_failed == 2)
    if num_failed == 3:
        assert "has ended without a complete trial" in finished.err
        assert "The last one ended as failed: ZeroDivisionError: division by zero\nTraceback" in finished.err


def test_exported_model_has_the_shown_scores(tmp_path: Path) -> None:
    """Against scikit-learn, on texts longer than a window."""
    write_every_kind(tmp_path, objective={"metric": "topic/log_loss", "direction": "minimize"})
    ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    options = ("--evaluate", "test", "--export", "model", "--json")
    shown = ok(hpo_command(tmp_path, "best", "tiny.yaml", *options)).json["evaluation"]["metrics"]
    predicted = ok(hpo_command(tmp_path, "predict", "model", "data/test.jsonl")).out

    def both(task: str) -> tuple[list[Any], list[Any]]:
        texts = ((tmp_path / "data" / "test.jsonl").read_text(), predicted)
        true, said = ([json.loads(line)["labels"][task] for line in text.splitlines()] for text in texts)
        return true, said

    truth, said = both("topic")
    macro = f1_score(truth, said, labels=sorted(set(truth)), average="macro")
    assert shown["topic"]["f1_macro"] == pytest.approx(macro)
    scores = [json.loads(line)["scores"]["topic"] for line in predicted.splitlines()]
    theirs = log_loss(truth, [[one[label] for label in sorted({*truth})] for one in scores])
    assert shown["topic"]["log_loss"] == pytest.approx(theirs, rel=1e-4)
    assert shown["urgency"]["mae"] == pytest.approx(mean_absolute_error(*both("urgency")), rel=1e-4)


def test_trial_on_sampled_sources_resumes_exactly(tmp_path: Path) -> None:
    executor = tiny_executor(tmp_path, data=write_sources(tmp_path), training={**ON_SOURCES, "epochs": 4})
    sampled = {"sampling_temperature": 3.0, "sampling_weight.mail": 2.0}
    resumed = check_resume_is_exact(executor, tmp_path, stop_at=13, **sampled)
    assert resumed.telemetry["resumed_from_step"] == 11, "in the third epoch of 5 steps"
    assert resumed.telemetry["metrics"].keys() == {"topic", "tone", "size"}
    # 24^(1/3) to 2 * 12^(1/3) is 2.88 to 4.58: 13.9 and 22.1 windows of 36
    assert resumed.telemetry["data"]["sources"] == {
        "news": {"num_windows": 24, "windows_per_epoch": 14},
        "mail": {"num_windows": 12, "windows_per_epoch": 22},
    }
    assert resumed.telemetry["drawn_share"] == {"news": 14 / 36, "mail": 22 / 36}


def test_scores_of_each_source(tmp_path: Path) -> None:
    """`tone` has 8 validation rows of news and 4 of mail."""
    training = {**ON_SOURCES, "max_steps": 20}
    write_study(tmp_path, n_trials=1, data=write_sources(tmp_path), training=training)
    ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    (best,) = ok(hpo_command(tmp_path, "best", "tiny.yaml", "--json")).json["trials"]
    by_source = {name: of_source["tone"]["accuracy"] for name, of_source in best["source_metrics"].items()}
    together = best["metrics"]["tone"]["accuracy"]
    assert (8 * by_source["news"] + 4 * by_source["mail"]) / 12 == pytest.approx(together)
    assert "tasks with several sources" in ok(hpo_command(tmp_path, "best", "tiny.yaml")).out


PROMOTE = {"name": "promote", "starts": 0.2, "keep": 1, "reduction_factor": 2}
"""Its rungs are at 0.2 and 0.4: after steps 2 and 4 of ten."""


def run(folder: Path, **changes: Any) -> dict[float, TrialRecord]:
    """Run a grid of four learning rates with five evaluations; return its trials by learning rate."""
    folder.mkdir()
    few_rows = {"num_train": 48, "num_validation": 12, "num_test": 4, "max_sentences": 4}
    write_study(
        folder,
        n_trials=4,
        sampler={"name": "grid"},
        search_space={"learning_rate": {"type": "categorical", "choices": [1e-6, 3e-4, 1e-3, 3e-3]}},
        training={"max_steps": 10, "batch_size": 8, "max_length": 64, "dropout": 0.1},
        data={"source": "synthetic", "synthetic": few_rows},
        evaluation={"per_trial": 5},
        checkpoint={"top_k": 4},
        **changes,
    )
    ok(hpo_command(folder, "run", "tiny.yaml"))
    return {trial.params["learning_rate"]: trial for trial in stored(folder).trials}


def checkpoints(folder: Path, trial: int = 0) -> Path:
    """Return the folder with the checkpoints of a trial."""
    return next(folder.glob(f"runs/*/checkpoints-*/trial-{trial:05d}"))


def test_resumed_trial_ends_as_without_a_pause(tmp_path: Path) -> None:
    whole, paused = tmp_path / "whole", tmp_path / "paused"
    undisturbed, trials = run(whole), run(paused, pruner=PROMOTE)
    resumed_from = {None: None, 0.2: 2, 0.4: 4}
    for rate, trial in trials.items():
        metrics = [row.metrics for row in trial.evaluations]
        assert metrics == [row.metrics for row in undisturbed[rate].evaluations][: len(metrics)]
        step = resumed_from[trial.attributes.get(RESUMED_ATTR)]
        assert trial.telemetry.get("resumed_from_step") == step
    complete = {rate: trial for rate, trial in trials.items() if trial.outcome == "complete"}
    assert complete
    best = max(undisturbed, key=lambda rate: undisturbed[rate].evaluations[0].metrics["score"])
    went_on = {rate for rate, trial in trials.items() if RESUMED_ATTR in trial.attributes}
    assert complete.keys() | {best} <= went_on
    for rate, trial in complete.items():
        assert trial.values == undisturbed[rate].values
        assert len(trial.evaluations) == 5
        check_same_weights(checkpoints(paused, trial.number), checkpoints(whole, undisturbed[rate].number))
    kept = {path.name for path in paused.glob("runs/tiny/checkpoints-*/trial-*")}
    assert kept == {f"trial-{trial.number:05d}" for trial in complete.values()}
    exported = ok(hpo_command(paused, "best", "tiny.yaml", "--export", "model", "--json")).json
    assert exported["trials"][0]["number"] in {trial.number for trial in complete.values()}


def write_example(example: str, folder: Path) -> None:
    """Write an example with one long trial in fp32, and a checkpoint after each round."""
    source = ROOT / "studies" / "examples" / example
    content = yaml.safe_load((source / "study.yaml").read_text())
    content |= {
        "n_trials": 1,
        "pruner": {"name": "none"},
        "checkpoint": {"every_seconds": 1e-6, "top_k": 9},
        "training": {"seed": 0, "epochs": 6, "batch_size": 50},
        "search_space": content["search_space"]
        | {
            "learning_rate": {"type": "float", "low": 1e-3, "high": 5e-3},
            "fp_precision": {"type": "categorical", "choices": ["fp32"]},
        },
    }
    folder.mkdir()
    (folder / "tiny.yaml").write_text(yaml.safe_dump(content))
    shutil.copy(source / f"{example}.py", folder)


@pytest.mark.parametrize("name", ["own_loop", "own_trainer"])
def test_killed_example_resumes_exactly(name: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        write_example(name, folder)
    # All in processes of their own: one that has trained before may differ in the last bits.
    ok(finish(start_hpo(whole, "run", "tiny.yaml")))
    process = start_hpo(cut, "run", "tiny.yaml")
    wait_until(lambda: len(list(cut.glob("runs/*/checkpoints-*/trial-00000/step-*"))) > 1, process)
    kill(process)
    assert stored(cut, name).trials[0].state == "RUNNING", "killed too late to test anything"
    ok(finish(start_hpo(cut, "run", "tiny.yaml")))
    [first], [second] = stored(whole, name).trials, stored(cut, name).trials
    assert second.telemetry["resumed_from_step"] > 0
    assert (second.outcome, second.values) == ("complete", first.values)
    first_rows, second_rows = (
        [(row.step, row.metrics) for row in one.evaluations] for one in (first, second)
    )
    assert second_rows == first_rows
    check_same_weights(checkpoints(whole), checkpoints(cut))
    assert second.telemetry["precision"]["agrees"] is True


def test_smoke_study(sqlite_url: str, tmp_path: Path) -> None:
    study = load_study(ROOT / "studies" / "smoke.yaml")
    with open_study(study, sqlite_url, tmp_path) as opened:
        summary = run_study(opened)
        record = read_study(opened.storage, study.name)
    assert (summary.ended, len(record.trials)) == ("finished", study.n_trials)
    assert set(summary.outcomes) <= {"complete", "pruned"}
    for trial in record.trials:
        precision = trial.telemetry["precision"]
        assert precision["requested"] == precision["effective"] == trial.params["fp_precision"]
        assert precision["agrees"]
        assert trial.attributes["train_tokens_per_second"] > 0
        assert {"score", "criteria", "evidence", "severity", "burden"} <= set(trial.evaluations[0].metrics)
    (best,) = best_trials(record)
    assert best.values == (max(trial.values[0] for trial in record.trials if trial.values),)
    page = write_report(record, tmp_path / "report").read_text()
    assert "score while training" in page
    assert "No evaluation with" not in page


def test_path_from_the_command_to_the_optimiser_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of the path in `hpo/README.md`; its claim and its parts return before the first step."""
    seen: list[list[str]] = []

    def note(*args: Any) -> None:
        files = [Path(frame.filename) for frame in traceback.extract_stack()]
        seen.append([str(file.relative_to(package)) for file in files if package in file.parents])
        step_unless(*args)

    package, step_unless = Path(hpo.__file__).parent, loop.step_unless
    monkeypatch.setattr(loop, "step_unless", note)
    write_study(tmp_path, n_trials=1)
    ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    after_command = seen[0][seen[0].index("cli/search.py") :]
    assert list(dict.fromkeys(after_command)) == [
        "cli/search.py",
        "api/study.py",
        "study/running/worker.py",
        "trial/executor.py",
        "trial/run.py",
        "training/loop.py",
    ]
