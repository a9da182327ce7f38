from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import every_kind
import numpy as np
import pytest
from tiny_tokenizers import tiny_tokenizer, tokenize_split

from hpo.config.trial_config import TrialConfig
from hpo.data.examples import RowChecker
from hpo.data.tasks import parse_tasks
from hpo.data.tokenized_split import Windowing
from hpo.errors import Nonfinite, RunError
from hpo.evaluation import detailed
from hpo.precision.table import AmpConfig
from hpo.training.decoding import DecodingThresholds
from hpo.training.evaluate import score_logits
from hpo.trial.best_model import SplitLogits, stored_config

EVIDENCE = {**every_kind.TASKS["evidence"], "span_names": every_kind.TASKS["tags"]["classes"]}
TASKS = tuple(parse_tasks({**every_kind.TASKS, "evidence": EVIDENCE}, "tasks.json"))


@pytest.fixture
def split_logits() -> SplitLogits:
    """Random logits of 40 rows of every kind."""
    checker, draw = RowChecker(TASKS, None, {}), random.Random(0)
    checked = [checker.check(every_kind.row(number, draw))[0] for number in range(40)]
    examples = [example for example in checked if example is not None]
    assert len(examples) == 40
    split = tokenize_split(examples, TASKS, tiny_tokenizer("wordpiece"), Windowing(24, "window", 6))
    rng = np.random.default_rng(0)
    rows = {"sequence": split.num_windows, "token": split.num_tokens}
    shapes = {task.name: (rows[task.level], task.num_outputs) for task in TASKS}
    logits = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    decisions = {task.name: DecodingThresholds(0.41, 0.5, 2) for task in TASKS}
    return SplitLogits("test", split, TASKS, logits, decisions)


def test_metrics_and_record_are_of_one_decoding(
    split_logits: SplitLogits, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = (split_logits.logits, split_logits.split, TASKS, split_logits.decisions)
    expected, _ = score_logits(*given)
    decoded = []
    decode = detailed.decode_tasks

    def counted(*args: Any) -> Any:
        decoded.append(args)
        return decode(*args)

    monkeypatch.setattr(detailed, "decode_tasks", counted)
    assert split_logits.metrics() == expected
    found = split_logits.detailed()
    assert {
        name: {metric: one.value for metric, one in of.metrics.items()} for name, of in found.tasks.items()
    } == expected
    assert (found.split, found.decided_on) == ("test", "validation")
    assert len(decoded) == 1


def test_settings_of_a_checkpoint_of_an_earlier_version_are_read_where_they_mean_the_same() -> None:
    config = TrialConfig(encoder="minilm", fp_precision="bf16", amp=AmpConfig())
    content = config.model_dump(mode="json")
    former = {"precision_overrides": {}, "weight_rounding": "nearest"}
    assert stored_config(Path("trial"), json.dumps(content | former)) == config
    for change in ({"precision_overrides": {"heads": "fp32"}}, {"weight_rounding": "compensated"}):
        with pytest.raises(RunError, match=f"in trial is of another version of hpo: {next(iter(change))}: "):
            stored_config(Path("trial"), json.dumps(content | former | change))


def test_logits_that_are_not_finite_have_no_metrics(split_logits: SplitLogits) -> None:
    split_logits.logits["topic"][3] = np.nan
    with pytest.raises(Nonfinite, match="Tasks: topic"):
        split_logits.metrics()
    with pytest.raises(Nonfinite, match="Tasks: topic"):
        split_logits.detailed()
