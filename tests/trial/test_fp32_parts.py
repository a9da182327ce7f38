"""Trials with parts in fp32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import tiny_executor, tiny_study
from torch import Tensor, nn

from hpo.errors import Incompatible, ModelError, StudyFileError
from hpo.models.multitask import MultitaskModel
from hpo.outcome import Outcome, TrialResult
from hpo.trial.compat import cache_key
from hpo.trial.executor import Executor
from hpo.trial.parts import TrialParts, build_trial
from hpo.trial.run import checkpoint_key

TRAINING = {"max_steps": 2, "batch_size": 8, "max_length": 64, "dropout": 0.0}
PARTS = {"type": "categorical", "choices": [[], ["heads"], ["layers.0", "heads"]]}


def executor_of(folder: Path, **training: Any) -> Executor:
    return tiny_executor(folder, training=TRAINING | training)


def parts_of(executor: Executor, **params: Any) -> TrialParts:
    return build_trial(executor.resolved, params, executor.loader)


def run(folder: Path, **training: Any) -> TrialResult:
    return executor_of(folder, **training).run({}, None, "")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("parts", [["heads"], ["layers.0", "heads.evidence"], ["attention", "norms"]])
def test_record_of_each_part(tmp_path: Path, precision: str, parts: list[str]) -> None:
    result = run(tmp_path, fp_precision=precision, fp32_parts=parts)
    assert result.outcome == Outcome.COMPLETE, result.reason
    assert result.telemetry["precision"]["agrees"]
    record = result.telemetry["fp32_parts"]
    assert [*record["requested"]] == [*record["resolved"]] == parts
    reduced = {"bf16": "bfloat16", "fp16": "float16"}[precision]
    for part, facts in record["by_part"].items():
        expected = reduced if part == "others" else "float32"
        if part == "norms":
            assert facts == {"effective": None, "observed": {}}, "it multiplies with no matrix"
        else:
            assert facts["effective"] == expected
            assert facts["observed"].keys() == {expected}
    counted = sum(sum(facts["observed"].values()) for facts in record["by_part"].values())
    assert counted == sum(result.telemetry["precision"]["observed"]["linear_products"].values())


def test_comparison_leaves_out_parts_without_fp32_weights(tmp_path: Path) -> None:
    """All precisions get the settings of the compared trial."""
    executor, low = executor_of(tmp_path, fp32_parts=["heads"]), {"fp_precision": "bf16-true"}
    with pytest.raises(Incompatible, match="`bf16-true` has no weights in fp32"):
        parts_of(executor, **low)
    noted: dict[str, Any] = {}
    compared = executor.study.model_copy(update={"comparison": object()})
    resolved = replace(executor.resolved, config=compared)
    parts = build_trial(resolved, low, executor.loader, lambda **facts: noted.update(facts))
    assert parts.config.fp32_parts == ()
    assert [*noted["fp32_parts"]["requested"]] == ["heads"]
    assert noted["fp32_parts"]["resolved"] == ()


class Autocast(nn.Linear):
    """A head's layer with its own autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


def test_part_in_another_precision_does_not_agree(tmp_path: Path) -> None:
    executor = executor_of(tmp_path, fp_precision="bf16", fp32_parts=["heads"])
    build_model = executor.loader.build_model

    def with_own_autocast(config: Any) -> MultitaskModel:
        model = build_model(config)
        model.heads[0][1].__class__ = Autocast  # type: ignore[index]
        return model

    executor.loader.build_model = with_own_autocast  # type: ignore[method-assign]
    result = executor.run({}, None, "")
    assert result.telemetry["precision"]["agrees"] is False
    assert "heads.0.1.weight (bfloat16)" in result.telemetry["precision"]["reason"]
    assert result.telemetry["compatibility"]["verdict"] == "degraded"
    observed = result.telemetry["fp32_parts"]["by_part"]["heads"]["observed"]
    assert observed == {"bfloat16": 1, "float32": 3}


def test_fp32_ignores_the_parts(tmp_path: Path) -> None:
    with_parts, without = (run(tmp_path, fp_precision="fp32", fp32_parts=parts) for parts in (["heads"], []))
    assert with_parts.values == without.values
    assert with_parts.telemetry["precision"]["agrees"]


def test_searched_part_reaches_the_trial(tmp_path: Path) -> None:
    space = {"fp32_parts": {"type": "categorical", "choices": [[], "auto", ["heads"]]}}
    executor = tiny_executor(tmp_path, training=TRAINING | {"fp_precision": "bf16"}, search_space=space)
    result = executor.run({"fp32_parts": '["heads"]'}, None, "")
    assert result.telemetry["fp32_parts"]["by_part"]["heads"]["observed"] == {"float32": 4}


@pytest.mark.parametrize(
    ("training", "space", "message"),
    [
        ({"fp32_parts": "heads"}, {}, "training.fp32_parts: must be `auto` or a list of parts"),
        (
            {},
            {"fp32_parts": {"type": "categorical", "choices": ["heads"]}},
            "must be `auto` or a list of parts",
        ),
        (
            {"fp_precision": "bf16-true", "fp32_parts": ["heads"]},
            {},
            r"training.fp32_parts: must be \[\] with `fp_precision: bf16-true`",
        ),
        (
            {},
            {"fp32_parts": PARTS, "fp_precision": {"type": "categorical", "choices": ["bf16", "bf16-true"]}},
            r"search_space.fp32_parts: must be \[\] .* `when: {fp_precision: \[bf16\]}`",
        ),
    ],
)
def test_invalid_parts_in_the_study_file(
    tmp_path: Path, training: dict[str, Any], space: dict[str, Any], message: str
) -> None:
    with pytest.raises(StudyFileError, match=message):
        tiny_study(tmp_path, training=TRAINING | training, search_space=space)


@pytest.mark.parametrize("searched", [False, True])
def test_unknown_part_is_refused_before_the_study(tmp_path: Path, searched: bool) -> None:
    bad = ["heads.evidens"]
    space = {"fp32_parts": {"type": "categorical", "choices": [[], bad]}} if searched else {}
    training = TRAINING | ({} if searched else {"fp32_parts": bad})
    executor = tiny_executor(tmp_path, training=training, search_space=space)
    with pytest.raises(ModelError, match=r"has no `heads.evidens`. Did you mean `heads.evidence`"):
        executor.check_study()


def test_parts_belong_to_their_encoder(tmp_path: Path) -> None:
    small = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    large = small | {"num_hidden_layers": 3}
    named = [dict(large)]  # YAML would write an alias for the same one
    space = {
        "encoder": {"type": "categorical", "choices": [small, large]},
        "fp32_parts": {"type": "categorical", "choices": [["layers.2"]], "when": {"encoder": named}},
    }
    tiny_executor(tmp_path, model={}, training=TRAINING, search_space=space).check_study()


def test_keys_contain_the_parts(tmp_path: Path) -> None:
    executor = executor_of(tmp_path, fp_precision="bf16")
    trials = [parts_of(executor, fp32_parts=names) for names in ([], ["heads"], ["layers.0"])]
    assert len({cache_key(parts) for parts in trials}) == 3
    assert len({checkpoint_key("", parts) for parts in trials}) == 3
