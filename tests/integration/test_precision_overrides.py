"""Trials with parts of the model in fp32: from the study file to the record, the checkpoint, the export."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CPU, ENCODER, tiny_executor, tiny_study, write_study

from hpo.config.search_space import suggest
from hpo.config.study_config import load_study
from hpo.config.trial_config import build_trial_config
from hpo.config.trial_settings import setting_value
from hpo.device import DeviceInfo
from hpo.errors import ModelError, StudyFileError
from hpo.inference.model import load
from hpo.models.export import load_exported
from hpo.precision.amp import backend_flags
from hpo.precision.table import PRECISIONS, AmpConfig, resolve
from hpo.training.checkpoint import best_checkpoint
from hpo.training.metrics import score
from hpo.trial.best_model import export_checkpoint, split_logits
from hpo.trial.callbacks import Callbacks
from hpo.trial.compat import cache_key
from hpo.trial.executor import Executor
from hpo.trial.provenance import TrialSource
from hpo.trial.telemetry import TrialResult
from hpo.trial.trial_parts import build_trial

TRAIN, SPACE = "training", "search_space"
HEADS = "precision_overrides.heads"
TRAINING = {"max_steps": 4, "batch_size": 8, "max_length": 64, "dropout": 0.0}
# Weights so large that the feed-forward layers pass fp16's largest number; LayerNorm hides it from fp32.
OVERFLOWING = {"encoder": ENCODER | {"initializer_range": 300.0}}


def searched(*choices: str) -> dict[str, Any]:
    return {"type": "categorical", "choices": list(choices)}


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return tiny_executor(tmp_path_factory.mktemp("tiny"))


def run(executor: Executor, folder: Path, **params: Any) -> TrialResult:
    return executor.run({name.replace("__", "."): value for name, value in params.items()}, folder, "test")


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_a_trial_with_parts_in_fp32(executor: Executor, tmp_path: Path, name: str) -> None:
    parts = {f"precision_overrides.{part}": "fp32" for part in ("encoder.layer.1", "heads")}
    folder = tmp_path / "trial"
    result = run(executor, folder, fp_precision=name, gradient_checkpointing=True, **parts)
    assert (result.outcome, result.reason) == ("complete", "")
    assert result.telemetry["compatibility"]["verdict"] == "ok"
    precision = result.telemetry["precision"]
    assert precision["float32_parts"] == ["encoder.layer.1", "heads"]
    # Six linear layers of the last layer's and those of the heads, of 17 in all.
    num_float32 = 6 + len(executor.tasks)
    expected = {PRECISIONS[name].linear_dtype: 17 - num_float32, "float32": num_float32}
    expected = {"float32": 17} if name == "fp32" else expected
    assert precision["observed"]["linear_dtypes"] == expected
    assert precision["observed"]["linear_products"] == expected, "measured, too"
    assert precision["agrees"]
    assert split_logits(executor, folder, "validation").metrics() == result.telemetry["metrics"]
    source = TrialSource(0, result.headline, result.telemetry)
    exported = export_checkpoint(executor, folder, tmp_path / "model", source)
    model, _, settings = load_exported(exported)
    assert list(settings.float32_parts) == precision["float32_parts"]
    texts = executor.dataset.splits["validation"]
    predicted = load(exported, device="cpu", precision=name).predict([example.text for example in texts])
    severity = next(task for task in executor.tasks if task.name == "severity")
    scores = score(severity, [prediction["severity"].label for prediction in predicted], texts)
    assert scores == result.telemetry["metrics"]["severity"]
    saved = best_checkpoint(folder).weights
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, saved[key], rtol=0, atol=0)
    with pytest.raises(ModelError, match="`bf16-true` has no parts in fp32"):
        load(exported, device="cpu", precision="bf16-true")


def test_a_part_in_fp32_mends_what_overflows(tmp_path: Path) -> None:
    executor = tiny_executor(tmp_path, model=OVERFLOWING)
    assert run(executor, tmp_path / "a", fp_precision="fp16").outcome == "incompatible"
    parts = ("encoder.layer.0", "encoder.layer.1", "heads")
    layers = {f"precision_overrides.{part}": "fp32" for part in parts}
    result = run(executor, tmp_path / "b", fp_precision="fp16", **layers)
    assert (result.outcome, result.reason) == ("complete", "")


def test_a_stopped_trial_goes_on_with_its_parts(executor: Executor, tmp_path: Path) -> None:
    params = {"fp_precision": "bf16", HEADS: "fp32", "dropout": 0.1, "max_steps": 8}
    whole = executor.run(params, tmp_path / "whole", "w")
    calls = iter(range(100))
    stopped = executor.run(params, tmp_path / "cut", "c", Callbacks(should_stop=lambda: next(calls) == 5))
    assert stopped.outcome == "preempted"
    other = executor.run(params | {HEADS: "none"}, tmp_path / "cut", "c")
    assert "resumed_from_step" not in other.telemetry, "it has another precision"
    assert "is of another precision" in " ".join(other.telemetry["checkpoint_problems"])
    stopped = executor.run(params, tmp_path / "again", "c", Callbacks(should_stop=lambda: next(calls) == 12))
    resumed = executor.run(params, tmp_path / "again", "c")
    assert resumed.telemetry["resumed_from_step"] == stopped.telemetry["num_steps"] > 0
    assert resumed.values == whole.values


def test_parts_are_part_of_what_a_check_is_kept_under(executor: Executor) -> None:
    def key(**overrides: str) -> str:
        params = {f"precision_overrides.{part}": value for part, value in overrides.items()}
        params["fp_precision"] = "bf16"
        return cache_key(build_trial(executor.study, CPU, params, executor.loader))

    assert key() == key(heads="none")
    assert len({key(), key(embeddings="fp32"), key(heads="fp32"), key(embeddings="fp32", heads="fp32")}) == 4


def test_fixed_and_searched_overrides_are_joined(tmp_path: Path) -> None:
    space = {HEADS: searched("none", "fp32")}
    study = tiny_study(
        tmp_path, training=TRAINING | {"precision_overrides.encoder.layer.0": "fp32"}, search_space=space
    )

    class Last:
        def suggest_categorical(self, name: str, choices: Any) -> Any:
            assert name == HEADS
            return choices[-1]

    params = suggest(study.search_space, Last())  # type: ignore[arg-type]
    config = build_trial_config(study, params, "bf16")
    assert config.float32_parts == ("encoder.layer.0", "heads")
    assert build_trial_config(study, {HEADS: "none"}, "bf16").float32_parts == ("encoder.layer.0",)
    assert setting_value(HEADS, "fp32") == "fp32"
    again = load_study(
        write_study(
            tmp_path,
            training=TRAINING | {"precision_overrides": {"encoder.layer.0": "fp32"}},
            search_space=space,
        )
    )
    assert again.definition() == study.definition()


def test_no_tf32_beside_a_part_in_fp32(tmp_path: Path) -> None:
    study = tiny_study(tmp_path, amp={"tf32": True})
    for value, tf32 in (("none", "tf32"), ("fp32", "ieee")):
        amp = build_trial_config(study, {HEADS: value}, "bf16").amp
        with backend_flags(PRECISIONS["bf16"], amp):
            assert torch.backends.cuda.matmul.fp32_precision == tf32


def test_parts_in_fp32_need_autocast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = DeviceInfo(type="cuda", name="A100", compute_capability=(8, 0))
    executor = tiny_executor(tmp_path)
    monkeypatch.setattr("hpo.trial.trial_parts.resolve", lambda name, _device, amp: resolve(name, gpu, amp))
    result = run(executor, tmp_path / "trial", fp_precision="tf32", precision_overrides__heads="fp32")
    assert result.outcome == "incompatible"
    assert "`tf32` has none. Search it `when: {fp_precision: [bf16, fp16]}`" in result.reason
    result = run(executor, tmp_path / "true", fp_precision="bf16-true", precision_overrides__heads="fp32")
    assert (result.outcome, "`bf16-true` has none" in result.reason) == ("incompatible", True)


@pytest.mark.parametrize(
    ("section", "content", "message"),
    [
        (TRAIN, {"precision_overrides.embedings": "fp32"}, "Did you mean `embeddings`?"),
        (TRAIN, {"precision_overrides": {"encoder.layers.1": "fp32"}}, "mean `encoder.layer.1`?"),
        (TRAIN, {HEADS: "fp64"}, "training.precision_overrides.heads: must be one of none, fp32"),
        (TRAIN, {"precision_overrides": "fp32"}, "training.precision_overrides: must be a mapping"),
        (TRAIN, {HEADS: "fp32", "precision_overrides": {"heads": "none"}}, "is given twice"),
        (SPACE, {"precision_overrides": searched("fp32")}, "Did you mean `precision_overrides.<part>`?"),
        (SPACE, {"precision_overrides.head": searched("fp32")}, "Did you mean `heads`?"),
        (SPACE, {HEADS: searched("none", "bf16")}, "must be one of none, fp32"),
    ],
)
def test_nonsense_is_refused_with_its_key(
    tmp_path: Path, section: str, content: dict[str, Any], message: str
) -> None:
    with pytest.raises(StudyFileError, match=re.escape(message)):
        tiny_study(tmp_path, **{section: content})


def test_what_is_fixed_is_not_searched_too(tmp_path: Path) -> None:
    space = {HEADS: searched("none", "fp32")}
    with pytest.raises(StudyFileError, match=r"is fixed too, as `training\.precision_overrides\.heads`"):
        tiny_study(tmp_path, training={HEADS: "fp32"}, search_space=space)


def test_a_part_of_another_model_is_refused_before_the_first_trial(tmp_path: Path) -> None:
    space = {"precision_overrides.encoder.layer.2": searched("none", "fp32")}
    with pytest.raises(ModelError, match=r"a layer must be between 0 and 1, but got 2\."):
        tiny_executor(tmp_path, search_space=space).check_study()


def test_what_only_other_encoders_have_ends_a_trial(tmp_path: Path) -> None:
    space = {
        "encoder": {"type": "categorical", "choices": [ENCODER, ENCODER | {"num_hidden_layers": 3}]},
        "precision_overrides.encoder.layer.2": searched("none", "fp32"),
    }
    executor = tiny_executor(tmp_path, model={}, search_space=space)
    executor.check_study()
    result = run(
        executor, tmp_path / "trial", encoder=ENCODER, **{"precision_overrides.encoder.layer.2": "fp32"}
    )
    assert (result.outcome, "between 0 and 1" in result.reason) == ("incompatible", True)
    fixed = tiny_executor(tmp_path, training=TRAINING | {"precision_overrides.encoder.layer.2": "fp32"})
    with pytest.raises(ModelError, match="between 0 and 1"):
        run(fixed, tmp_path / "other")


def test_amp_of_a_trial_without_overrides_is_the_study_s(tmp_path: Path) -> None:
    study = tiny_study(tmp_path)
    assert build_trial_config(study, {}, "bf16", AmpConfig(tf32=True)).amp.tf32 is True
