"""Evaluation of a model on one split: logits, the decisions made on them, metrics."""

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
from hpo.tasks.kind import Task
from hpo.tasks.options import DecodingThresholds
from hpo.tasks.tokenized_split import IntArray, TokenizedSplit, ragged_arange
from hpo.training.metrics import score


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
    values: tuple[float, ...] = ()
    """The objectives of the study. NaN where one is not defined."""
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
            scores[name][task.name] = score(task, predictions[task.name][rows[name]], examples[rows[name]])
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
    on_batch: Callable[[], None] = lambda: None,
) -> dict[str, NDArray[np.float32]]:
    """Return fp32 logits by task in window order: [W, K] of sequence tasks, [T, K] of token tasks.

    `batches` are windows from `evaluation_batches`; windows in no batch stay 0. If memory runs out, a batch
    is halved. `on_batch` runs before each.
    """
    starts_W, lengths_W = split.window_start_W1[:-1], split.lengths_W
    rows = {"sequence": split.num_windows, "token": split.num_tokens}
    logits = {task.name: np.zeros((rows[task.level], task.num_outputs), np.float32) for task in model.tasks}
    model.eval()
    pending = list(reversed(batches))
    with mixed_precision.evaluation():
        while pending:
            on_batch()
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
            real_BL = np.arange(batch.input_ids_BL.shape[1]) < lengths_W[windows, None]
            tokens = ragged_arange(starts_W[windows], lengths_W[windows])
            for task in model.tasks:
                if task.level == "sequence":
                    logits[task.name][windows] = outputs[task.name]
                else:
                    logits[task.name][tokens] = outputs[task.name][real_BL]
    return logits
