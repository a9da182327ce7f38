"""The reference of study files, as Markdown, made from the models that read them."""

import ast
import inspect
import itertools
import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hpo.config.data_config import TaskConfig
from hpo.config.search_space import DISTRIBUTIONS
from hpo.config.study_config import StudyConfig
from hpo.config.study_file import section_of
from hpo.tasks.kind import KINDS, is_error

_LIMITS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_NAMES = {bool: "true or false", int: "whole number", float: "number", str: "text"}
_NAMES |= {Path: "path", dict: "mapping", tuple: "list"}


def study_reference() -> str:
    """Every key of a study file, as Markdown tables: values, default, meaning."""
    tasks = _table("`data.tasks.<task>`", TaskConfig)
    return "\n\n".join([*_sections(StudyConfig, ()), tasks, _metrics()]) + "\n"


def _metrics() -> str:
    """The metrics of each kind of task."""
    lines = [
        "#### Metrics of each kind\n",
        "| Kind | Metrics, the primary one first | Less is better |",
        "| --- | --- | --- |",
    ]
    for name, kind in KINDS.items():
        errors = [metric for metric in kind.metrics if is_error(metric)]
        lines.append(f"| {name} | {_code(kind.metrics)} | {_code(errors)} |")
    return "\n".join(lines)


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _sections(model: type[BaseModel], where: tuple[str, ...], known: Collection[str] = ()) -> Iterator[str]:
    """The table of a section, then those of the sections inside it, without the `known` keys."""
    yield _table(f"`{'.'.join(where)}`" if where else "Top level", model, known)
    for name, field in model.model_fields.items():
        if name in known:
            continue
        if name == "search_space":
            for kind, distribution in DISTRIBUTIONS.items():
                yield _table(f"`search_space.<setting>`, `type: {kind}`", distribution)
        elif section := section_of(field.annotation):
            bases = [base for base in section.__mro__[1:] if issubclass(model, base)]
            shared = {key for base in bases for key in getattr(base, "model_fields", {})}
            yield from _sections(section, (*where, name), shared)


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """The text under each field of a model, and of those that it inherits from."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__[: model.__mro__.index(BaseModel)]):
        (tree,) = ast.parse(inspect.getsource(base)).body
        for field, text in itertools.pairwise(tree.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return found


def _table(title: str, model: type[BaseModel], known: Collection[str] = ()) -> str:
    lines = [f"#### {title}\n\n{(model.__doc__ or '').strip()}\n"]
    lines += ["| Key | Values | Default | Meaning |", "| --- | --- | --- | --- |"]
    texts = meanings(model)
    for name, field in model.model_fields.items():
        if field.exclude or name == "type" or name in known:
            continue
        cells = (
            f"`{name}`",
            field.title or _values(field.annotation, field.metadata),
            _default(field),
            texts.get(name, ""),
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _values(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """`whole number >= 1`: what a field takes, in words."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _values(inside[0], [item for part in inside[1:] for item in _flat(part)])
    if origin in (Union, UnionType):
        return " or ".join(_values(option, metadata) for option in inside if option is not type(None))
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inside)
    if section_of(annotation):
        return "section"
    name = _NAMES.get(origin or annotation, "any value")
    limits = [
        f"{sign} {limit:.12g}"
        for item in metadata
        for key, sign in _LIMITS.items()
        if (limit := getattr(item, key, None)) is not None
    ]
    return " ".join([name, ", ".join(limits)]).strip()


def _flat(part: Any) -> Sequence[Any]:
    return part.metadata if isinstance(part, FieldInfo) else (part,)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if section_of(field.annotation):
        return ""
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is None or default == {} or isinstance(default, BaseModel):
        return ""
    return f"`{json.dumps(default) if not isinstance(default, str) else default}`"
