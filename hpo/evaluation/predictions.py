"""`hpo.compare_predictions`: the verdict on predictions from any source."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import NoneType
from typing import Any

from hpo.config.study_file import one_of, show
from hpo.data.tasks import make_tasks, read_task_configs
from hpo.errors import InputError
from hpo.evaluation.contributions import Statistics, scored
from hpo.evaluation.verdict import Question, Verdict, facts_of, judge
from hpo.tasks.example import Example
from hpo.tasks.kind import KINDS, MULTI_HOT, Kind, Task, class_name, is_multi_hot, kind_of
from hpo.training.metrics import row_statistics


class _Spaces(str):
    """A text of any length, in place of the unknown text of known spans."""

    def __getitem__(self, index: Any) -> str:
        return " "


_SPACES = _Spaces()
Run = Sequence[Any] | None
"""A prediction for each row. None: the run has none, for example because it ended in NaN."""
_NAME = "predictions"
_TEXTLESS_METRICS = ("span_f1", "f1_macro")
"""Metrics of spans that need no text."""


def compare_predictions(
    task: Mapping[str, Any],
    truths: Sequence[Any],
    reference: Sequence[Run],
    other: Sequence[Run],
    *,
    margin: float,
    groups: Sequence[Any] | None = None,
) -> Verdict:
    """Decide whether the predictions of one model are as good as those of a reference.

    `hpo compare` and `hpo deploy` use the same engine. With several runs the verdict is about new runs and
    new rows of this kind. With one run on each side it is about these two models on new rows.

    Args:
        task: a task as in `data.tasks` of a study file: `kind`, `classes` or `span_names`, and
            `primary_metric`, the metric of the comparison. Default classes are those of the truths.
        truths: one entry per row, like a row's labels: a class, a list of classes, or a number. For a kind
            of spans: `{name: [[start, end], ...]}`. None: the row is not labelled.
        reference: runs of the reference. A run is a list of predictions in the form of the truths, or None
            if it has no predictions. A run with an undefined metric, for example from NaN, has no score.
        other: runs of the other model. Runs pair by position, as by seed.
        margin: losses below this do not count. In points (hundredths), for `mae` and `rmse` in the units of
            the labels.
        groups: for each row the name of its author, patient, document or text. Rows of one group are one
            piece of evidence; a row with None is a group of its own. Without groups each row counts as
            independent, and the error rates hold only for independent rows.

    Returns:
        `verdict` is `as_good`, `worse` or `not_shown`. `interval` has the bounds of the difference, other
        minus reference, higher is better. `labelled_rows` counts the rows with a truth, `num_groups` their
        groups. `row_bound` is the largest change of the metric by one group, times the groups. With several
        runs, `condition` has the losses of runs for which the verdict does not hold. `sentence` is for
        people.

    Raises:
        InputError: an argument has another form.
    """
    truths, limit = _plain("truths", truths), margin.item() if hasattr(margin, "item") else margin
    sides = {"reference": _plain("reference", reference), "other": _plain("other", other)}
    if type(limit) not in (int, float) or not 0 < limit < math.inf:
        raise InputError(f"margin: must be a positive number, but got {show(margin)}.")
    if all(truth is None for truth in truths):
        raise InputError("truths: at least one row must be labelled, but got none.")
    if len(sides["reference"]) != len(sides["other"]) or not sides["other"]:
        raise InputError(
            "reference, other: must have the same number of runs, at least one, but got "
            f"{len(sides['reference'])} and {len(sides['other'])}."
        )
    kind = kind_of(_task(task, truths))
    examples = [_example(kind, row, truth) for row, truth in enumerate(truths)]
    numbers = None if groups is None else _group_numbers(_plain("groups", groups), len(truths))
    statistics = {
        side: [
            _statistics(kind, run, examples, f"{side}[{index}]", numbers) for index, run in enumerate(runs)
        ]
        for side, runs in sides.items()
    }
    metric = f"{_NAME}/{kind.task.primary_metric}"
    question = Question(metric, float(limit), name=kind.task.primary_metric)
    runs = {side: [scored(run, metric) if run else None for run in runs] for side, runs in statistics.items()}
    facts = (facts_of(run, question) for runs in statistics.values() for run in runs if run)
    return judge(question, runs["reference"], runs["other"], next((one for one in facts if one), None))


def _plain(where: str, values: Any) -> list[Any]:
    """A list of plain Python values; arrays have `tolist`."""
    plain = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(plain, list | tuple):
        raise InputError(f"{where}: must be a list or an array, but got {show(values)}.")
    return [one.tolist() if hasattr(one, "tolist") else one for one in plain]


def _task(given: Mapping[str, Any], truths: Sequence[Any]) -> Task:
    if not isinstance(given, Mapping):
        raise InputError(f"task: must be a mapping as under `data.tasks`, but got {show(given)}.")
    try:
        config = read_task_configs({_NAME: dict(given)}, "task")[_NAME]
        kind = KINDS[config.kind]
        if kind.has_classes and config.classes is None:
            values = [value for value in truths if value is not None]
            classes = {class_name(one) for value in values for one in (value if kind.is_list else [value])}
            if others := [one for one in classes if not isinstance(one, str)]:
                raise InputError(f"truths: classes must be strings, but got {show(others[0])}.")
            if kind.is_list and is_multi_hot(classes, {*map(len, values)}):
                raise InputError(f"truths: {MULTI_HOT}, or give `classes`.")
            config = config.model_copy(update={"classes": tuple(sorted(classes))})
        primary, plain = config.primary_metric, config.model_copy(update={"primary_metric": None})
        if config.evidence_for:  # the name of another task
            task = Task(_NAME, config.kind, config.span_names or config.classes or ())
        else:
            task = make_tasks({_NAME: plain}, "task")[0]
    except (InputError, TypeError) as error:
        raise InputError(str(error)) from None
    known = [name for name in task.metrics if not kind.in_spans or name in _TEXTLESS_METRICS]
    if primary in (None, *known):
        return replace(task, primary=primary)
    raise InputError(f"task: primary_metric: {one_of(known, primary)}")


def _example(kind: Kind, row: int, truth: Any) -> Example:
    if truth is None:
        return Example(str(row), _SPACES, {}, {})
    where, labelled = f"truths[{row}]", frozenset([_NAME])
    if not kind.in_spans:
        return Example(str(row), _SPACES, {_NAME: _label(kind, truth, where)}, {}, annotated=labelled)
    spans: dict[str, Any] = {}
    for name, start, end in _spans(kind.task, truth, where):
        spans.setdefault(name, []).append((start, end))
    return Example(str(row), _SPACES, {}, spans, annotated=labelled)


def _label(kind: Kind, value: Any, where: str) -> Any:
    try:
        return kind.label(value)
    except ValueError as error:
        raise InputError(f"{where}{error}") from None


def _spans(task: Task, value: Any, where: str) -> list[tuple[str, int, int]]:
    """The spans (name, start, end) of `{name: [[start, end], ...]}`."""
    if not isinstance(value, Mapping):
        raise InputError(f"{where} must be {{name: [[start, end], ...]}}, but got {show(value)}.")
    spans = []
    for name, pairs in value.items():
        if name not in task.labels:
            raise InputError(f"{where}: the task has no span name {show(name)}.")
        for pair in pairs if isinstance(pairs, list | tuple) else [pairs]:
            if not isinstance(pair, list | tuple) or [type(one) for one in pair] != [int, int]:
                raise InputError(f"{where}: a span must be [start, end], but got {show(pair)}.")
            spans.append((name, *pair))
    return spans


def _group_numbers(groups: Sequence[Any], num_rows: int) -> list[int]:
    """A number for each group, and one of its own for each row without a group."""
    if len(groups) != num_rows:
        raise InputError(f"groups: must have {num_rows} entries, one per row, but got {len(groups)}.")
    if bad := [one for one in groups if not isinstance(one, str | int | NoneType) or isinstance(one, bool)]:
        raise InputError(f"groups: must be texts, whole numbers or None, but got {show(bad[0])}.")
    numbers: dict[Any, int] = {}
    keys = [("row", row) if one is None else ("group", one) for row, one in enumerate(groups)]
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _statistics(
    kind: Kind, run: Run, examples: Sequence[Example], where: str, groups: Sequence[int] | None
) -> Statistics | None:
    if run is None:
        return None
    run = _plain(where, run)
    if len(run) != len(examples):
        raise InputError(f"{where}: must have {len(examples)} predictions, one per row, but got {len(run)}.")
    is_class = kind.has_classes and not kind.is_list
    if not (is_class and set(map(type, run)) == {str} and set(run) <= {*kind.task.labels}):  # the fast case
        run = [
            _prediction(kind, value, f"{where}[{row}]") if example.annotated else value
            for row, (value, example) in enumerate(zip(run, examples, strict=True))
        ]
    return {_NAME: row_statistics(kind.task, run, examples, groups)}


def _prediction(kind: Kind, value: Any, where: str) -> Any:
    if kind.in_spans:
        return _spans(kind.task, value, where)
    if kind.is_number and isinstance(value, int | float):
        return float(value)  # not finite: the run has no score
    return _label(kind, value, where)
