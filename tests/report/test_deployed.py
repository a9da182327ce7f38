from __future__ import annotations

from typing import Any

from hpo.deploy.artifacts import NAMES
from hpo.deploy.result import Confirmation, DeployedArtifact, Deployment, Judged, TaskDrop
from hpo.deploy.timing import SpeedUp, Timing
from hpo.evaluation.record import Interval
from hpo.report.deployed import verdict


def found(chosen: str = "onnx_int8_dynamic", **changes: Any) -> dict[str, Any]:
    """Return a deployment with every form of a model of two tasks, each faster than the one before."""
    interval, drop = Interval(0.9, 0.88, 0.92), Interval(0.1, -0.25, 0.45)
    artifacts = []
    for place, name in enumerate(NAMES):
        speed = SpeedUp(1 + place / 10, 1 + place / 10, 1 + place / 5)
        timing = Timing(20.0 - place, 30.0, 100, speed)
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


def test_verdict_has_the_speed_and_the_drop_on_test() -> None:
    assert verdict(found()) == (
        "onnx_int8_dynamic of trial 0 is the fastest as good as fp32 on validation: 16 ms for 1 text "
        "(median), 1.40 [1.40, 1.80] times fp32's speed. Drop on 700 rows of test, which chose nothing: "
        "+0.200 [-0.100, +0.600] points: as good there too."
    )
    content = found()
    content["test"]["judged"] |= {"verdict": "not_shown", "reason": "the drop may be beyond."}
    assert verdict(content).endswith("points. the drop may be beyond.")
    assert verdict(found(test=None)).endswith("points. No other rows were scored.")
    assert verdict(found("fp32")).endswith("(median). Nothing faster is known to be as good.")
