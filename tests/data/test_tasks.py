from __future__ import annotations

from typing import Any

import pytest

from hpo.data.tasks import Task, parse_tasks
from hpo.errors import DataError


def test_parse_tasks_reads_every_kind_and_passes_over_descriptions() -> None:
    tasks = parse_tasks(
        {
            "name": "set",
            "tasks": {
                "intent": {"kind": "single_label", "classes": ["a", "b"]},
                "intents": {"kind": "multi_label", "classes": ["a", "b"], "descriptions": {"a": "..."}},
                "slots": {"kind": "token_classification", "span_names": ["x"], "spans_may_overlap": True},
                "answer": {
                    "kind": "span_extraction",
                    "span_names": ["answer"],
                    "max_spans": 1,
                    "inside_segment": "context",
                    "empty_when": {"answerable": "no"},
                },
                "evidence": {"kind": "span_per_label", "span_names": ["a"], "evidence_for": "intents"},
                "severity": {"kind": "regression"},
            },
        },
        "tasks.json",
    )
    assert tasks == (
        Task("intent", "single_label", ("a", "b")),
        Task("intents", "multi_label", ("a", "b")),
        Task("slots", "token_classification", ("x",), spans_may_overlap=True),
        Task("answer", "span_extraction", ("answer",), inside_segment="context"),
        Task("evidence", "span_per_label", ("a",), evidence_for="intents"),
        Task("severity", "regression"),
    )
    assert [task.num_outputs for task in tasks] == [2, 2, 3, 2, 1, 1]
    assert [task.level for task in tasks] == ["sequence"] * 2 + ["token"] * 3 + ["sequence"]
    assert [task.primary_metric for task in tasks] == ["f1_macro"] * 2 + ["span_f1"] * 3 + ["r2"]
    assert Task("t", "token_classification", ("a", "b")).num_outputs == 5


def test_parse_tasks_takes_the_inner_mapping_alone() -> None:
    assert parse_tasks({"severity": {"kind": "regression"}}, "study")[0].name == "severity"


SINGLE = {"kind": "single_label", "classes": ["a", "b"]}


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({}, r"t.json: `tasks` must name at least one task, but got \{\}"),
        ([], r"`tasks` must name at least one task, but got \[\]"),
        (
            {"x": {"kind": "multilabel", "classes": ["a"]}},
            "unknown kind 'multilabel'. Did you mean `multi_label`",
        ),
        ({"x": {"classes": ["a"]}}, "unknown kind None. Known: single_label"),
        ({"x": "single_label"}, "must be a mapping with the key `kind`, but got 'single_label'"),
        ({"x.y": SINGLE}, "task `x.y`: a name must be a letter"),
        ({"x": {"kind": "single_label"}}, "the kind single_label needs the key `classes`"),
        ({"x": {"kind": "single_label", "clases": ["a"]}}, "unknown key `clases`. Did you mean `classes`"),
        ({"x": {"kind": "single_label", "classes": "ab"}}, "must be a list of names, but got 'ab'"),
        ({"x": {"kind": "single_label", "classes": ["a"]}}, "at least two classes"),
        ({"x": {"kind": "multi_label", "classes": ["a", 1]}}, "non-empty strings, but got 1. Quote it"),
        ({"x": {"kind": "multi_label", "classes": ["a", "b", "a"]}}, "'a' occurs twice"),
        (
            {"x": {"kind": "token_classification", "span_names": ["a"], "spans_may_overlap": "no"}},
            "`spans_may_overlap` must be a bool, but got 'no'",
        ),
        (
            {"x": {"kind": "span_extraction", "span_names": ["a"], "max_spans": 2}},
            "at most one span of one name",
        ),
        ({"x": {"kind": "span_extraction", "span_names": ["a", "b"]}}, "at most one span of one name"),
        (
            {"y": SINGLE, "x": {"kind": "span_per_label", "span_names": ["a"], "evidence_for": "z"}},
            "`evidence_for` names no task: 'z'. Known: y",
        ),
        (
            {
                "y": {"kind": "regression"},
                "x": {"kind": "span_per_label", "span_names": ["a"], "evidence_for": "y"},
            },
            "`evidence_for` must name a single_label or multi_label task, but `y` is regression",
        ),
        (
            {"y": SINGLE, "x": {"kind": "span_per_label", "span_names": ["c"], "evidence_for": "y"}},
            "span name 'c' is no class of `y`",
        ),
    ],
)
def test_parse_tasks_refuses(tasks: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_tasks({"tasks": tasks}, "t.json")


def test_parse_tasks_refuses_what_is_no_mapping() -> None:
    with pytest.raises(DataError, match=r"t.json: must be a mapping of tasks, but got 3"):
        parse_tasks(3, "t.json")  # type: ignore[arg-type]


def test_the_name_of_the_objective_is_taken() -> None:
    with pytest.raises(DataError, match=r"`score` names the objective over all tasks"):
        parse_tasks({"tasks": {"score": {"kind": "regression"}}}, "tasks.json")
