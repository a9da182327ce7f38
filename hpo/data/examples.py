"""The check that turns a raw row into an example.

Every row is checked once, when it is read. Later code need not doubt a label or an offset.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from itertools import islice
from typing import Any

from hpo.config.data_config import TaskConfig
from hpo.data.span_ends import SpanEnds
from hpo.errors import did_you_mean, shorten
from hpo.tasks.example import Example, Label, Offsets
from hpo.tasks.kind import Task, class_name, kind_of

ROW_KEYS = ("id", "text", "labels", "spans", "group", "segments", "alt_spans")
MAX_KINDS, MAX_EXAMPLES = 10, 3
"""Kinds of problems in a message, and examples of each."""
_VALUES = re.compile(r"(?:, but |`|\. ).*|\[.*\]|\d+", re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")

# Rows without spans or segments share one empty mapping: a million rows need less memory.
_NO_SPANS: dict[str, list[Offsets]] = {}
_NO_SEGMENTS: dict[str, Offsets] = {}


class RowChecker:
    """Turn raw rows into examples of `tasks`, or list their problems.

    `ignored` are tasks of the data that the study leaves out.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        pair_segments: tuple[str, str] | None,
        ignored: Mapping[str, TaskConfig],
    ) -> None:
        self._kinds = {task.name: kind_of(task) for task in tasks}
        self._span_tasks = [task for task in tasks if self._kinds[task.name].in_spans]
        self._span_names = frozenset(name for task in self._span_tasks for name in task.labels)
        self.span_ends = {task.name: SpanEnds() for task in self._span_tasks}
        self._annotated: dict[frozenset[str], frozenset[str]] = {}
        self._pair_segments = pair_segments or ()
        self._ignored_labels = frozenset(ignored)
        self._ignored_spans = frozenset(
            name for config in ignored.values() for name in (config.span_names or config.classes or ())
        )

    def check(
        self, row: object, span_tasks: frozenset[str] | None = None
    ) -> tuple[Example | None, list[str]]:
        """Return the example and no problems, or None and the row's problems.

        `span_tasks` names the span tasks with a truth in this row. Without it, the key `spans` in a row
        annotates all of them.
        """
        if not isinstance(row, dict):
            return None, [f"a row must be a JSON object, but got {_show(row)}"]
        problems = [
            f"unknown key `{key}`. Did you mean `{hint}`?"
            for key in row
            if key not in ROW_KEYS and (hint := _similar_key(str(key))) is not None and hint not in row
        ]
        row_id, text, group = row.get("id"), row.get("text"), class_name(row.get("group"))
        if type(row_id) is int:
            row_id = str(row_id)
        if not isinstance(row_id, str) or not row_id.strip():
            problems.append(f"`id` must be a non-empty string, but {_got(row, 'id')}")
        if not isinstance(text, str):
            problems.append(f"`text` must be a string, but {_got(row, 'text')}")
        elif not text.strip():
            problems.append("`text` is empty")
        elif _SURROGATE.search(text):
            problems.append("`text` holds half of a surrogate pair (a broken \\u escape)")
        if group is not None and not isinstance(group, str):
            problems.append(f"`group` must be text or a whole number, but got {_show(group)}")

        labels = self._labels(row.get("labels"), problems)
        if not isinstance(text, str) or not text.strip():
            return None, problems
        spans = self._spans("spans", row.get("spans"), text, problems)
        alt_spans = self._spans("alt_spans", row.get("alt_spans"), text, problems)
        segments = self._segments(row.get("segments"), text, problems)
        if span_tasks is None and row.get("spans") is not None:
            span_tasks = frozenset(self.span_ends)
        annotated = set(labels)
        for task in self._span_tasks:
            if task.name in (span_tasks or ()) and (task.evidence_for is None or task.evidence_for in labels):
                annotated.add(task.name)
            task_spans = sorted(
                (start, end, name) for name in task.labels for start, end in spans.get(name, ())
            )
            if task_spans:
                problems += self._kinds[task.name].span_problems(task_spans, labels, segments)
        if problems:
            return None, problems
        for task in self._span_tasks if spans else ():
            for pair in (one for name in task.labels for one in row["spans"].get(name) or ()):
                self.span_ends[task.name].add(str(row_id), text, *_offsets(pair))
        names = frozenset(annotated)
        names = self._annotated.setdefault(names, names)  # one set for all equal rows, for the memory
        truth = (labels, spans or _NO_SPANS, segments or _NO_SEGMENTS, alt_spans or _NO_SPANS, names)
        return Example(str(row_id), text, *truth, group or None), []

    def _labels(self, given: object, problems: list[str]) -> dict[str, Label]:
        labels: dict[str, Label] = {}
        for name, value in _items("labels", given, "task: value", problems):
            kind = self._kinds.get(name)
            if kind is not None and not kind.in_spans:
                labels[name] = value
                try:
                    labels[name] = kind.label(value)
                except ValueError as error:
                    problems.append(f"labels.{name}{error}")
            elif name not in self._ignored_labels:
                known = [n for n, of in self._kinds.items() if not of.in_spans]
                what = f"`{kind.name}` is annotated in `spans`, not here" if kind else "unknown task"
                problems.append(f"labels.{name}: {what}.{did_you_mean(str(name), known)}")
        return labels

    def _spans(self, key: str, given: object, text: str, problems: list[str]) -> dict[str, list[Offsets]]:
        spans: dict[str, list[Offsets]] = {}
        for name, pairs in _items(key, given, "name: [[start, end], ...]", problems):
            if name not in self._span_names:
                # A set without a span task may still carry spans: nothing reads them.
                if self._span_tasks and name not in self._ignored_spans:
                    hint = did_you_mean(str(name), sorted(self._span_names))
                    problems.append(f"{key}.{name}: unknown span name.{hint}")
                continue
            if not isinstance(pairs, list):
                problems.append(f"{key}.{name} must be a list of [start, end], but got {_show(pairs)}")
                continue
            good = [span for pair in pairs if (span := _span(f"{key}.{name}", pair, text, problems))]
            if len(set(good)) < len(good):
                problems.append(f"{key}.{name} has the same span twice: {_show(pairs)}")
            if good:
                spans[name] = sorted(good)
        return spans

    def _segments(self, given: object, text: str, problems: list[str]) -> dict[str, Offsets]:
        segments: dict[str, Offsets] = {}
        for name, pair in _items("segments", given, "name: [start, end]", problems):
            if span := _span(f"segments.{name}", pair, text, problems, is_segment=True):
                segments[str(name)] = span
        for name in self._pair_segments:
            if name not in segments and not (isinstance(given, dict) and given.get(name) is not None):
                hint = did_you_mean(name, sorted(segments))
                problems.append(
                    f"`segments` must have `{name}` (data.pair_segments or columns.text names it).{hint}"
                )
        return segments


def problem_list(bad: Iterable[tuple[str, str]]) -> str:
    """Return lines for the problems (location, problem): three examples of each kind, and its number."""
    kinds: dict[str, list[str]] = {}
    for where, problem in bad:
        kinds.setdefault(_kind_of_problem(problem), []).append(f"{where}: {problem}")
    lines = [""]
    for examples in islice(kinds.values(), MAX_KINDS):
        lines += examples[:MAX_EXAMPLES]
        if more := len(examples[MAX_EXAMPLES:]):
            lines.append(f"... and {more:,} more like these")
    if more := len(kinds) - MAX_KINDS:
        lines += [f"... and {more:,} other kinds of problems"] * (more > 0)
    return "\n  ".join(lines)


def _kind_of_problem(problem: str) -> str:
    """Return a problem without the values of its row; a name in front belongs to the kind."""
    begin = problem.find("` ") + 1 if problem.startswith("`") else 0
    return problem[:begin] + _VALUES.sub("", problem[begin:])


def _items(key: str, given: object, form: str, problems: list[str]) -> Iterable[tuple[str, Any]]:
    """Return the items of an object without null values: parquet has every key in each row."""
    if isinstance(given, dict):
        return [(name, value) for name, value in given.items() if value is not None]
    if given is not None:
        problems.append(f"`{key}` must be an object of {form}, but got {_show(given)}")
    return ()


def _span(
    where: str, pair: object, text: str, problems: list[str], *, is_segment: bool = False
) -> Offsets | None:
    pair = _offsets(pair)
    if not isinstance(pair, list | tuple) or [type(offset) for offset in pair] != [int, int]:
        problems.append(f"{where}: a span must be [start, end] in whole characters, but got {_show(pair)}")
        return None
    start, end = pair
    if is_segment and 0 <= start <= end <= len(text):
        return start, end  # as the tokenizer gets it: with white space at its ends, or empty
    if not 0 <= start < end <= len(text):
        num_bytes = len(text.encode(errors="surrogatepass"))
        hint = "" if text.isascii() else f" (spans count characters, not its {num_bytes} bytes)"
        problems.append(
            f"{where}: [{start}, {end}] must lie inside the text of {len(text)} characters: "
            f"0 <= start < end <= {len(text)}{hint}"
        )
    elif text[start:end].isspace():
        problems.append(f"{where}: [{start}, {end}] covers only white space")
    else:
        inner = text[start:end].strip()
        start = text.index(inner, start)
        return start, start + len(inner)
    return None


def _offsets(pair: Any) -> Any:
    """Return [start, end] of a span in this form, or as an object of both."""
    is_object = isinstance(pair, dict) and pair.keys() == {"start", "end"}
    return [pair["start"], pair["end"]] if is_object else pair


@lru_cache(maxsize=1024)
def _similar_key(key: str) -> str | None:
    """Return the row key for a misspelt one. Other unknown keys are notes of the user."""
    near = get_close_matches(key.lower(), ROW_KEYS, n=1, cutoff=0.75)
    return near[0] if near else None


def _got(row: Mapping[str, Any], key: str) -> str:
    return f"got {_show(row[key])}" if key in row else "the row has no such key"


def _show(value: object) -> str:
    return shorten(repr(value), 60)
