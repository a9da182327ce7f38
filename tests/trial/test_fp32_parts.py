"""Trials with parts in fp32."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.tiny import tiny_executor

from hpo.errors import Incompatible, ModelError
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
@pytest.mark.parametrize("parts", [["layers.0", "heads.evidence"], ["attention", "norms"]])
def test_record_of_each_part(tmp_path: Path, precision: str, parts: list[str]) -> None:
    result = run(tmp_path, fp_precision=precision, fp32_parts=parts)
    assert result.outcome == Outcome.COMPLETE, result.reason
    assert result.telemetry["precision"]["agrees"]
    record = result.telemetry["fp32_parts"]
    assert [*record["requested"]] == [*record["resolved"]] == parts
    reduced = {"bf16": "bfloat16", "fp16": "float16"}[precision]
    for part, facts in record["by_part"].items():
        if part == "norms":
            assert facts == {"effective": None, "observed": {}}, "it multiplies with no matrix"
        else:
            assert facts["effective"] == (reduced if part == "others" else "float32")
            assert facts["observed"].keys() == {facts["effective"]}
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
    assert parts.config.fp32_parts == noted["fp32_parts"]["resolved"] == ()
    assert [*noted["fp32_parts"]["requested"]] == ["heads"]


def test_searched_parts_belong_to_their_encoder(tmp_path: Path) -> None:
    small = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    large = small | {"num_hidden_layers": 3}
    named = [dict(large)]  # YAML would write an alias for the same one
    parts = {**PARTS, "choices": [["layers.2"]], "when": {"encoder": named}}
    space = {"encoder": {"type": "categorical", "choices": [small, large]}, "fp32_parts": parts}
    tiny_executor(tmp_path, model={}, training=TRAINING, search_space=space).check_study()
    parts["choices"] = [["heads.evidens"]]
    executor = tiny_executor(tmp_path, model={}, training=TRAINING, search_space=space)
    with pytest.raises(ModelError, match=r"has no `heads.evidens`. Did you mean `heads.evidence`"):
        executor.check_study()


def test_keys_contain_the_parts(tmp_path: Path) -> None:
    executor = executor_of(tmp_path, fp_precision="bf16")
    trials = [parts_of(executor, fp32_parts=names) for names in ([], ["heads"], ["layers.0"])]
    assert len({cache_key(parts) for parts in trials}) == 3
    assert len({checkpoint_key("", parts) for parts in trials}) == 3
