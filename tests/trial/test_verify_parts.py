"""`hpo verify --parts`: the parts of a model in each low precision, on a described CPU."""

from __future__ import annotations

import pytest
from support.tiny import CPU, ENCODER, altered_executor
from trial.test_part_search import SECOND, enlarge

from hpo.report.part_screens import parts_verification
from hpo.report.terminal import print_parts
from hpo.trial.verify_parts import PartsCheck, verify_parts

TRAINING = {"max_steps": 2, "batch_size": 8, "max_length": 64, "dropout": 0.0}
MODEL = {"encoder": ENCODER | {"num_hidden_layers": 1}}
PARTS = ["embeddings", "layers.0", "encoder.pooler"]


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PartsCheck]:
    executor = altered_executor(
        tmp_path_factory.mktemp("study"), enlarge(SECOND), model=MODEL, training=TRAINING
    )
    return {check.precision: check for check in verify_parts(executor, repeats=1)}


def test_precisions_with_autocast_are_measured(checks: dict[str, PartsCheck]) -> None:
    assert [*checks] == ["bf16", "fp16"]
    assert all("this test CPU lacks" in check.note for check in checks.values()), "they are emulated"


def test_each_part_has_errors_and_costs(checks: dict[str, PartsCheck]) -> None:
    for name in ("bf16", "fp16"):
        parts = {part.own.part: part for part in checks[name].parts}
        assert [*parts][:3] == PARTS
        assert all(part.costs and part.costs.seconds > 0 for part in parts.values())
    overflowed = [part.own.part for part in checks["fp16"].parts if part.own.error == float("inf")]
    assert overflowed == ["layers.0"]
    errors = {part.own.part: part.own.error for part in checks["bf16"].parts}
    assert max(errors, key=lambda part: errors[part]) == "layers.0"
    assert errors["embeddings"] == 0, "no product"


def test_necessary_parts_are_found(checks: dict[str, PartsCheck]) -> None:
    found = checks["fp16"].found
    assert found is not None
    assert (found.parts, found.before, found.after) == ((SECOND,), "incompatible", "ok")
    assert SECOND in checks["fp16"].fastest or "layers.0" in checks["fp16"].fastest
    found = checks["bf16"].found
    assert found is not None
    assert (found.parts, found.before) == ((), "ok")


def test_screen_names_the_parts(checks: dict[str, PartsCheck], capsys: pytest.CaptureFixture[str]) -> None:
    print_parts(parts_verification([*checks.values()], CPU.describe()))
    text = " ".join(capsys.readouterr().out.split())
    assert f"fp16: fp32_parts: auto is {SECOND} (incompatible without, ok with;" in text
    assert "bf16: fp32_parts: auto is no part (ok; 1 checks)." in text
    assert "which this test CPU lacks" in text
