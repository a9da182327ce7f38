"""Reads a study file: its YAML, the line of every key, and the one error that lists all its problems.

PyYAML follows YAML 1.1, where `1e-5` is text, `off` is false, `010` is eight and `1:30` is ninety. A study
file follows the core schema of YAML 1.2 instead (https://yaml.org/spec/1.2.2/#103-core-schema): only `true`
and `false` are booleans, and `1e-5` is a number. Dates stay text. A key written twice is a problem, not the
second value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, get_args

import yaml
from pydantic import BaseModel, ValidationError, model_validator
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from hpo.errors import StudyFileError, did_you_mean, shorten
from hpo.section import Section

KeyPath = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2."""


_SCALARS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?\d[\d_]*",
    "float": r"[-+]?(\.\d+|\d[\d_]*(\.\d*)?)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    "merge": r"<<",
}
_Loader.yaml_implicit_resolvers = {  # by the first letter; None: any
    None: [(f"tag:yaml.org,2002:{name}", re.compile(f"(?:{p})$", re.ASCII)) for name, p in _SCALARS.items()]
}
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong in a study file: where, and what must hold."""

    where: KeyPath
    message: str

    def __str__(self) -> str:
        return f"{_dotted(self.where)}: {self.message}" if self.where else self.message


@dataclass(frozen=True)
class StudyFile:
    """The content of a study file, the line of each key, and what is wrong with the keys themselves."""

    path: Path
    content: dict[str, Any]
    lines: Mapping[str, int]
    """By the dotted path: `loss_weight.a` may stand in the file as one key or as two."""
    problems: tuple[Problem, ...]

    def error(self, problems: Sequence[Problem]) -> StudyFileError:
        """One error for all problems, each on a line as `file:line: key.path: what must hold`."""
        ordered = sorted([*self.problems, *problems], key=lambda problem: self._line(problem.where))
        lines = (f"{self.path}:{self._line(problem.where)}: {problem}" for problem in ordered)
        return StudyFileError("\n".join(lines))

    def _line(self, where: KeyPath) -> int:
        """The line of the key, or of the nearest key above it that is in the file."""
        above = (_dotted(where[:length]) for length in range(len(where), 0, -1))
        return next((self.lines[key] for key in above if key in self.lines), 1)


def read_study_file(path: Path) -> StudyFile:
    """Read the YAML at `path`. Raises StudyFileError when it is not a YAML mapping."""
    try:
        loader = _Loader(path.read_text(encoding="utf-8-sig"))
        node = loader.get_single_node()
        if node is None:
            raise StudyFileError(f"{path}: the file is empty. A study needs at least `name` and `data`.")
        lines: dict[str, int] = {}
        problems = tuple(_walk(node, (), lines, frozenset()))
        content = loader.construct_document(node)
    except OSError as error:
        raise StudyFileError(f"{path}: the file cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, ValueError) as error:
        raise StudyFileError(f"{path}{_yaml_problem(error)}") from None
    if not isinstance(content, dict):
        raise StudyFileError(
            f"{path}:1: a study file must be a mapping of keys such as `name:` and `data:`, "
            f"but this is {show(content)}."
        )
    return StudyFile(path, content, lines, problems)


def parse_yaml_value(text: str) -> Any:
    """The value that `text` has in a study file: `3e-5` is a number, `[0.9, 0.99]` a list."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError):
        return text


def show(value: Any, limit: int = 60) -> str:
    """What came, as it would stand in a study file, for a message."""
    if isinstance(value, str):
        shown = value
    elif value is None or isinstance(value, (bool, int, float, list, dict)):
        shown = yaml.safe_dump(value, default_flow_style=True, width=10**6)
        shown = shown.removesuffix("\n").removesuffix("...").strip()
    else:
        shown = repr(value)
    return f"`{shorten(shown, limit - 2)}`"


def _dotted(where: KeyPath) -> str:
    return ".".join(str(part) for part in where)


def problems_of(error: ValidationError, model: type[BaseModel] | None = None) -> list[Problem]:
    """What pydantic found, in a study file's words; `model` has the keys that are known."""
    return [
        Problem(
            tuple(part for part in found["loc"] if part != "[key]"),  # which pydantic puts after a key itself
            _message(found, _known_keys(model, found["loc"])),
        )
        for found in error.errors(include_url=False)
        if found["type"] != "default_factory_not_called"  # it follows from another problem
    ]


def refuse(*problems: Problem) -> None:
    """Raise `problems`, if there are any, as pydantic's error; a validator's place is put before theirs."""
    if problems:
        details = [
            InitErrorDetails(
                type=PydanticCustomError("study", problem.message), loc=problem.where, input=None
            )
            for problem in problems
        ]
        raise ValidationError.from_exception_data("study", details)


class CheckedSection(Section):
    """A section whose keys must fit each other."""

    def problems(self) -> Iterator[Problem]:
        """What is wrong with the keys together, each being valid by itself."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse(*self.problems())
        return self


_EXPECTED = {
    "float_type": "a number",
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "string_type": "text",
    "dict_type": "a mapping of keys",
    "model_type": "a mapping of keys",
    "tuple_type": "a list",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "greater_than": "> {gt:g}",
    "greater_than_equal": ">= {ge:g}",
    "less_than": "< {lt:g}",
    "less_than_equal": "<= {le:g}",
}
"""What must hold, by pydantic's type of error."""


def _message(found: ErrorDetails, known: Sequence[str]) -> str:
    kind, came, context = found["type"], found["input"], found.get("ctx", {})
    if kind == "missing":
        return "must be given."
    if kind == "extra_forbidden":
        return f"there is no such key.{did_you_mean(str(found['loc'][-1]), known)}"
    if kind == "literal_error":
        return one_of(re.findall(r"'([^']*)'", context["expected"]), came)
    if kind == "value_error":
        return str(context["error"])
    if kind in _EXPECTED:
        hint = " Put it in quotes." if kind == "string_type" and isinstance(came, (bool, int, float)) else ""
        return f"must be {_EXPECTED[kind].format(**context)}, but got {show(came)}.{hint}"
    return found["msg"]


def one_of(names: Sequence[str], came: Any) -> str:
    """The message for a value `came` that is none of `names`."""
    near = did_you_mean(str(came), names)
    hint = near if "Did you mean" in near else ""
    return f"must be one of {', '.join(names)}, but got {show(came)}.{hint}"


def _known_keys(model: type[BaseModel] | None, location: KeyPath) -> list[str]:
    """The keys of the section in which the last part of `location` stands."""
    for part in location[:-1]:
        if model is not None and part in model.model_fields:
            model = section_of(model.model_fields[str(part)].annotation)
    return [name for name, field in model.model_fields.items() if not field.exclude] if model else []


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The pydantic model inside a field's type: of `tuple[Objective, ...]` it is Objective."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(section_of, get_args(annotation))), None)


def _walk(node: yaml.Node, where: KeyPath, lines: dict[str, int], above: frozenset[int]) -> Iterator[Problem]:
    """Note the line of every key under `node`; yield the keys that a mapping holds twice."""
    if id(node) in above:
        raise yaml.MarkedYAMLError(problem="an alias contains itself", problem_mark=node.start_mark)
    above |= {id(node)}
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[_dotted((*where, index))] = item.start_mark.line + 1
            yield from _walk(item, (*where, index), lines, above)
    elif isinstance(node, yaml.MappingNode):
        first_lines: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue  # a list as key is refused by PyYAML; merged keys are noted where they are written
            line = key.start_mark.line + 1
            if key.value in first_lines:
                first = first_lines[key.value]
                yield Problem(
                    (*where, key.value), f"the key is written twice, on lines {first} and {line}. Keep one."
                )
                continue
            first_lines[key.value] = lines[_dotted((*where, key.value))] = line
            if key.tag != "tag:yaml.org,2002:str":
                yield Problem((*where, key.value), "a key must be text: put it in quotes.")
            yield from _walk(value, (*where, key.value), lines, above)


def _yaml_problem(error: Exception) -> str:
    """`:line: what is wrong` of an error of PyYAML."""
    mark = getattr(error, "problem_mark", None)
    place = f":{mark.line + 1}" if mark else ""
    parts = [getattr(error, key, None) for key in ("context", "problem")]
    what = ", ".join(filter(None, parts)) or " ".join(str(error).split())
    return f"{place}: this is not valid YAML: {what}."
