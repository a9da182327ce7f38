"""`hpo verify --parts`: the parts of a model in each low precision, on a described CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.tiny import CPU, ENCODER, altered_executor, tiny_executor
from trial.test_part_search import SECOND, enlarge

from hpo.report.terminal import print_parts
from hpo.report.trial_screens import parts_verification
from hpo.trial.costs import costs_of_parts
from hpo.trial.part_search import check_of
from hpo.trial.trial_parts import build_trial
from hpo.trial.verify_parts import PartsCheck, verify_parts

TRAINING = {"max_steps": 2, "batch_size": 8, "max_length": 64, "dropout": 0.0}
MODEL = {"encoder": ENCODER | {"num_hidden_layers": 1}}
BF16_CPU = replace(CPU, cpu_features=frozenset({"avx512_bf16"}))
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


def test_each_part_is_measured_alone(checks: dict[str, PartsCheck]) -> None:
    for name in ("bf16", "fp16"):
        parts = {part.own.part: part for part in checks[name].parts}
        assert [*parts][:3] == PARTS
        assert all(part.costs and part.costs.seconds > 0 for part in parts.values())
    overflowed = [part.own.part for part in checks["fp16"].parts if part.own.error == float("inf")]
    assert overflowed == ["layers.0"]
    errors = {part.own.part: part.own.error for part in checks["bf16"].parts}
    assert max(errors, key=lambda part: errors[part]) == "layers.0"
    assert errors["embeddings"] == 0, "no product"


def test_the_parts_that_need_fp32_are_found(checks: dict[str, PartsCheck]) -> None:
    found = checks["fp16"].found
    assert found is not None
    assert (found.parts, found.before, found.after) == ((SECOND,), "incompatible", "ok")
    assert SECOND in checks["fp16"].fastest or "layers.0" in checks["fp16"].fastest
    found = checks["bf16"].found
    assert found is not None
    assert (found.parts, found.before) == ((), "ok")


def test_the_screen_names_them(checks: dict[str, PartsCheck], capsys: pytest.CaptureFixture[str]) -> None:
    print_parts(parts_verification([*checks.values()], CPU.describe()))
    text = " ".join(capsys.readouterr().out.split())
    assert f"fp16: fp32_parts: auto is {SECOND} (incompatible without, ok with;" in text
    assert "bf16: fp32_parts: auto is no part (ok; 1 checks)." in text
    assert "which this test CPU lacks" in text


def test_costs_are_against_no_part(tmp_path: Path) -> None:
    executor = tiny_executor(tmp_path, model=MODEL, training=TRAINING | {"fp_precision": "bf16"})
    parts = build_trial(executor.resolved, {}, executor.loader)
    costs = costs_of_parts(parts, [("heads",), ()], repeats=2)
    assert costs is not None
    assert [*costs] == [("heads",), ()]
    assert costs[("heads",)].seconds > 0


@pytest.mark.slow
def test_minilm_in_bf16(tmp_path: Path) -> None:
    """The fastest set passes the check, whatever the machine found to be the fastest. Prints the table."""
    executor = tiny_executor(
        tmp_path, BF16_CPU, model={"encoder": "minilm"}, training=TRAINING | {"max_length": 32}, amp={}
    )
    bf16, fp16 = verify_parts(executor, repeats=1)
    assert fp16.found is None, "it would be emulated"
    print_parts(parts_verification([bf16], BF16_CPU.describe()))
    assert bf16.found is not None
    assert (bf16.found.parts, bf16.found.after) == ((), "ok")
    errors = [part.own.error for part in bf16.parts if part.own.part.startswith("layers.")]
    assert len(errors) == 6
    assert 0 < max(errors) < 0.1
    parts = build_trial(executor.resolved, {"fp_precision": "bf16"}, executor.loader)
    assert check_of(parts, None)(bf16.fastest).verdict == "ok"
