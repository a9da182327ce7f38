"""Trials that break on purpose: the module, the operator and the settings that heal are named exactly."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from broken_models import TRAINING, altered, wide_layer
from tiny import CPU

from hpo.errors import InputError
from hpo.models.multitask import MultitaskModel
from hpo.trial.callbacks import Callbacks
from hpo.trial.diagnosis import Diagnosis, StoredTrial, diagnose
from hpo.trial.executor import Executor

UNCHECKED = {"compat": {"enabled": False}}
PLANTED = {"allow_emulated": True, "init_scale": 1e38, "min_scale": 1e38}


def ended(executor: Executor, folder: Path, **params: Any) -> StoredTrial:
    """A trial that has been run to its end, with its checkpoints."""
    result = executor.run(params, folder, "token/0")
    telemetry = json.loads(json.dumps(result.telemetry))  # as a database has it
    return StoredTrial(0, str(result.outcome), params, telemetry, folder, "token/0")


def diagnosed(executor: Executor, folder: Path, say: Any = lambda _: None, **params: Any) -> Diagnosis:
    trial = ended(executor, folder, **params)
    before = contents(folder)
    found = diagnose(executor, trial, say)
    assert contents(folder) == before
    json.dumps(asdict(found))
    return found


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def tried(found: Diagnosis) -> list[str]:
    """The settings that were tried, in order."""
    return ["+".join(one.settings) for one in found.remedies]


def test_a_planted_loss_scale_is_healed_by_the_default_one_first(tmp_path: Path) -> None:
    """One replay finds what broke, one heals it: nothing else is tried."""
    said: list[str] = []
    executor = altered(tmp_path, amp=PLANTED, **UNCHECKED)
    found = diagnosed(executor, tmp_path / "trial", said.append, fp_precision="fp16")
    assert found.outcome == "nonfinite"
    assert found.broken.what == "gradients"
    assert found.healed_by["init_scale"] == 65536
    assert found.healed_by["amp.min_scale"] == 1
    assert len(found.remedies) == 1
    began = "running trial 0 again from step 1"
    for text, pattern in zip(
        said, (began, r"after \d+ s: gradients not", "trying init_scale: 65536"), strict=True
    ):
        assert re.match(pattern, text)


def test_what_overflows_in_fp16_is_named_and_healed(tmp_path: Path) -> None:
    executor = altered(tmp_path, wide_layer, amp={}, **UNCHECKED)
    executor.device = replace(CPU, cpu_features=frozenset({"avx512_fp16"}))
    found = diagnosed(executor, tmp_path / "trial", fp_precision="fp16")
    assert found.broken.text == "loss not finite at step 1"
    where = "aten.addmm.default (float16) in encoder.encoder.layer.1.output.dense, forward pass, inputs"
    assert found.broken.operator.startswith(where)
    assert found.healed_by == {"fp_precision": "fp32"}
    assert tried(found) == ["fp_precision", "max_grad_norm", "fp_precision"]
    assert found.remedies[0].result.startswith("not tried: `bf16` needs a CPU with AMX or AVX512-BF16")


def test_bf16_heals_what_fp16_cannot_hold(tmp_path: Path) -> None:
    found = diagnosed(altered(tmp_path, wide_layer, **UNCHECKED), tmp_path / "trial", fp_precision="fp16")
    assert found.healed_by == {"fp_precision": "bf16"}


DIVERGING = {
    "training": TRAINING | {"max_steps": 30, "optimizer": "sgd", "max_grad_norm": None},
    "search_space": {"learning_rate": {"type": "float", "low": 1e-4, "high": 10.0}},
}


def test_a_training_that_diverges_is_not_the_precision_s_fault(tmp_path: Path) -> None:
    executor = altered(tmp_path, **DIVERGING)
    found = diagnosed(executor, tmp_path / "trial", fp_precision="fp32", learning_rate=10.0)
    assert (found.outcome, found.broken.text) == ("nonfinite", "loss not finite at step 4")
    assert found.healed_by == {"max_grad_norm": 1.0}
    assert tried(found) == ["max_grad_norm"]


def test_it_goes_on_from_the_checkpoint_before(tmp_path: Path) -> None:
    """To the same step and operator as from the beginning; the weights may be past healing there."""
    executor = altered(tmp_path, **DIVERGING)
    params = {"fp_precision": "bf16", "learning_rate": 10.0}
    whole = diagnosed(executor, tmp_path / "whole", **params)
    calls = iter(range(100))
    stopped = executor.run(
        params, tmp_path / "cut", "token/0", Callbacks(should_stop=lambda: next(calls) == 1)
    )
    assert stopped.outcome == "preempted"
    said: list[str] = []
    found = diagnosed(executor, tmp_path / "cut", said.append, **params)
    assert said[0].startswith(f"running trial 0 again from step {stopped.telemetry['num_steps'] + 1}: ")
    assert found.broken == whole.broken
    assert whole.healed_by == {"max_grad_norm": 1.0}


def test_logits_that_break_in_evaluation(tmp_path: Path) -> None:
    """A module that is sound in training alone; nothing heals it."""

    def alter(model: MultitaskModel) -> None:
        head: Any = model.heads[2][-1]
        forward = head.forward
        head.forward = lambda hidden: forward(hidden) * (1.0 if head.training else 1e30 * 1e30)

    found = diagnosed(altered(tmp_path, alter, **UNCHECKED), tmp_path / "trial", fp_precision="bf16")
    assert found.broken.text == "logits not finite at step 6"
    assert "heads.2.1" in found.broken.operator
    assert found.healed_by is None
    assert tried(found) == ["max_grad_norm", "fp_precision", "learning_rate"]


def test_what_cannot_be_diagnosed(tmp_path: Path) -> None:
    executor = altered(tmp_path)
    trial = ended(executor, tmp_path / "trial", fp_precision="bf16")
    broke = replace(trial, outcome="nonfinite")
    tf32 = {"precision": {**trial.telemetry["precision"], "effective": "tf32"}}
    elsewhere = {"device": {"type": "cuda", "name": "A100"}}
    cases: list[tuple[StoredTrial, str]] = [
        (
            replace(trial, outcome="incompatible"),
            "ended as nonfinite, but it is incompatible.*verify STUDY",
        ),
        (replace(broke, telemetry={**trial.telemetry, **elsewhere}), "but it ran on cuda. Diagnose it there"),
        (
            replace(broke, telemetry={**trial.telemetry, **tf32}),
            "cannot be run again here: `tf32` needs CUDA",
        ),
    ]
    for case, message in cases:
        with pytest.raises(InputError, match=message):
            diagnose(executor, case)
    assert diagnose(executor, broke).broken is None, "it was finite, and is so again"
