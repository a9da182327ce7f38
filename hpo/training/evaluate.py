"""Evaluation of a model on one split: logits, predictions (class names, numbers, spans), metrics.

Logits of a split are flat float32 arrays in window order: [W, C] of sequence tasks, [T, K] of token tasks,
with special tokens and without padding. Each kind of task (`hpo.tasks`) joins the windows of one long text. A
token in several windows is read in its owner, so a long text is one row of tokens. Thresholds (a probability,
a null offset) are chosen on the validation split and stored with the model as `DecodingThresholds`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from hpo.data.batches import collate
from hpo.errors import Nonfinite, OutOfMemory
from hpo.memory import is_out_of_memory
from hpo.precision.amp import MixedPrecision
from hpo.tasks.example import Example
from hpo.tasks.kind import FloatArray, Task, kind_of
from hpo.tasks.options import DecodingThresholds
from hpo.tasks.tokenized_split import IntArray, TokenizedSplit, ragged_arange
from hpo.training.metrics import score


def decode_tasks(
    tasks: Sequence[Task],
    logits: Mapping[str, FloatArray],
    split: TokenizedSplit,
    decisions: Mapping[str, DecodingThresholds] | None = None,
    metrics: Mapping[str, str] | None = None,
) -> tuple[dict[str, list[Any]], dict[str, DecodingThresholds]]:
    """Return the predictions of every task and their decisions.

    Without `decisions` they are chosen on this split; `metrics` maps a task to the metric to maximise.
    Evidence is decoded after the predicted classes of its task.
    """
    predictions: dict[str, list[Any]] = {}
    chosen = dict(decisions or {})
    for task in sorted(tasks, key=lambda task: task.evidence_for is not None):
        name, labels = task.name, predictions.get(task.evidence_for or "")
        if not decisions:
            chosen[name] = choose_decision(task, logits[name], split, labels, (metrics or {}).get(name))
        predictions[name] = decode(task, logits[name], split, chosen[name], labels)
    return predictions, {task.name: chosen[task.name] for task in tasks}


def decode(
    task: Task,
    logits: FloatArray,
    split: TokenizedSplit,
    decision: DecodingThresholds,
    predicted_labels: Sequence[Any] | None = None,
) -> list[Any]:
    """Return one prediction per example; see `Kind.decode`. Check the logits for NaN before."""
    with np.errstate(invalid="ignore", over="ignore"):
        return kind_of(task).decode(logits, split, decision, predicted_labels)


def class_probabilities(
    tasks: Sequence[Task], logits: Mapping[str, FloatArray], split: TokenizedSplit
) -> dict[str, NDArray[np.float64]]:
    """Return each example's probability of each class, [E, C], for tasks with classes."""
    by_task = {task.name: kind_of(task).probabilities(logits[task.name], split) for task in tasks}
    return {name: values for name, values in by_task.items() if values is not None}


def choose_decision(
    task: Task,
    logits: FloatArray,
    split: TokenizedSplit,
    predicted_labels: Sequence[Any] | None = None,
    metric: str | None = None,
) -> DecodingThresholds:
    """Return the decision with the best metric of the task (default: its primary one) on this split.

    In place of a metric of the study's own code, the first of its kind decides. Only rows annotated for the
    task count.
    """
    kind = kind_of(task)
    metric = metric or task.primary_metric
    metric = metric if metric in kind.metrics else kind.metrics[0]
    rows = [row for row, example in enumerate(split.examples) if task.name in example.annotated]
    if not rows:
        return DecodingThresholds()
    with np.errstate(invalid="ignore", over="ignore"):
        return kind.choose(logits, split, rows, metric, predicted_labels)


@dataclass(frozen=True)
class Evaluation:
    """Metrics on one split, at one point of the training."""

    step: int
    epoch: float
    budget_used: float
    seconds: float  # training seconds so far
    metrics: dict[str, dict[str, float]]  # {task: {metric: value}}
    decisions: dict[str, DecodingThresholds]
    """Thresholds from logits to predictions, chosen on this split for use on other splits."""
    examples_per_second: float | None
    """Rate of forward passes, without decoding and scoring. None: not measured."""
    train_loss: float  # mean over the steps since the last evaluation
    index: int  # 1 for the first evaluation of a trial
    rates: dict[str, float | None]  # throughput of training so far
    source_metrics: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """{source: {task: {metric: value}}} for the tasks that several sources of the data have."""
    values: tuple[float, ...] = ()  # the objectives of the study; NaN where one is not defined
    ends_trial: str = ""
    """The reason why the trial ends with this evaluation, before its budget is used up; empty: none."""

    @property
    def is_last(self) -> bool:
        return bool(self.ends_trial) or self.budget_used >= 1

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Evaluation:
        """Return the evaluation of a checkpoint, which has it `asdict`."""
        return TypeAdapter(cls).validate_python(state)


def scores_by_source(
    tasks: Sequence[Task],
    predictions: Mapping[str, Sequence[Any]],
    probabilities: Mapping[str, NDArray[np.float64]],
    examples: Sequence[Example],
    num_rows: Mapping[str, int],
) -> dict[str, dict[str, dict[str, float]]]:
    """Return the metrics of each source for tasks in several sources. `num_rows` is in the order of rows."""
    ends = accumulate(num_rows.values())
    rows = {name: slice(end - num, end) for (name, num), end in zip(num_rows.items(), ends, strict=True)}
    scores: dict[str, dict[str, dict[str, float]]] = {name: {} for name in rows}
    for task in tasks:
        sources = [name for name in rows if any(task.name in row.annotated for row in examples[rows[name]])]
        for name in sources if len(sources) > 1 else ():
            part, p_EC = rows[name], probabilities.get(task.name)
            p_EC = p_EC if p_EC is None else p_EC[part]
            scores[name][task.name] = score(task, predictions[task.name][part], examples[part], p_EC)
    return {name: by_task for name, by_task in scores.items() if by_task}


def check_finite(logits: Mapping[str, NDArray[np.float32]]) -> None:
    broken = [name for name, values in logits.items() if not np.isfinite(values).all()]
    if broken:
        raise Nonfinite(f"logits were not finite in evaluation. Tasks: {', '.join(broken)}.")


def predict_logits(
    model: Any,
    split: TokenizedSplit,
    batches: Sequence[IntArray],
    mixed_precision: MixedPrecision,
    pad_id: int,
    on_batch: Callable[[float], None] = lambda _: None,
) -> dict[str, NDArray[np.float32]]:
    """Return fp32 logits by task in window order: [W, K] of sequence tasks, [T, K] of token tasks.

    `batches` are windows from `evaluation_batches`; windows in no batch stay 0. If memory runs out, a batch
    is halved. `on_batch` runs before each, with the finished share of the windows.
    """
    starts_W, lengths_W = split.window_start_W1[:-1], split.lengths_W
    rows = {"sequence": split.num_windows, "token": split.num_tokens}
    logits = {task.name: np.zeros((rows[task.level], task.num_outputs), np.float32) for task in model.tasks}
    model.eval()
    pending = list(reversed(batches))
    finished, total = 0, sum(map(len, batches))
    with mixed_precision.evaluation():
        while pending:
            on_batch(finished / total)
            windows = pending.pop()
            batch = collate(split, windows, (), pad_id).to(mixed_precision.device.torch_device)
            try:
                outputs = model(*batch.inputs)
                outputs = {name: output.float().cpu().numpy() for name, output in outputs.items()}
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if len(windows) == 1:
                    message = "one example does not fit into the device's memory in evaluation."
                    raise OutOfMemory(message) from error
                pending += reversed(np.array_split(windows, 2))
                continue
            finished += len(windows)
            real_BL = np.arange(batch.input_ids_BL.shape[1]) < lengths_W[windows, None]
            tokens = ragged_arange(starts_W[windows], lengths_W[windows])
            for task in model.tasks:
                if task.level == "sequence":
                    logits[task.name][windows] = outputs[task.name]
                else:
                    logits[task.name][tokens] = outputs[task.name][real_BL]
    return logits
