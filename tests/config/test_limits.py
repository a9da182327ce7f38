from pathlib import Path
from typing import Any

import pytest
from support.tiny import tiny_study

from hpo.config.limits import Limit, broken_limits, violation, violations
from hpo.errors import StudyFileError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"peak_memory": {"max": 1}}, r"peak_memory: unknown metric .*Did you mean `peak_memory_bytes`\?"),
        ({"score": {"min": 2, "max": 1}}, r"score\.min: must be <= `max`, but got 2 and 1\."),
        ({"score": {"min": True}}, r"score\.min: must be a number, but got `true`\."),
        ({"score": {"max": float("nan")}}, r"score\.max: must be a finite number"),
        ({"score": {}}, r"score: must have `min` or `max`\."),
        ({"score": None}, r"score: must be a mapping of keys, but got `null`\."),
        ({"score": {"minimum": 1}}, r"score\.minimum: there is no such key\. Did you mean `min`\?"),
    ],
)
def test_bad_limits_are_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(StudyFileError, match=rf"tiny\.yaml:\d+: constraints\.{message}"):
        tiny_study(tmp_path, constraints=given)


def test_violations_are_shares_of_limits() -> None:
    limits = {"a": Limit(max=8.0), "b": Limit(min=500.0), "c": Limit(min=0.0, max=0.5), "d": Limit(min=1.0)}
    values = {"a": 12.0, "b": 400.0, "c": -0.25, "d": None}
    assert violations(limits, values) == {"a": 0.5, "b": pytest.approx(0.2), "c": 0.25, "d": 0.0}
    assert violation(violations(limits, values)) == pytest.approx(0.95)
    said = "a must be <= 8, but is 12. b must be >= 500, but is 400. c must be >= 0 and <= 0.5, but is -0.25."
    assert broken_limits(limits, values) == said
    met = {"a": 8.0, "b": 500.0, "c": 0.5, "d": 1e9}
    assert set(violations(limits, met).values()) == {0.0, -1.0}
    assert not broken_limits(limits, met)
