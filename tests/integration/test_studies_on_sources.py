"""Studies on several data sets."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.command_line import finish, hpo_command, ok, saved_steps, start_hpo, stored, wait_until
from support.resumed_trials import check_resume_is_exact
from support.several_sources import write_sources
from support.tiny import tiny_executor, write_study

SAMPLED = {"sampling_temperature": 3.0, "sampling_weight.mail": 2.0}
TRAINING = {"batch_size": 8, "max_length": 32, "dropout": 0.0, "fp_precision": "fp32"}
METRICS = {"topic", "tone", "size"}


def test_trial_on_sampled_sources_resumes_exactly(tmp_path: Path) -> None:
    executor = tiny_executor(tmp_path, data=write_sources(tmp_path), training={**TRAINING, "epochs": 4})
    resumed = check_resume_is_exact(executor, tmp_path, stop_at=13, **SAMPLED)
    assert resumed.telemetry["resumed_from_step"] == 11, "in the third epoch of 5 steps"
    assert resumed.telemetry["num_steps"] == 4 * 5
    assert resumed.telemetry["metrics"].keys() == METRICS
    assert resumed.telemetry["data"]["num_examples"] == 36
    # 24^(1/3) to 2 * 12^(1/3) is 2.88 to 4.58: 13.9 and 22.1 windows of 36
    assert resumed.telemetry["data"]["sources"] == {
        "news": {"num_windows": 24, "windows_per_epoch": 14},
        "mail": {"num_windows": 12, "windows_per_epoch": 22},
    }
    assert resumed.telemetry["drawn_share"] == {"news": 14 / 36, "mail": 22 / 36}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study on two sources, killed in its first trial and resumed to its end."""
    folder = tmp_path_factory.mktemp("sources")
    write(folder, every_seconds=0.05)
    process = start_hpo(folder, "run", "tiny.yaml")
    wait_until(lambda: bool(saved_steps(folder, trial=0)), process)
    process.kill()
    assert finish(process).exit_code == -signal.SIGKILL
    assert stored(folder).trials[0].outcome == "preempted"
    write(folder, every_seconds=60)
    ok(hpo_command(folder, "run", "tiny.yaml"))
    return folder


def write(folder: Path, every_seconds: float) -> None:
    weight = {"type": "float", "low": 0.5, "high": 4.0, "log": True}
    write_study(
        folder,
        data=write_sources(folder),
        training={**TRAINING, "max_steps": 60},
        checkpoint={"every_seconds": every_seconds, "top_k": 2},
        search_space={
            "sampling_temperature": {"type": "categorical", "choices": [1, 2, 5]},
            "sampling_weight.mail": weight,
        },
    )


def test_killed_study_on_sources_resumes(killed: Path) -> None:
    record = stored(killed)
    assert [trial.outcome for trial in record.trials] == ["complete"] * 2
    assert record.trials[0].telemetry["resumed_from_step"] > 0
    for trial in record.trials:
        assert trial.params.keys() == {"sampling_temperature", "sampling_weight.mail"}
        weight, root = trial.params["sampling_weight.mail"], 1 / trial.params["sampling_temperature"]
        share = weight * 12**root / (24**root + weight * 12**root)
        assert trial.telemetry["drawn_share"]["mail"] == pytest.approx(share, abs=1 / 36)
        assert trial.telemetry["metrics"].keys() == METRICS


def test_scores_of_each_source(killed: Path) -> None:
    (best,) = ok(hpo_command(killed, "best", "tiny.yaml", "--json")).json["trials"]
    assert best["source_metrics"].keys() == {"news", "mail"}
    assert all(of_source.keys() == {"tone"} for of_source in best["source_metrics"].values())
    by_source = {name: of_source["tone"]["accuracy"] for name, of_source in best["source_metrics"].items()}
    together = best["metrics"]["tone"]["accuracy"]
    assert (8 * by_source["news"] + 4 * by_source["mail"]) / 12 == pytest.approx(together)
    shown = ok(hpo_command(killed, "best", "tiny.yaml")).out
    assert "tasks with several sources" in shown
