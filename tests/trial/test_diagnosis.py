"""Trials that break on purpose: the module, the operator and the settings that heal are named exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from broken_models import (
    TRAINING,
    altered,
    cancelling_layer,
    lacking_operator,
    product_loss,
    sharp_attention,
    wide_head,
    wide_layer,
)
from tiny import CPU

from hpo.device import DeviceInfo
from hpo.errors import InputError, RunError
from hpo.models.multitask import MultitaskModel
from hpo.trial.diagnosis import Diagnosis, StoredTrial, diagnose
from hpo.trial.executor import Executor

UNCHECKED = {"compat": {"enabled": False}}
ATTENTION, LAYER_0, LAYER_1 = (
    f"precision_overrides.{part}" for part in ("attention", "encoder.layer.0", "encoder.layer.1")
)


def ended(executor: Executor, folder: Path, **params: Any) -> StoredTrial:
    """A trial that has been run to its end, with its checkpoints."""
    result = executor.run(params, folder, "token/0")
    telemetry = json.loads(json.dumps(result.telemetry))  # as a database has it
    return StoredTrial(0, str(result.outcome), result.reason, params, telemetry, folder, "token/0")


def diagnosed(executor: Executor, folder: Path, **params: Any) -> Diagnosis:
    trial = ended(executor, folder, **params)
    before = contents(folder)
    found = diagnose(executor, trial, 1000)
    assert contents(folder) == before
    json.dumps(asdict(found))
    return found


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def tried(found: Diagnosis, **settings: Any) -> bool | None:
    """Whether a remedy of these settings heals; None: it was not tried."""
    return next((one.heals for one in found.remedies if one.settings == settings), None)


@pytest.mark.parametrize("check", [True, False], ids=["in the check", "in training"])
@pytest.mark.parametrize(
    ("alter", "module", "operator", "healed_by"),
    [
        (sharp_attention, "encoder.encoder.layer.0.attention.self", "aten.bmm.default", ATTENTION),
        (
            lambda model: sharp_attention(model, 1),
            "encoder.encoder.layer.1.attention.self",
            "aten.bmm.default",
            LAYER_1,
        ),
        (wide_layer, "encoder.encoder.layer.1.output.dense", "aten.addmm.default", LAYER_1),
        (wide_head, "heads.2.1", "aten._to_copy.default", "precision_overrides.heads.severity"),
    ],
    ids=["attention", "one layer's attention", "one layer", "a head"],
)
def test_what_overflows_in_fp16_is_named_and_healed(
    tmp_path: Path,
    check: bool,
    alter: Callable[[MultitaskModel], object],
    module: str,
    operator: str,
    healed_by: str,
) -> None:
    executor = altered(tmp_path, alter, compat={"enabled": check})
    found = diagnosed(executor, tmp_path / "trial", fp_precision="fp16")
    assert found.outcome == ("incompatible" if check else "nonfinite")
    assert (found.what, found.step) == (("logits", None) if check else ("loss", 1))
    origin = found.origin
    assert (origin.module, origin.operator, origin.phase) == (module, operator, "forward")
    assert origin.inputs_finite
    assert any(one.dtype == "float16" and one.nonfinite_share > 0 for one in origin.outputs)
    assert found.healed_by == {healed_by: "fp32"}
    assert healed_by.removeprefix("precision_overrides.") in found.parts
    assert tried(found, fp_precision="fp32") is True
    (scaled,) = (one for one in found.remedies if "init_scale" in one.settings)
    assert scaled.settings["init_scale"] == (1 / 64 if check else 1024.0)
    assert not scaled.heals, "nothing of it is in the backward pass"


def test_two_layers_that_overflow_are_found_one_after_the_other(tmp_path: Path) -> None:
    def alter(model: MultitaskModel) -> None:
        wide_layer(model, 0)
        wide_layer(model, 1)

    found = diagnosed(altered(tmp_path, alter, **UNCHECKED), tmp_path / "trial", fp_precision="fp16")
    assert found.origin.module == "encoder.encoder.layer.0.output.dense"
    assert tried(found, **{LAYER_0: "fp32"}) is False
    assert found.healed_by == {LAYER_0: "fp32", LAYER_1: "fp32"}


def test_a_part_that_the_trial_had_in_fp32_already_stays(tmp_path: Path) -> None:
    def alter(model: MultitaskModel) -> None:
        wide_layer(model, 0)
        wide_head(model)

    executor = altered(tmp_path, alter, **UNCHECKED)
    found = diagnosed(executor, tmp_path / "trial", fp_precision="fp16", **{LAYER_0: "fp32"})
    assert found.origin.module == "heads.2.1"
    assert found.healed_by == {LAYER_0: "fp32", "precision_overrides.heads.severity": "fp32"}


@pytest.mark.parametrize("check", [True, False])
def test_a_loss_that_overflows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: bool) -> None:
    monkeypatch.setattr("hpo.training.losses.loss_sum", product_loss)
    executor = altered(tmp_path, compat={"enabled": check}, training=TRAINING | {"max_steps": 24})
    found = diagnosed(executor, tmp_path / "trial", fp_precision="fp16")
    assert (found.what, found.origin.module, found.origin.operator) == ("loss", None, "aten.mm.default")
    assert found.parts == ("loss",)
    assert found.healed_by == {"precision_overrides.loss": "fp32"}


def test_what_loses_its_digits_in_bf16_is_the_farthest_module(tmp_path: Path) -> None:
    found = diagnosed(altered(tmp_path, cancelling_layer), tmp_path / "trial", fp_precision="bf16")
    assert (found.outcome, found.what, found.origin) == ("incompatible", "far", None)
    farthest = found.farthest[0]
    assert (farthest.module, farthest.kind) == (
        "encoder.encoder.layer.0.attention.output.dense",
        "Cancelling",
    )
    assert farthest.own_error > 10 * found.farthest[1].own_error
    assert found.healed_by == {LAYER_0: "fp32"}


def test_an_operator_that_bf16_lacks(tmp_path: Path) -> None:
    found = diagnosed(altered(tmp_path, lacking_operator), tmp_path / "trial", fp_precision="bf16-true")
    assert (found.outcome, found.what, found.origin) == ("incompatible", "raised", None)
    assert "in encoder.encoder.layer.1.output.dense.dense: " in found.notes[0]
    assert found.healed_by == {LAYER_1: "fp32"}


@pytest.mark.parametrize("grows", [False, True])
def test_a_scale_whose_floor_is_too_high(tmp_path: Path, grows: bool) -> None:
    """One that grows by too much is not healed by the one step that it makes before."""
    growth = {"growth_interval": 1, "growth_factor": 2.0**20} if grows else {}
    amp = {"allow_emulated": True, "min_scale": 2.0**20, "init_scale": 2.0**20, **growth}
    found = diagnosed(altered(tmp_path, amp=amp, **UNCHECKED), tmp_path / "trial", fp_precision="fp16")
    assert (found.what, found.step, found.origin.phase) == ("gradients", 1, "backward")
    lower = {"init_scale": 2.0**14, "amp.min_scale": 2.0**8}
    (scaled,) = (one for one in found.remedies if one.settings == lower)
    assert (scaled.heals, tried(found, max_grad_norm=0.1)) == (not grows, False)
    assert found.healed_by == ({"fp_precision": "bf16"} if grows else lower)
    if grows:
        assert scaled.result == "the scaler skipped 5 of 6 steps from step 1 to 6"


DIVERGING = {
    "training": TRAINING | {"max_steps": 30, "optimizer": "sgd", "max_grad_norm": None},
    "search_space": {"learning_rate": {"type": "float", "low": 1e-4, "high": 10.0}},
}


def test_a_training_that_diverges_is_not_the_precision_s_fault(tmp_path: Path) -> None:
    executor = altered(tmp_path, **DIVERGING)
    found = diagnosed(executor, tmp_path / "trial", fp_precision="fp32", learning_rate=10.0)
    assert (found.outcome, found.step, found.started_at) == ("nonfinite", 4, 0)
    assert found.healed_by == {"max_grad_norm": 1.0}
    assert not any(name.startswith("precision_overrides") for one in found.remedies for name in one.settings)


def test_it_goes_on_from_the_checkpoint_before(tmp_path: Path) -> None:
    """To the same step and operator as from the beginning; the weights may be past healing there."""
    executor = altered(tmp_path, **DIVERGING)
    params = {"fp_precision": "bf16", "learning_rate": 10.0}
    whole = diagnosed(executor, tmp_path / "whole", **params)
    calls = iter(range(100))
    stopped = executor.run(params, tmp_path / "cut", "token/0", should_stop=lambda: next(calls) == 1)
    assert stopped.outcome == "preempted"
    found = diagnosed(executor, tmp_path / "cut", **params)
    assert (whole.started_at, found.started_at) == (0, stopped.telemetry["num_steps"]) != (0, 0)
    assert replace(found, started_at=0, remedies=()) == replace(whole, remedies=())
    assert whole.healed_by == {"max_grad_norm": 1.0}


def test_steps_are_counted_before_they_are_made(tmp_path: Path) -> None:
    executor = altered(tmp_path, **DIVERGING)
    trial = ended(executor, tmp_path / "trial", fp_precision="fp32", learning_rate=10.0)
    said: list[str] = []
    with pytest.raises(
        InputError, match=r"up to 7 steps .*from its first step.* --max-steps allows 6\. Raise it"
    ):
        diagnose(executor, trial, 6, said.append)
    assert not said
    facts = {"fp32_fallbacks": 2, "device": trial.telemetry["device"] | {"name": "another CPU"}}
    found = diagnose(executor, replace(trial, telemetry={**trial.telemetry, **facts}), 7, said.append)
    assert found.notes[0].startswith("The trial ran on another device (another CPU) than this one (test CPU)")
    assert found.notes[1].startswith("The trial made 2 of its micro-batches again in fp32")
    assert said[0].startswith(
        "running trial 0 again from its first step: no checkpoint is left; at most 7 steps"
    )
    assert said[1:] == ["trying max_grad_norm: 1", "trying learning_rate: 1"]


def test_logits_that_break_in_evaluation(tmp_path: Path) -> None:
    """A module that is sound in training alone."""

    def alter(model: MultitaskModel) -> None:
        model.heads[2][-1].register_forward_hook(
            lambda module, _, output: output if module.training else output * 1e30 * 1e30
        )

    executor = altered(tmp_path, alter, **UNCHECKED)
    trial = ended(executor, tmp_path / "trial", fp_precision="bf16")
    found = diagnose(executor, replace(trial, reason="in other words"), 1000)
    assert (found.what, found.step, found.origin.module) == ("logits", 6, "heads.2.1")
    assert found.healed_by is None


def test_the_modules_of_a_good_trial_that_are_farthest_from_fp32(tmp_path: Path) -> None:
    executor = altered(tmp_path)
    found = diagnosed(executor, tmp_path / "trial", fp_precision="bf16-true")
    assert (found.outcome, found.what, found.remedies) == ("complete", None, ())
    errors = [one.own_error for one in found.farthest]
    assert errors == sorted(errors, reverse=True)
    assert 1e-3 < errors[0] < 0.1
    exact = diagnosed(executor, tmp_path / "fp32", fp_precision="fp32")
    assert {one.error for one in exact.farthest} == {0.0}
    assert "fp32 is what the others are compared with" in exact.notes[0]


def test_a_remedy_that_this_device_cannot_run_is_said(tmp_path: Path) -> None:
    fp16_only = replace(CPU, cpu_features=frozenset({"avx512_fp16"}))
    executor = altered(tmp_path, wide_layer, amp={}, **UNCHECKED)
    executor.device = fp16_only
    found = diagnosed(executor, tmp_path / "trial", fp_precision="fp16")
    (bf16,) = (one for one in found.remedies if one.settings == {"fp_precision": "bf16"})
    assert not bf16.heals
    assert bf16.result.startswith("not tried: `bf16` needs a CPU with AMX or AVX512-BF16")


def test_what_cannot_be_diagnosed(tmp_path: Path) -> None:
    executor = altered(tmp_path)
    trial = ended(executor, tmp_path / "trial", fp_precision="bf16")
    gpu = DeviceInfo(type="cuda", name="A100", compute_capability=(8, 0))
    never = {"precision": {"requested": "tf32", "effective": None}}
    cases: list[tuple[StoredTrial, type[Exception], str]] = [
        (replace(trial, outcome="running"), InputError, "must have ended, but it is running"),
        (replace(trial, outcome="waiting", telemetry={}), InputError, "must have begun, but it never did"),
        (
            replace(trial, outcome="unsupported", reason="`tf32` needs CUDA.", telemetry=never),
            InputError,
            r"it never did \(unsupported: `tf32` needs CUDA\.\)",
        ),
        (replace(trial, outcome="oom", reason="too long"), InputError, "as oom, which is not about numbers"),
        (replace(trial, outcome="pruned"), InputError, "was pruned, and no pruned trial keeps its weights"),
        (
            replace(trial, telemetry={**trial.telemetry, "device": {"type": gpu.type}}),
            InputError,
            r"ran on another type of device \(cuda\) than this one \(cpu\)",
        ),
        (
            replace(trial, params={"fp_precision": "tf32"}, telemetry=with_effective(trial, "tf32")),
            InputError,
            "cannot be run again on this device: `tf32` needs CUDA",
        ),
        (replace(trial, folder=tmp_path / "gone"), RunError, r"checkpoint of trial 0 must be in .*gone, but"),
    ]
    for case, error, message in cases:
        with pytest.raises(error, match=message):
            diagnose(executor, case, 1000)


def never_trained(**params: Any) -> StoredTrial:
    telemetry = {"precision": {"effective": params["fp_precision"]}, "device": {"type": "cpu", "name": "CPU"}}
    return StoredTrial(3, "incompatible", "", params, telemetry, Path("none"), "token/3")


def test_a_trial_that_could_not_be_built_is_not_about_numbers(tmp_path: Path) -> None:
    executor = altered(tmp_path, training=TRAINING | {"freeze_layers": 9})
    message = "trial 3 never trained, and not for its numbers: "
    with pytest.raises(InputError, match=f"{message}freeze_layers must be between 0 and"):
        diagnose(executor, never_trained(fp_precision="bf16"), 1000)
    executor.device = DeviceInfo(type="cuda", name="A100", compute_capability=(8, 0))
    trial = never_trained(fp_precision="tf32", **{LAYER_0: "fp32"})
    trial = replace(trial, telemetry={**trial.telemetry, "device": {"type": "cuda", "name": "A100"}})
    with pytest.raises(InputError, match=f"{message}precision_overrides.encoder.layer.0: a part is in fp32"):
        diagnose(executor, trial, 1000)


def with_effective(trial: StoredTrial, name: str) -> dict[str, Any]:
    return {**trial.telemetry, "precision": {**trial.telemetry["precision"], "effective": name}}
