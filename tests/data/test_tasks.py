from typing import Any

import pytest

from hpo.data.tasks import parse_tasks
from hpo.errors import DataError
from hpo.tasks.kind import Task


def test_tasks_of_every_kind() -> None:
    answer = {"kind": "span_extraction", "span_names": ["answer"], "inside_segment": "context"}
    tasks = {
        "intent": {"kind": "single_label", "classes": ["a", "b"]},
        "intents": {"kind": "multi_label", "classes": ["a", "b"], "descriptions": {"a": "..."}},
        "slots": {"kind": "token_classification", "span_names": ["x"], "spans_may_overlap": True},
        "answer": answer | {"max_spans": 1},
        "evidence": {"kind": "span_per_label", "span_names": ["a"], "evidence_for": "intents"},
        "severity": {"kind": "regression"},
    }
    parsed = parse_tasks({"name": "set", "tasks": tasks}, "tasks.json")
    assert parsed == (
        Task("intent", "single_label", ("a", "b")),
        Task("intents", "multi_label", ("a", "b")),
        Task("slots", "token_classification", ("x",), spans_may_overlap=True),
        Task("answer", "span_extraction", ("answer",), inside_segment="context"),
        Task("evidence", "span_per_label", ("a",), evidence_for="intents"),
        Task("severity", "regression"),
    )
    assert [task.num_outputs for task in parsed] == [2, 2, 3, 2, 1, 1]
    assert Task("t", "token_classification", ("a", "b")).num_outputs == 5


SINGLE = {"kind": "single_label", "classes": ["a", "b"]}
SPANS = {"kind": "token_classification", "span_names": ["a"]}
EVIDENCE = {"kind": "span_per_label", "span_names": ["a"], "evidence_for": "y"}


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({}, "t.json: there must be at least one task"),
        ([], "t.json: must be a mapping of tasks, but got `\\[\\]`"),
        ({"x": {"kind": "multilabel"}}, "task `x`: kind: must be one of single_label.* mean `multi_label`"),
        ({"x": "single_label"}, "task `x`: must be a mapping of keys, but got `single_label`"),
        ({"x.y": SINGLE}, "task `x.y`: a task's name must be a letter"),
        ({"score": SINGLE}, "task `score`: `score` names the objective over all tasks"),
        ({"x": {"kind": "single_label"}}, r"task `x`: classes: must hold at least 2, but got `\[\]`"),
        ({"x": {**SINGLE, "clases": ["a"]}}, "clases: there is no such key. Did you mean `classes`"),
        ({"x": {**SINGLE, "classes": ["a", ""]}}, "classes: must hold at least one name, and no empty"),
        ({"x": {**SINGLE, "classes": ["a", "b", "a"]}}, "`a` occurs twice"),
        ({"x": {**SPANS, "spans_may_overlap": "maybe"}}, "overlap: must be true or false, but got `maybe`"),
        ({"x": {**SPANS, "span_names": None}}, "span_names: must be given for the kind token_classification"),
        ({"x": {"kind": "regression", "primary_metric": "mae"}}, "must be one of r2, pearson, spearman, but"),
        ({"x": {**SINGLE, "target": "log1p"}}, "target: must be `standardize` for a kind without numbers"),
        ({"x": {"kind": "regression", "target": "log"}}, "target: must be"),
        ({"x": {"kind": "span_extraction", "span_names": ["a", "b"]}}, "span_names: must hold at most 1"),
        ({"y": SINGLE, "x": {**EVIDENCE, "evidence_for": "z"}}, "_for: there is no task `z`. Known: y"),
        ({"y": {"kind": "regression"}, "x": EVIDENCE}, "evidence_for: must name a single_label or"),
        ({"y": SINGLE, "x": {**EVIDENCE, "span_names": ["c"]}}, "span_names: `c` is no class of `y`"),
    ],
)
def test_bad_tasks_are_refused(tasks: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_tasks({"tasks": tasks}, "t.json")
