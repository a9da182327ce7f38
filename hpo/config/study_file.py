"""Study files: their locations, their YAML, the line of every key, and one error with all problems.

ruamel.yaml follows YAML 1.2: only `true` and `false` are booleans, and `1e-5` is a number. A repeated key is
a problem. Aliases are refused, because a few lines of them can stand for billions of values.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, get_args

from pydantic import BaseModel, ValidationError, model_validator
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, StringMark, YAMLError
from ruamel.yaml.nodes import Node, ScalarNode

from hpo.code import name_code, use_code
from hpo.errors import NoStudyFileError, StorageError, StudyFileError, did_you_mean, shorten
from hpo.section import Section

KeyPath = tuple[str | int, ...]
INSTALLED = (Path(__file__).parents[1] / "studies").resolve()
"""The studies of the package. In a checkout `hpo/studies` is a link to `studies`."""
_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class Problem:
    """A mistake in a study file."""

    where: KeyPath
    message: str

    def __str__(self) -> str:
        return f"{_dotted(self.where)}: {self.message}" if self.where else self.message


@dataclass(frozen=True)
class StudyFile:
    """The content of a study file."""

    path: Path
    content: dict[str, Any]
    lines: Mapping[str, int]
    """Lines by dotted path: `loss_weight.a` may be one key or two in the file."""
    problems: tuple[Problem, ...]
    """Problems of the keys themselves."""

    def error(self, problems: Sequence[Problem]) -> StudyFileError:
        """Return an error with a line `file:line: key.path: requirement` for each problem."""
        ordered = sorted([*self.problems, *problems], key=lambda problem: self._line(problem.where))
        lines = (f"{self.path}:{self._line(problem.where)}: {problem}" for problem in ordered)
        return StudyFileError("\n".join(lines))

    def _line(self, where: KeyPath) -> int:
        """Return the line of the key, or of the nearest key above it in the file."""
        above = (_dotted(where[:length]) for length in range(len(where), 0, -1))
        return next((self.lines[key] for key in above if key in self.lines), 1)


def study_files(folder: Path) -> dict[str, Path]:
    """Return the study files of a folder, and of its examples, by name."""
    examples = {path.parent.name: path for path in sorted(folder.glob("examples/*/study.yaml"))}
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))} | examples


def find_study_file(given: Path) -> Path:
    """Return the path of the study file for a name, a path or a folder.

    A name is looked up in the folder `studies`, then as a folder with a `study.yaml`, then in the package.
    Raises StudyFileError for an unknown name. The file of a path may not exist.
    """
    name = str(given)
    if not given.parts:
        raise StudyFileError(f"a study must be a name or a YAML file, but got {show(name)}.")
    if given.suffix in (".yaml", ".yml"):
        return given.expanduser()
    here, in_folder = study_files(Path("studies")), given.expanduser() / "study.yaml"
    if in_folder.is_file() and name not in here:  # a copy of an example, before the example
        return in_folder
    if len(given.parts) != 1:
        return given.expanduser()
    known = study_files(INSTALLED) | here
    if path := known.get(name):
        return path
    hint = did_you_mean(name, sorted(known))
    if Path(f"{given}.yaml").is_file():
        hint = f" Did you mean `./{given}.yaml`?"
    elif given.is_dir():
        hint = f" {show(name)} is a folder: name the YAML file in it."
    raise NoStudyFileError(f"there is no study {show(name)} in studies or {INSTALLED}.{hint}")


def study_name(name: str) -> str:
    """Check the name of a study, which is also the name of its folder in `runs/`. Raises ValueError."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        shown = shorten(name, 58)
        raise ValueError(f"must be letters, digits, `.`, `_` and `-`, at most 100, but got `{shown}`.")
    return name


def check_study_name(name: str) -> None:
    """Raise StorageError for an impossible name, which could lead to another folder of `runs/`."""
    try:
        study_name(name)
    except ValueError as error:
        raise StorageError(f"The name of a study {error}") from None


def read_study_file(path: Path) -> StudyFile:
    """Read the YAML mapping at `path`. Raises StudyFileError."""
    document = _Document()
    try:
        content = document.read(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise StudyFileError(f"{path}: the file cannot be read: {error.strerror}.") from None
    except (YAMLError, ValueError, RecursionError) as error:
        raise StudyFileError(f"{path}{_yaml_problem(error)}") from None
    if content is None:
        raise StudyFileError(f"{path}: the file is empty. A study needs at least `name` and `data`.")
    if not isinstance(content, dict):
        raise StudyFileError(
            f"{path}:1: a study file must be a mapping of keys such as `name:` and `data:`, "
            f"but this is {show(content)}."
        )
    return StudyFile(path, content, document.lines, tuple(document.problems))


def code_of(content: Mapping[str, Any], folder: Path, who: str) -> dict[str, Any]:
    """Run the code of a user's study, and return the key `code` of the study's definition.

    Paths are relative to `folder`; `who` is the subject of error messages. Raises ValidationError.
    """
    given = content.get("code", [])
    code: dict[str, str] = {}
    try:
        for one in [given] if isinstance(given, str) else given:
            named = name_code(one, folder)
            if named.name in code:
                raise ValueError(f"{show(named.name)} is there twice. Keep one.")
            code[named.name] = named.sha256
    except (TypeError, AttributeError):
        message = f"must be a path or the name of a module, or a list of them, but got {show(given)}."
        refuse(Problem(("code",), message))
    except ValueError as error:
        refuse(Problem(("code",), str(error)))
    use_code(code, who)
    return {"code": code} if "code" in content else {}


def parse_yaml_value(text: str) -> Any:
    """Parse `text` like a value in a study file: `3e-5` is a number, `[0.9, 0.99]` a list."""
    try:
        return _Document().read(text)
    except (YAMLError, ValueError, RecursionError):
        return text


def show(value: Any, limit: int = 60) -> str:
    """Return a value for a message, as JSON, which YAML reads too."""
    shown = value if isinstance(value, str) else json.dumps(value, default=repr, ensure_ascii=False)
    return f"`{shorten(shown, limit - 2)}`"


def _dotted(where: KeyPath) -> str:
    return ".".join(str(part) for part in where)


def problems_of(error: ValidationError, model: type[BaseModel] | None = None) -> list[Problem]:
    """Return pydantic's errors in the words of a study file; `model` has the known keys."""
    problems = []
    for detail in error.errors(include_url=False):
        where = tuple(part for part in detail["loc"] if part != "[key]")  # pydantic puts it after a key
        if detail["type"] != "default_factory_not_called":  # it follows from another problem
            problems.append(Problem(where, _message(detail, _known_keys(model, detail["loc"]))))
    return problems


def refuse(*problems: Problem) -> None:
    """Raise pydantic's ValidationError with the problems, if there are any."""
    if problems:
        details = [
            InitErrorDetails(
                type=PydanticCustomError("study", problem.message), loc=problem.where, input=None
            )
            for problem in problems
        ]
        raise ValidationError.from_exception_data("study", details)


class CheckedSection(Section):
    """A section with checks between its keys."""

    def problems(self) -> Iterator[Problem]:
        """Report keys that are valid alone, but not together."""
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
"""Requirements by pydantic's type of error."""


def _message(detail: ErrorDetails, known: Sequence[str]) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "missing":
        return "must be given."
    if kind == "extra_forbidden":
        return f"there is no such key.{did_you_mean(str(detail['loc'][-1]), known)}"
    if kind == "literal_error":
        return one_of(re.findall(r"'([^']*)'", context["expected"]), value)
    if kind == "value_error":
        return str(context["error"])
    if kind in _EXPECTED:
        hint = " Put it in quotes." if kind == "string_type" and isinstance(value, (bool, int, float)) else ""
        return f"must be {_EXPECTED[kind].format(**context)}, but got {show(value)}.{hint}"
    return detail["msg"]


def one_of(names: Sequence[str], value: Any) -> str:
    """Return the message for a `value` outside `names`."""
    near = did_you_mean(str(value), names)
    hint = near if "Did you mean" in near else ""
    return f"must be one of {', '.join(names)}, but got {show(value)}.{hint}"


def _known_keys(model: type[BaseModel] | None, location: KeyPath) -> list[str]:
    """Return the keys of the section with the last part of `location`."""
    for part in location[:-1]:
        if model is not None and part in model.model_fields:
            model = section_of(model.model_fields[str(part)].annotation)
    return [name for name, field in model.model_fields.items() if not field.exclude] if model else []


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the pydantic model inside a type, such as Objective in `tuple[Objective, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(section_of, get_args(annotation))), None)


class _Document:
    """The values of a YAML document, the line of every key, and problems of keys."""

    def __init__(self) -> None:
        self.lines: dict[str, int] = {}
        self.problems: list[Problem] = []
        self._yaml = YAML(typ="safe", pure=True)
        self._seen: set[int] = set()

    def read(self, text: str) -> Any:
        node = self._yaml.compose(text)
        return None if node is None else self._value(node)

    def _value(self, node: Node, where: KeyPath = (), line: int = 1) -> Any:
        if where:
            self.lines.setdefault(_dotted(where), line)
        if id(node) in self._seen:
            what = f"{_dotted(where)}: `*{node.anchor}` is an alias, which is not read: write the value out"
            raise MarkedYAMLError(problem=what, problem_mark=StringMark("", 0, line - 1, 0, "", 0))
        self._seen.add(id(node))
        if isinstance(node, ScalarNode):
            return self._scalar(node)
        if node.tag == f"{_TAG}seq":
            items = enumerate(node.value)
            return [self._value(i, (*where, at), max(line, i.start_mark.line + 1)) for at, i in items]
        if node.tag != f"{_TAG}map":
            raise MarkedYAMLError(problem=f"no value is of {node.tag}", problem_mark=node.start_mark)
        content: dict[str, Any] = {}
        for key, value in node.value:
            name = str(key.value) if isinstance(key, ScalarNode) else "?"
            at, line = (*where, name), key.start_mark.line + 1
            if key.tag != f"{_TAG}str":
                self.problems.append(Problem(at, "a key must be text: put it in quotes."))
            if name in content:
                twice = f"on lines {self.lines[_dotted(at)]} and {line}"
                self.problems.append(Problem(at, f"the key is written twice, {twice}. Keep one."))
            content[name] = self._value(value, at, line)
        return content

    def _scalar(self, node: ScalarNode) -> Any:
        if node.tag == f"{_TAG}timestamp":
            return node.value
        try:
            return self._yaml.constructor.construct_object(node)
        except (ValueError, LookupError):  # `!!bool maybe`, or a number of thousands of digits
            what = f"{show(node.value)} is no {str(node.tag).removeprefix(_TAG)}"
            raise MarkedYAMLError(problem=what, problem_mark=node.start_mark) from None


def _yaml_problem(error: Exception) -> str:
    """Return `:line: message` of an error of ruamel.yaml."""
    if isinstance(error, UnicodeDecodeError):
        return f": the file must be text in UTF-8, but byte {error.start} is not."
    mark = getattr(error, "problem_mark", None)
    at = f":{mark.line + 1}" if mark else ""
    parts = [getattr(error, key, None) for key in ("context", "problem")]
    what = ", ".join(filter(None, parts)) or " ".join(str(error).split())
    return f"{at}: this is not valid YAML: {what}."
