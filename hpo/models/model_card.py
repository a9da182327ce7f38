"""The model card of an export: a README.md with the front matter that the Hugging Face hub reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from hpo.data.tasks import Task
from hpo.data.tokenized_split import Windowing

_TEMPLATE = Path(__file__).with_name("model_card.md.j2")
_HUB_TASKS = {
    "single_label": "text-classification",
    "multi_label": "text-classification",
    "regression": "text-classification",
    "span_extraction": "question-answering",
    "token_classification": "token-classification",
    "span_per_label": "token-classification",
}


def model_card(
    tasks: Sequence[Task], windowing: Windowing, provenance: Mapping[str, Any], graph: str | None = None
) -> str:
    """The card's text, without what `provenance` (`hpo.trial.provenance`) does not know; of an ONNX export
    with the precision of its `graph`."""
    study = str(provenance.get("study", "unknown"))
    trial = provenance.get("trial")
    encoder = provenance.get("encoder", {})
    data = ModelCardData(
        base_model=encoder.get("hub_id"),
        library_name="hpo" if graph is None else "onnx",
        pipeline_tag=_HUB_TASKS[tasks[0].kind],
        tags=["hpo", "multitask", *sorted({task.kind for task in tasks})],
    )
    card = ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        name=study if trial is None else f"{study}-trial-{trial}",
        study=study,
        trial=trial,
        encoder=encoder.get("name", "an encoder"),
        tasks=tasks,
        windowing=windowing,
        scores=list(_scores(provenance)),
        evaluations=provenance.get("evaluations", {}),
        facts=_facts(provenance),
        cell=_cell,
        graph=graph,
    )
    return f"{str(card).strip()}\n"


def _scores(provenance: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Split, task, metric, value and interval, of what was evaluated in detail, as texts."""
    evaluations, intervals = provenance.get("evaluations", {}), provenance.get("intervals", {})
    for split, of_tasks in provenance.get("scores", {}).items():
        if score := evaluations.get(split, {}).get("score"):
            yield split, "all tasks", "score", *_texts(score["value"], score["low"], score["high"])
        for task, metrics in of_tasks.items():
            for metric, value in metrics.items():
                ends = intervals.get(split, {}).get(task, {}).get(metric) or (None, None)
                yield split, task, metric, *_texts(value, *ends)


def _texts(value: float | None, low: float | None, high: float | None) -> tuple[str, str]:
    interval = "–" if low is None or high is None else f"{low:.4f} to {high:.4f}"
    return "–" if value is None else f"{value:.4f}", interval


def _facts(provenance: Mapping[str, Any]) -> dict[str, str]:
    """Where the model comes from, a line each."""
    facts: dict[str, Any] = {
        key: provenance.get(key) or {}
        for key in ("encoder", "parameters", "settings", "precision", "data", "versions")
    }
    left_out = ("hub_id", "observed")
    told = {
        key: ", ".join(
            f"{name} {value}" for name, value in values.items() if value is not None and name not in left_out
        )
        for key, values in facts.items()
    }
    return {key: text for key, text in {**told, "device": provenance.get("device")}.items() if text}


def _cell(text: str) -> str:
    """`text` as a cell of a table of Markdown."""
    return " ".join(text.replace("|", "\\|").split())
