"""The loss of a deployable form against fp32 on a split, and the verdict on it (`hpo.evaluation.verdict`)."""

from __future__ import annotations

import math
from dataclasses import replace

from hpo.data.dataset import DataSet
from hpo.deploy.result import Judged, TaskDrop
from hpo.errors import DataError
from hpo.evaluation.contributions import Statistics, scored
from hpo.evaluation.intervals import MetricIntervals, metric_intervals
from hpo.evaluation.record import Interval
from hpo.evaluation.verdict import Question, Verdict, facts_of, judge, label_facts


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
        found = judge(question, [scored(reference, question.metric)], [None], facts_of(reference, question))
        return Judged(found.verdict, f"{question.other}: its logits are not finite. {found.sentence}")
    values = metric_intervals(statistics)
    tasks = {
        name: TaskDrop(of.task.primary_metric, values.tasks[name][of.task.primary_metric], drop)
        for name, of in statistics.items()
        if (drop := _drop(_judged(question, statistics, reference, f"{name}/{of.task.primary_metric}")))
    }
    score = _objective(question.metric, values)
    found = _judged(question, statistics, reference, question.metric)
    told = found.baseline, found.labelled_rows
    if statistics is reference:
        return Judged("as_good", "", score, Interval(0.0, 0.0, 0.0), tasks, *told)
    reason = "" if found.verdict == "as_good" else found.sentence
    return Judged(found.verdict, reason, score, _drop(found), tasks, *told)


def _judged(question: Question, statistics: Statistics, reference: Statistics, metric: str) -> Verdict:
    asked = replace(question, metric=metric)
    sides = [scored(reference, metric)], [scored(statistics, metric)]
    return judge(asked, *sides, facts_of(reference, asked))


def _drop(found: Verdict) -> Interval | None:
    """The loss, above 0 where the form is worse."""
    if math.isnan(found.difference):
        return None
    low, high = found.interval
    return Interval(-found.difference + 0.0, -high, -low)


def _objective(metric: str, intervals: MetricIntervals) -> Interval | None:
    task, _, name = metric.rpartition("/")
    return intervals.tasks[task].get(name) if task else intervals.score
