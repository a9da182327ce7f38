"""The accuracy of a deployable form on a split, and the verdict against fp32 (`hpo.evaluation.verdict`).

Tokens, decoding and thresholds are those of an evaluation. Batches are those of `TrainedModel.predict`, with
one exception: in int8, a text's logits depend on its batch, so such a form is scored one window at a time.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hpo.data.dataset import DataSet
from hpo.deploy.result import Judged, TaskDrop
from hpo.errors import DataError
from hpo.evaluation.contributions import Statistics, scored
from hpo.evaluation.detailed import predict_split
from hpo.evaluation.intervals import metric_intervals
from hpo.evaluation.record import Interval
from hpo.evaluation.verdict import Question, Verdict, facts_of, judge, label_facts
from hpo.inference.model import TrainedModel
from hpo.tasks.tokenized_split import TokenizedSplit


def split_statistics(
    model: TrainedModel, split: TokenizedSplit, on_batch: Callable[[float], None] = lambda _: None
) -> Statistics | None:
    """Return the statistics of each task, or None if a logit is not finite.

    Calls `on_batch` before each batch, see `predict_logits`.
    """
    max_tokens = 1 if model.precision == "int8" else None
    logits = model.logits(split, max_tokens=max_tokens, on_batch=on_batch)
    if not all(np.isfinite(values).all() for values in logits.values()):
        return None
    return predict_split(model.tasks, logits, split, model.decisions).statistics


def limit(question: Question, data: DataSet, split: str) -> str:
    """State the losses that a split cannot exclude. Empty: it can exclude those of the margin.

    Raises DataError if the split has no labels for the objective.
    """
    if facts := label_facts(data.tasks, data.splits[split], question):
        return "" if facts.excludable < question.margin else facts.limit(question)
    raise DataError(f"{split} must have labels for the objective {question.metric}, but has none.")


def judge_form(question: Question, statistics: Statistics | None, reference: Statistics) -> Judged:
    """Judge a form against fp32 on the same split; fp32 itself is as good.

    The statistics are None if a logit of the form is not finite.
    """
    if statistics is None:
        verdict = judge(question, [scored(reference, question.metric)], [None], facts_of(reference, question))
        return Judged(verdict.verdict, f"{question.other}: its logits are not finite. {verdict.sentence}")
    verdict = _verdict(question, statistics, reference)
    values = metric_intervals(statistics)
    tasks = {}
    for name, task_statistics in statistics.items():
        metric = task_statistics.task.primary_metric
        if drop := _drop(_verdict(replace(question, metric=f"{name}/{metric}"), statistics, reference)):
            tasks[name] = TaskDrop(metric, values.tasks[name][metric], drop)
    task, _, metric = question.metric.rpartition("/")
    judged = Judged(
        verdict.verdict,
        "" if verdict.verdict == "as_good" else verdict.sentence,
        values.tasks[task].get(metric) if task else values.score,
        _drop(verdict),
        tasks,
        verdict.baseline,
        verdict.labelled_rows,
    )
    if statistics is reference:
        return replace(judged, verdict="as_good", reason="", drop=Interval(0.0, 0.0, 0.0))
    return judged


def _verdict(question: Question, statistics: Statistics, reference: Statistics) -> Verdict:
    runs = [scored(reference, question.metric)], [scored(statistics, question.metric)]
    return judge(question, *runs, facts_of(reference, question))


def _drop(verdict: Verdict) -> Interval | None:
    """Return the loss: above 0 if the form is worse."""
    if math.isnan(verdict.difference):
        return None
    low, high = verdict.interval
    return Interval(-verdict.difference + 0.0, -high, -low)
