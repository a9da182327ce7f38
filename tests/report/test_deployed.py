from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from hpo.deploy.artifacts import NAMES
from hpo.deploy.result import Confirmation, DeployedArtifact, Deployment, Judged, TaskDrop
from hpo.deploy.timing import SpeedUp, Timing
from hpo.evaluation.record import Interval
from hpo.report import terminal
from hpo.report.deployed import loading, shown, verdict


def found(chosen: str = "onnx_int8_dynamic", **changes: Any) -> dict[str, Any]:
    """A deployment with every artifact of a model of two tasks, the later the faster."""
    artifacts = []
    for place, name in enumerate(NAMES):
        speed = SpeedUp(1 + place / 10, 1 + place / 10, 1 + place / 5)
        timing = Timing(20.0 - place, 30.0, 100, speed)
        interval = Interval(0.9, 0.88, 0.92)
        drop = Interval(0.1, -0.25, 0.45)
        tasks = {
            key: TaskDrop("f1_micro", interval, Interval(-1.23, -2.5, 0.5)) for key in ("intent", "slots")
        }
        artifacts.append(
            DeployedArtifact(
                artifact=name,
                judged=Judged("as_good", "", interval, drop, tasks),
                weight_bytes=91_012_345 if place < 4 else 22_800_000,
                timings={1: timing, 32: timing},
            )
        )
    confirmed = Judged("as_good", "", Interval(0.89, 0.87, 0.91), Interval(0.2, -0.1, 0.6))
    deployment = Deployment(
        study="banking",
        trial=0,
        num_examples=1234,
        objective="score",
        unit="points",
        max_drop=1.0,
        batch_size=1,
        num_threads=2,
        device={"type": "cpu", "name": "AMD EPYC", "features": ["avx2"]},
        versions={"torch": "2.13.0"},
        artifacts=tuple(artifacts),
        chosen=NAMES.index(chosen),
        test=Confirmation(700, Interval(0.89, 0.87, 0.91), confirmed),
        left_out={},
    )
    return deployment.as_json() | changes


def test_numbers_and_units_are_whole_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "Console", lambda **given: Console(width=80, **given))
    terminal.print_parts(shown({**found(), "folder": "runs/banking/deploy"}))
    screen = capsys.readouterr().out
    tables, _, _ = screen.partition("fp16:")
    assert max(map(len, tables.splitlines())) <= 80
    told = screen.replace("\u00a0", " ")
    assert told.count("91.0 MB") == 4
    assert told.count("22.8 MB") == 1
    assert "by task: the primary metric; drops in points" in told
    assert told.count("-1.23 [-2.50,") == 8
    assert 'hpo.load("runs/banking/deploy/model", device="cpu")' in told


def test_the_model_is_loaded_where_it_was_scored() -> None:
    assert loading(found("fp32"), "model") == 'hpo.load("model", device="cpu")'
    gpu = {"type": "cuda", "name": "NVIDIA L4", "features": []}
    assert loading(found("bf16", device=gpu), "model") == 'hpo.load("model")'


def test_the_sentence_says_what_test_has_found() -> None:
    told = verdict(found()).replace("\u00a0", " ")
    assert told == (
        "onnx_int8_dynamic of trial 0 is the fastest that is as good as fp32 on validation: 16 ms a batch of "
        "1 (median), 1.40 [1.40, 1.80] times fp32's speed. On the 700 rows of test, which chose nothing, it "
        "drops by +0.20 [-0.10, +0.60] points: as good there too."
    )
    content = found()
    content["test"]["judged"] |= {"verdict": "not_shown", "reason": "the drop may be beyond."}
    assert verdict(content).endswith("points. the drop may be beyond.")
    assert verdict(found(test=None)).endswith("points; no rows that did not choose it were scored.")
    assert verdict(found("fp32")).endswith("(median). Nothing faster is known to be as good.")
