from __future__ import annotations

from typing import Any

from hpo.report.verdicts import verdict


def found(artifact: str = "onnx_int8_dynamic", **test: Any) -> dict[str, Any]:
    """Return the stored result of a deployment, as far as its verdict needs it."""
    speed = {"ratio": 1.4, "low": 1.4, "high": 1.8}
    drop = {"value": 0.2, "low": -0.1, "high": 0.6}
    form = {
        "artifact": artifact,
        "timings": {"1": {"p50_ms": 16.0, "speed_up": speed}},
        "judged": {"drop": drop},
    }
    judged = {"verdict": "as_good", "reason": "", "drop": drop} | test
    return {"trial": 0, "unit": "points", "batch_size": 1, "artifacts": [form], "chosen": 0} | {
        "test": {"num_examples": 700, "judged": judged}
    }


def test_verdict_has_the_speed_and_the_drop_on_test() -> None:
    text = verdict(found())
    assert "16 ms for 1 text (median), 1.40 [1.40, 1.80] times fp32's speed. Drop on 700 rows of test" in text
    assert text.endswith("+0.200 [-0.100, +0.600] points: as good there too.")
    open_verdict = found(verdict="not_shown", reason="the drop may be beyond.")
    assert verdict(open_verdict).endswith("points. the drop may be beyond.")
    assert verdict(found() | {"test": None}).endswith("points. No other rows were scored.")
    assert verdict(found("fp32")).endswith("(median). Nothing faster is known to be as good.")
