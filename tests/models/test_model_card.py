"""The model card of an export: what the hub reads of it, and what a person does."""

from __future__ import annotations

from typing import Any

from huggingface_hub import ModelCard
from tiny_encoders import KIND_TASKS

from hpo.data.tasks import Task
from hpo.data.tokenized_split import Windowing
from hpo.models.model_card import model_card

PROVENANCE: dict[str, Any] = {
    "study": "complaints",
    "trial": 7,
    "parameters": {"learning_rate": 3e-5},
    "scores": {
        "validation": {"single": {"f1_macro": 0.5}, "number": {"r2": None}},
        "test": {"joint": {"span_f1": 0.25}},
    },
    "precision": {"requested": "bf16", "effective": "bf16", "observed": {"tf32": False}},
    "data": {"fingerprint": "abc"},
    "encoder": {"name": "org/base", "hub_id": "org/base"},
    "versions": {"hpo": "1"},
}


def test_the_hub_reads_base_model_and_tasks() -> None:
    card = ModelCard(model_card(KIND_TASKS, Windowing(128), PROVENANCE))
    assert (card.data.base_model, card.data.library_name) == ("org/base", "hpo")
    assert card.data.pipeline_tag == "text-classification"
    assert {"multi_label", "span_extraction"} <= set(card.data.tags)


def test_a_person_reads_where_it_comes_from() -> None:
    card = model_card(KIND_TASKS, Windowing(128, "window", 32), PROVENANCE)
    for line in (
        "# complaints-trial-7",
        "as trial 7 of the study `complaints`",
        "A text over 128 tokens is\ncovered with overlapping windows",
        "| test | joint | span_f1 | 0.2500 | – |",
        "| validation | number | r2 | – | – |",
        "| precision | requested bf16, effective bf16 |",
        "| encoder | name org/base |",
        "| parameters | learning_rate 3e-05 |",
        '    prediction["evidence"].spans',
    ):
        assert line in card, line


def test_scores_of_a_detailed_evaluation_have_their_interval() -> None:
    intervals = {"test": {"joint": {"span_f1": [0.125, 0.375], "f1_macro": [None, None]}}}
    card = model_card(KIND_TASKS, Windowing(128), {**PROVENANCE, "intervals": intervals})
    for line in (
        "| split | task | metric | value | interval |\n| --- | --- | --- | --- | --- |",
        "| test | joint | span_f1 | 0.2500 | 0.1250 to 0.3750 |",
        "| validation | single | f1_macro | 0.5000 | – |",
    ):
        assert line in card, line
    of_test = {"score": {"value": 0.25, "low": 0.125, "high": None}, "num_examples": 1200, "level": 0.9}
    evaluations = {"test": of_test | {"num_resamples": 500}}
    told = {**PROVENANCE, "intervals": intervals, "evaluations": evaluations}
    card = model_card(KIND_TASKS, Windowing(128), told)
    assert "| test | all tasks | score | 0.2500 | – |" in card
    assert "90 % intervals: percentile bootstrap of 500 resamples over the 1,200 rows of test." in card


def test_the_card_of_an_onnx_export_says_what_it_is() -> None:
    card = model_card(KIND_TASKS, Windowing(128), PROVENANCE, "int8")
    assert ModelCard(card).data.library_name == "onnx"
    for line in (
        "This export is an ONNX graph whose layers compute in int8",
        "They are\nthe scores of the trial in PyTorch, not of this graph.",
    ):
        assert line in card, line
    assert "AutoModel" not in card
    assert "onnx" not in model_card(KIND_TASKS, Windowing(128), PROVENANCE)


def test_names_are_no_markup() -> None:
    """A class may be called anything; the front matter and the tables stay what they are."""
    task = Task("t", "single_label", ("a|b", "{{ 7 * 7 }}", "---\nlicense: other"))
    text = model_card([task], Windowing(16), {**PROVENANCE, "scores": {}})
    assert ModelCard(text).data.license is None
    assert "| t | single_label | a\\|b, {{ 7 * 7 }}, --- license: other |" in text
    assert "None were recorded." in text


def test_of_nothing_known_nothing_is_told() -> None:
    card = ModelCard(model_card([Task("t", "regression")], Windowing(16), {}))
    assert card.data.license is None
    assert "None were recorded." in card.text
