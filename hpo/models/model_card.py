"""The model card of an export: a README.md with the front matter that the Hugging Face hub reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

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


@dataclass(frozen=True)
class GraphFacts:
    """What the card of an ONNX export says beside, and what its script needs."""

    precision: str
    """`fp32` or `int8`."""
    pad_id: int
    pad_token: str


def model_card(
    tasks: Sequence[Task],
    windowing: Windowing,
    provenance: Mapping[str, Any],
    graph: GraphFacts | None = None,
) -> str:
    """The card's text; what `provenance` (`hpo.trial.provenance`) does not know is left out.

    `graph` tells that it is the card of an ONNX export.
    """
    study = str(provenance.get("study", "unknown"))
    trial = provenance.get("trial")
    encoder = provenance.get("encoder", {})
    name = study if trial is None else f"{study}-trial-{trial}"
    results = [
        EvalResult(
            task_type=_HUB_TASKS[task.kind],
            dataset_type=study,
            dataset_name=study,
            dataset_split=split,
            metric_type=metric,
            metric_name=f"{task.name} {metric}",
            metric_value=value,
        )
        for split, scores in provenance.get("scores", {}).items()
        for task in tasks
        for metric, value in scores.get(task.name, {}).items()
        if value is not None
    ]
    data = ModelCardData(
        license=encoder.get("license"),
        base_model=encoder.get("hub_id"),
        library_name="hpo" if graph is None else "onnx",
        pipeline_tag=_HUB_TASKS[tasks[0].kind],
        tags=["hpo", "multitask", *sorted({task.kind for task in tasks})],
        model_name=name if results else None,
        eval_results=results or None,
    )
    card = ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        name=name,
        study=study,
        trial=trial,
        encoder=encoder.get("name", "an encoder"),
        tasks=tasks,
        windowing=windowing,
        scores=provenance.get("scores", {}),
        intervals=provenance.get("intervals"),
        evaluations=provenance.get("evaluations", {}),
        bounds=lambda score: _bounds(score["low"], score["high"]),
        interval=partial(_interval, provenance),
        facts=_facts(provenance),
        cell=_cell,
        graph=graph,
        quoted=json.dumps,
    )
    return f"{str(card).strip()}\n"


def _interval(provenance: Mapping[str, Any], split: str, task: str, metric: str) -> str:
    """A cell with the interval of a score, and what ends it."""
    ends = provenance.get("intervals", {}).get(split, {}).get(task, {}).get(metric)
    return _bounds(*ends) if ends else _bounds(None, None)


def _bounds(low: float | None, high: float | None) -> str:
    return " – |" if low is None or high is None else f" {low:.4f} to {high:.4f} |"


def _facts(provenance: Mapping[str, Any]) -> dict[str, str]:
    """Where the model comes from, a line each."""
    encoder, precision = provenance.get("encoder", {}), provenance.get("precision", {})
    facts = {
        "encoder": encoder.get("name"),
        "revision of the encoder": encoder.get("revision"),
        "licence of the encoder": encoder.get("license"),
        "parameters": _listed(provenance.get("parameters", {})),
        "settings": _listed(provenance.get("settings", {})),
        "precision": _listed({key: precision.get(key) for key in ("requested", "effective", "support")}),
        "observed": _listed(precision.get("observed") or {}),
        "data": _listed(provenance.get("data", {})),
        "device": provenance.get("device"),
        "versions": _listed(provenance.get("versions", {})),
    }
    return {key: str(value) for key, value in facts.items() if value}


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items() if value is not None)


def _cell(text: str) -> str:
    """`text` as a cell of a table of Markdown."""
    return " ".join(text.replace("|", "\\|").split())
