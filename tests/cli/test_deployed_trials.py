"""Which trials `hpo deploy` takes, and on which device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import hpo_command, ok
from planted_int8 import write_mood_study
from study_records import record_of, with_values

from hpo.cli import deploying
from hpo.cli.deploying import _best
from hpo.config.study_config import DEPLOYED_LATENCY, StudyConfig
from hpo.deploy.timing import Effort, time_in_turn


def test_with_several_objectives_the_best_is_the_best_model() -> None:
    fast = with_values(0, (1.0, 0.5), learning_rate=1e-5)
    good = with_values(1, (9.0, 0.9), learning_rate=1e-4)
    fair = with_values(2, (5.0, 0.8), learning_rate=2e-4)
    names, directions = (DEPLOYED_LATENCY, "score"), ("minimize", "maximize")
    record = record_of([fast, good, fair], metric_names=names, directions=directions)
    assert [trial.number for trial in _best(record, 3)] == [1, 2, 0]
    assert [trial.number for trial in _best(record, 1)] == [1]


def test_a_configuration_is_deployed_once() -> None:
    params = [{"batch_size": 8, "seed": 0}, {"batch_size": 8, "seed": 1}, {"batch_size": 16, "seed": 0}]
    trials = [replace(with_values(number, (0.9,)), params=of) for number, of in enumerate(params)]
    # On new seeds a trial was best that the search ranks behind another one of its configuration.
    race = {"standings": [{"configuration": 0}, {"configuration": 1}], "has_ended": True}
    race |= {"too_close": [], "best": 1}
    record = record_of(trials, comparisons={"configurations": race})
    assert [trial.number for trial in _best(record, 3)] == [1, 2]


@pytest.fixture
def mood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def little(predict: Any, rows: Any, size: int, _: Effort) -> Any:
        return time_in_turn(predict, rows, size, Effort(rounds=2, seconds=0.1))

    monkeypatch.setattr("hpo.deploy.deployment.time_in_turn", little)
    space = {"weight_decay": {"type": "categorical", "choices": [0.0, 0.01]}}
    study = write_mood_study(
        tmp_path, search_space=space, n_trials=2, sampler={"name": "grid"}, checkpoint={"top_k": 2}
    )
    ok(hpo_command(tmp_path, "run", str(study)))
    return tmp_path


def test_trials_of_a_gpu_are_deployed_on_a_cpu_one_export_at_a_time(
    mood: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_study: Callable[..., StudyConfig] = deploying.config_of
    monkeypatch.setattr(
        deploying, "config_of", lambda *args: of_study(*args).model_copy(update={"device": "cuda"})
    )
    exports: list[int] = []
    candidates = deploying._candidates

    def watched(executor: Any, study: Any, trials: Any, folder: Path) -> Any:
        for candidate in candidates(executor, study, trials, folder):
            exports.append(len(list(folder.iterdir())))
            yield candidate

    monkeypatch.setattr(deploying, "_candidates", watched)
    found = ok(hpo_command(mood, "deploy", "mood", "--artifacts", "fp32", "--top", "2", "--json")).json
    assert {row["trial"] for row in found["artifacts"]} == {0, 1}
    assert exports == [1, 1]


def test_a_full_disk_is_one_line(mood: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hpo.report.deployment_page.deployment_html", full)
    finished = hpo_command(mood, "deploy", "mood", "--artifacts", "fp32")
    assert finished.exit_code == 1
    assert "could not be written: [Errno 28] No space left on device. Free space" in finished.err
    assert not list((mood / "runs" / "mood").glob("*deploy*"))
