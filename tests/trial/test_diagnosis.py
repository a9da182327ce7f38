"""Diagnosis of trials with planted faults."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.resumed_trials import run_trial
from support.tiny import CPU, EMULATED, TRAINING, altered_executor, wide_layer

from hpo.models.multitask import MultitaskModel
from hpo.precision.amp import NONFINITE_PATIENCE, MixedPrecision
from hpo.precision.table import PRECISIONS
from hpo.trial.diagnosis import Diagnosis, diagnose, settings_to_try
from hpo.trial.executor import Executor
from hpo.trial.telemetry import StoredTrial

UNCHECKED = {"compat": {"enabled": False}}
DIVERGING = {"max_steps": 30, "optimizer": "sgd", "max_grad_norm": None, "learning_rate": 10}


def altered(folder: Path, alter: Any = lambda _: None, **study: Any) -> Executor:
    training = TRAINING | {"max_steps": 6, "attention": "eager"} | study.pop("training", {})
    return altered_executor(folder, alter, training=training, **study)


def ended(executor: Executor, folder: Path, stop_at: int = 0, **params: Any) -> StoredTrial:
    """Run a trial to its end, or stop it with a checkpoint after `stop_at` steps."""
    result = run_trial(executor, folder, stop_at, **params)
    telemetry = json.loads(json.dumps(result.telemetry))  # as a database returns it
    return StoredTrial(0, params, telemetry, str(result.outcome), folder=folder, resume_key="trial")


def diagnosed(executor: Executor, trial: StoredTrial) -> Diagnosis:
    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in trial.folder.rglob("*") if path.is_file()}

    before = contents()
    found = diagnose(executor, trial)
    assert contents() == before
    json.dumps(asdict(found))
    return found


def test_found_loss_scale_heals_the_trial(tmp_path: Path) -> None:
    def run(folder: str, scale: float, floor: float) -> tuple[Executor, StoredTrial]:
        (tmp_path / folder).mkdir()
        amp = {"allow_emulated": True, "init_scale": scale, "min_scale": floor}
        executor = altered(tmp_path / folder, amp=amp, **UNCHECKED)
        return executor, ended(executor, tmp_path / folder / "trial", fp_precision="fp16")

    found = diagnosed(*run("planted", 1e36, 1e36))
    assert (found.outcome, found.precision, found.step) == ("nonfinite", "fp16", 1)
    assert (found.has_checkpoint, found.breaks_in_fp32) == (False, False)
    assert found.broken is not None
    assert found.broken.what == "gradients"
    assert "backward pass" in str(found.broken.operator)
    scale = found.remedies[0].settings["init_scale"]
    others = [{"fp_precision": "bf16"}, {"fp_precision": "fp32"}]
    assert [one.settings for one in found.remedies] == [{"init_scale": scale, "amp.min_scale": 1.0}, *others]
    assert all(one.heals for one in found.remedies)
    assert run("healed", scale, 1.0)[1].outcome == "complete"
    assert run("twice", 2 * scale, 2 * scale)[1].outcome == "nonfinite"


@pytest.mark.parametrize("has_bf16", [True, False])
def test_overflow_in_fp16_is_named_and_other_precisions_are_tried(tmp_path: Path, has_bf16: bool) -> None:
    executor = altered(tmp_path, wide_layer, amp={"allow_emulated": has_bf16}, **UNCHECKED)
    device = replace(CPU, cpu_features=frozenset({"avx512_fp16"}))
    executor.resolved = replace(executor.resolved, device=device)
    found = diagnosed(executor, ended(executor, tmp_path / "trial", fp_precision="fp16"))
    assert found.broken is not None
    assert found.broken.what == "logits"
    where = "aten.addmm.default (float16) in encoder.encoder.layer.1.output.dense, forward pass, inputs"
    assert str(found.broken.operator).startswith(where)
    bf16, fp32 = found.remedies
    assert (bf16.settings, bf16.heals) == ({"fp_precision": "bf16"}, True if has_bf16 else None)
    assert bf16.result.startswith("finite" if has_bf16 else "not tried: `bf16` needs a CPU with AMX or AVX51")
    assert (fp32.settings, fp32.heals, fp32.result) == ({"fp_precision": "fp32"}, True, "finite")


@pytest.mark.parametrize(("precision", "tried"), [("fp32", []), ("bf16", ["fp32"])])
def test_diverged_weights_break_in_every_precision(tmp_path: Path, precision: str, tried: list[str]) -> None:
    """From the checkpoint before the first bad step; the batch of the initial weights is finite."""
    executor = altered(tmp_path, training=DIVERGING, search_space={})
    whole = ended(executor, tmp_path / "whole", fp_precision=precision)
    last = whole.telemetry["num_steps"] - NONFINITE_PATIENCE
    assert diagnosed(executor, whole).broken is None
    ended(executor, tmp_path / "cut", stop_at=last, fp_precision=precision)
    found = diagnosed(executor, replace(whole, folder=tmp_path / "cut"))
    assert (found.step, found.has_checkpoint, found.breaks_in_fp32) == (last + 1, True, True)
    assert found.broken is not None
    remedies = [({"fp_precision": name}, False) for name in tried]
    assert [(one.settings, one.heals) for one in found.remedies] == remedies


@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16-true", "fp8"])
def test_every_precision_below_ieee_fp32_has_remedies(name: str) -> None:
    for base in ("fp32", "nf4"):
        amp = MixedPrecision(replace(PRECISIONS[name], frozen=base), EMULATED, CPU)
        found = [*settings_to_try(amp, "loss")]
        tried = [*(["bf16", "fp32"] if name != "fp32" else []), *(["fp32"] if base != "fp32" else [])]
        assert [each["fp_precision"] for each in found] == tried
        assert ("base_precision" in found[-1] if found else False) == (base != "fp32")


@pytest.mark.parametrize("rows", [8, 4])
def test_batch_is_the_next_one_with_its_masks(tmp_path: Path, rows: int) -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def record(model: MultitaskModel, inputs: Any, outputs: dict[str, torch.Tensor]) -> None:
        if model.training:
            seen.append((inputs[0].clone(), next(iter(outputs.values())).detach().clone()))

    parts, training = 8 // rows, {"max_steps": 12, "dropout": 0.5}
    plant = lambda model: model.register_forward_hook(record)  # noqa: E731
    executor = altered(tmp_path, plant, training=training, **UNCHECKED)
    ended(executor, tmp_path / "whole", fp_precision="fp32", micro_batch_size=rows)
    expected = seen[-12 * parts :][8 * parts : 9 * parts]  # in the second epoch
    # Between micro-batches, a trial asks once more whether to stop.
    trial = ended(executor, tmp_path / "cut", stop_at=8 * parts, fp_precision="fp32", micro_batch_size=rows)
    seen.clear()
    # A trial that ran out of memory has a smaller micro-batch in its telemetry than in its settings.
    found = diagnosed(executor, replace(trial, outcome="nonfinite", params={"fp_precision": "fp32"}))
    assert (found.step, found.broken, found.remedies, found.breaks_in_fp32) == (9, None, (), None)
    torch.testing.assert_close(seen, expected, rtol=0, atol=0)


def test_checkpoint_must_match_and_be_finite(tmp_path: Path) -> None:
    executor = altered(tmp_path)
    stopped = ended(executor, tmp_path / "trial", stop_at=2, fp_precision="bf16")
    trial = replace(stopped, outcome="nonfinite")
    assert diagnosed(executor, trial).step == 3
    assert diagnosed(executor, replace(trial, resume_key="other")).step == 1
    (file,) = trial.folder.glob("step-*/model.safetensors")
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    weights = load_file(file)
    weights["heads.0.1.bias"][0] = torch.nan
    save_file(weights, file, metadata=metadata)
    assert diagnosed(executor, trial).step == 1
