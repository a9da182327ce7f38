"""Trials with parts in fp32."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.tiny import TRAINING, parts_of, tiny_executor

from hpo.errors import Incompatible, ModelError
from hpo.outcome import Outcome
from hpo.trial.compat import cache_key
from hpo.trial.parts import build_trial
from hpo.trial.run import checkpoint_key


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("parts", [["layers.0", "heads.evidence"], ["attention", "norms"]])
def test_record_of_each_part(tmp_path: Path, precision: str, parts: list[str]) -> None:
    training = TRAINING | {"max_steps": 2, "fp_precision": precision, "fp32_parts": parts}
    result = tiny_executor(tmp_path, training=training).run({}, None, "")
    assert result.outcome == Outcome.COMPLETE, result.reason
    assert result.telemetry["precision"]["agrees"]
    record = result.telemetry["fp32_parts"]
    assert [*record["requested"]] == [*record["resolved"]] == parts
    reduced = {"bf16": "bfloat16", "fp16": "float16"}[precision]
    effective = {"norms": None, "others": reduced}  # norms multiply with no matrix
    for part, facts in record["by_part"].items():
        assert facts["effective"] == effective.get(part, "float32")
        assert facts["observed"].keys() == {facts["effective"]} - {None}
    counted = sum(sum(facts["observed"].values()) for facts in record["by_part"].values())
    assert counted == sum(result.telemetry["precision"]["observed"]["linear_products"].values())


def test_comparison_leaves_out_parts_without_fp32_weights(tmp_path: Path) -> None:
    """All precisions get the settings of the compared trial."""
    executor = tiny_executor(tmp_path, training=TRAINING | {"fp32_parts": ["heads"]})
    low, noted = {"fp_precision": "bf16-true"}, dict[str, Any]()
    with pytest.raises(Incompatible, match="`bf16-true` has no weights in fp32"):
        parts_of(executor, **low)
    resolved = replace(executor.resolved, config=executor.study.model_copy(update={"comparison": object()}))
    parts = build_trial(resolved, low, executor.loader, lambda **facts: noted.update(facts))
    assert parts.config.fp32_parts == noted["fp32_parts"]["resolved"] == ()
    assert [*noted["fp32_parts"]["requested"]] == ["heads"]


def test_searched_parts_belong_to_their_encoder(tmp_path: Path) -> None:
    small = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    large = small | {"num_hidden_layers": 3}
    named = [dict(large)]  # YAML would write an alias for the same one

    def check(part: str) -> None:
        parts = {"type": "categorical", "choices": [[part]], "when": {"encoder": named}}
        space = {"encoder": {"type": "categorical", "choices": [small, large]}, "fp32_parts": parts}
        tiny_executor(tmp_path, model={}, search_space=space).check_study()

    check("layers.2")
    with pytest.raises(ModelError, match=r"has no `heads.evidens`. Did you mean `heads.evidence`"):
        check("heads.evidens")


def test_keys_contain_the_parts(tmp_path: Path) -> None:
    executor, named = tiny_executor(tmp_path), ([], ["heads"], ["layers.0"])
    trials = [parts_of(executor, fp_precision="bf16", fp32_parts=names) for names in named]
    assert len({cache_key(parts) for parts in trials}) == 3
    assert len({checkpoint_key("", parts) for parts in trials}) == 3
