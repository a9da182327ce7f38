from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support import every_kind
from support.tiny_tokenizers import tiny_tokenizer, tokenize_split

from hpo.data.examples import RowChecker
from hpo.data.tasks import parse_tasks
from hpo.evaluation.contributions import baselines
from hpo.evaluation.detailed import evaluate_predictions, predict_split
from hpo.evaluation.record import DetailedEvaluation
from hpo.tasks.example import Example
from hpo.tasks.options import DecodingThresholds
from hpo.tasks.tokenized_split import TokenizedSplit, Windowing
from hpo.training.decoding import decode_tasks
from hpo.training.metrics import primary_mean, score

EVIDENCE = {**every_kind.TASKS["evidence"], "span_names": every_kind.TASKS["tags"]["classes"]}
TASKS = parse_tasks({**every_kind.TASKS, "evidence": EVIDENCE}, "tasks.json")
DECISIONS = {
    "tags": DecodingThresholds(threshold=0.41),
    "evidence": DecodingThresholds(threshold=0.6, merge_gap=2),
    "name": DecodingThresholds(null_offset=0.5),
}


def rows_of(count: int, missing: Mapping[int, frozenset[str]] | None = None) -> list[Example]:
    """Rows of every kind; `missing` are tasks that a row is not annotated for."""
    checker, rng = RowChecker(TASKS, None, {}), random.Random(0)
    rows = []
    for number in range(count):
        example, problems = checker.check(every_kind.row(number, rng))
        assert example is not None, problems
        rows.append(replace(example, annotated=example.annotated - (missing or {}).get(number, frozenset())))
    return rows


def split_of(examples: Sequence[Example]) -> TokenizedSplit:
    return tokenize_split(examples, TASKS, tiny_tokenizer("wordpiece"), Windowing(24, "window", 6))


def random_logits(split: TokenizedSplit, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    rows = {"sequence": split.num_windows, "token": split.num_tokens}
    shapes = {task.name: (rows[task.level], task.num_outputs) for task in TASKS}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def as_text(evaluation: DetailedEvaluation) -> str:
    return json.dumps(evaluation.as_json(), allow_nan=False)


@pytest.fixture(scope="module")
def split() -> TokenizedSplit:
    missing = {3: frozenset({"topic", "evidence"}), 5: frozenset({"name", "urgency", "tags"})}
    found = split_of(rows_of(60, missing))
    assert found.num_windows > 60
    return found


@pytest.fixture(scope="module")
def evaluation(split: TokenizedSplit) -> DetailedEvaluation:
    predicted = predict_split(TASKS, random_logits(split), split, DECISIONS)
    return evaluate_predictions(predicted, split_name="test", num_resamples=200)


def test_the_metrics_are_those_of_score(split: TokenizedSplit, evaluation: DetailedEvaluation) -> None:
    given = {task.name: DECISIONS.get(task.name, DecodingThresholds()) for task in TASKS}
    predictions, _ = decode_tasks(TASKS, random_logits(split), split, given)
    expected = {task.name: score(task, predictions[task.name], split.examples) for task in TASKS}
    found = {
        name: {metric: one.value for metric, one in of.metrics.items()}
        for name, of in evaluation.tasks.items()
    }
    assert found == expected
    assert evaluation.score is not None
    assert evaluation.score.value == primary_mean(TASKS, expected)
    assert evaluation.score.low < evaluation.score.value < evaluation.score.high
    predicted = predict_split(TASKS, random_logits(split), split, DECISIONS)
    assert evaluation.baseline == baselines(predicted.statistics)
    assert set(evaluation.baseline) == {
        "score",
        *(f"{name}/{metric}" for name, of in expected.items() for metric in of),
    }
    assert (evaluation.split, evaluation.decided_on) == ("test", "validation")
    assert (evaluation.num_examples, evaluation.num_resamples, evaluation.level) == (60, 200, 0.95)


def test_each_kind_has_what_it_can_have(evaluation: DetailedEvaluation) -> None:
    for task in TASKS:
        found = evaluation.tasks[task.name]
        assert found.kind == task.kind
        assert tuple(one.name for one in found.classes) == task.labels
        is_label = task.kind in ("single_label", "multi_label")
        assert (found.confusion is not None) == is_label
        assert found.worst
        assert [one.loss for one in found.worst] == sorted((one.loss for one in found.worst), reverse=True)
        assert len(found.worst) <= 20
    thresholds = {name: found.threshold for name, found in evaluation.tasks.items()}
    assert {name: one for name, one in thresholds.items() if one is not None} == {
        "tags": 0.41,
        "evidence": 0.6,
    }
    tasks = evaluation.tasks
    assert [tasks[name].num_rows for name in ("topic", "tags", "urgency", "reason")] == [59, 59, 59, 60]
    rows = {one.id: one for one in rows_of(60)}
    for name in ("reason", "places", "evidence", "name"):
        for mistake in tasks[name].worst:
            for label, start, end in mistake.truth:
                assert (start, end) in rows[mistake.id].spans[label]
            assert all(mistake.text[start:end].strip() for _, start, end in mistake.predicted)


def test_the_record_survives_json(evaluation: DetailedEvaluation) -> None:
    content = json.loads(as_text(evaluation))
    assert DetailedEvaluation.from_json(content) == evaluation
    assert DetailedEvaluation.from_json(content).as_json() == content
    earlier = {**content, "tasks": {name: {**of, "calibration": {}} for name, of in content["tasks"].items()}}
    assert DetailedEvaluation.from_json(earlier) == evaluation, "a part that was removed is left out"
    keys = "kind num_rows metrics threshold decisions classes confusion worst warnings"
    assert list(content["tasks"]["topic"]) == keys.split()
    assert set(content["tasks"]["tags"]["confusion"]) == {"labels", "counts"}
    assert content["tasks"]["name"]["decisions"] == {"threshold": 0.5, "null_offset": 0.5, "merge_gap": 0}
    assert content["tasks"]["evidence"]["decisions"]["merge_gap"] == 2


def test_nothing_is_decided_on_the_split_itself(split: TokenizedSplit) -> None:
    predicted = predict_split(TASKS, random_logits(split), split, {})
    assert predicted.decisions == {task.name: DecodingThresholds() for task in TASKS}


def test_one_row_and_no_annotated_row() -> None:
    everything = frozenset(task.name for task in TASKS)
    for rows in (rows_of(1), rows_of(2, {0: everything, 1: everything})):
        split = split_of(rows)
        predicted = predict_split(TASKS, random_logits(split), split, DECISIONS)
        found = evaluate_predictions(predicted, split_name="test", num_resamples=20)
        assert DetailedEvaluation.from_json(json.loads(as_text(found))) == found
        assert all(of.warnings for of in found.tasks.values())
    assert found.score is None
    for of in found.tasks.values():
        assert (of.num_rows, of.metrics, of.classes, of.worst) == (0, {}, (), ())
        assert of.confusion is None
