"""The definition of a study, as the database keeps it: all its keys, and which of them the file gave.

A study is resumed with the values that it was made with, or refused. A key that one of two versions does not
know counts only where a file gave it. Keys have the order of the file, since heads have the order of the
tasks.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from hpo.config.study_file import section_of
from hpo.config.trial_settings import WITH_FREE_PART
from hpo.errors import StudyChangedError

CHANGEABLE = (
    "n_trials",
    "budget",
    "timeout",
    "stall_seconds",
    "max_retries",
    "sampler",
    "pruner",
    "tracker",
    "tags",
    "device",
    "checkpoint",
    "data.csv",  # what it changes in the data changes their fingerprint
    "amp.memory_fraction",
    "comparison.num_seeds",
    "comparison.max_seeds",
)
"""Keys of the study file that may change before a study is resumed: its results still compare."""


def given_keys(model: type[BaseModel] | None, content: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """The dotted keys that the `content` of a study file gives, of sections and of `loss_weight` each key."""
    for key, value in content.items():
        field = model.model_fields.get(key) if model else None
        inner = section_of(field.annotation) if field else None
        if isinstance(value, Mapping) and ((inner and key != "search_space") or f"{key}." in WITH_FREE_PART):
            yield from given_keys(inner, value, f"{above}{key}.")
        else:
            yield f"{above}{key}"


def known_keys(
    model: type[BaseModel], definition: Mapping[str, Any], given: Collection[str], above: str = ""
) -> dict[str, Any]:
    """Return a stored definition of a `model` without the settings that this version does not know.

    An unknown setting stays if a file gave it and the results depend on it, so that the `model` refuses it.
    """
    known: dict[str, Any] = {}
    for key, value in definition.items():
        field, name = model.model_fields.get(key), f"{above}{key}"
        inner = section_of(field.annotation) if field and key != "search_space" else None
        if inner and isinstance(value, Mapping):
            known[key] = known_keys(inner, value, given, f"{name}.")
        elif field or key == "folder" or is_given(name, given):
            known[key] = value
    return known


def is_given(name: str, given: Collection[str]) -> bool:
    """Whether a file gave the key, one in it, or one that it is in."""
    return any(f"{name}.".startswith(f"{one}.") or one.startswith(f"{name}.") for one in given)


def ordered_like(first: Any, value: Any) -> Any:
    """`value`, the keys of its mappings in the order that they have in `first`."""
    if isinstance(first, list) and isinstance(value, list) and len(first) == len(value):
        return [ordered_like(one, other) for one, other in zip(first, value, strict=True)]
    if not isinstance(first, Mapping) or not isinstance(value, Mapping):
        return value
    keys = dict.fromkeys([*(key for key in first if key in value), *value])
    return {key: ordered_like(first.get(key), value[key]) for key in keys}


def refuse_changes(name: str, stored: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise StudyChangedError where two definitions of a study differ in what its results depend on."""
    given = frozenset([*stored["given"], *now["given"]])
    if lines := [*_differences(_without_folders(stored), _without_folders(now), given)]:
        what = "search space" if stored["search_space"] != now["search_space"] else "definition"
        raise StudyChangedError(
            f"The stored study `{name}` has another {what} than the study file, so its results would not "
            "compare. Write what is stored into the file, or give the study another `name`; `hpo delete "
            f"{name}` removes what is stored.\n  " + "\n  ".join(lines)
        )


def _without_folders(value: Any) -> Any:
    """Keep of absolute paths only the last part: the same data may lie elsewhere on another machine."""
    if isinstance(value, Mapping):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def _differences(
    stored: Mapping[str, Any], now: Mapping[str, Any], given: Collection[str], above: str = ""
) -> Iterator[str]:
    """A line for each key that has another value, or that one of the two alone has and a file gave."""
    for key in sorted(stored.keys() | now.keys()):
        name, before, after = f"{above}{key}", stored.get(key), now.get(key)
        if before == after or name in ("given", "folder") or name in CHANGEABLE:
            continue
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _differences(before, after, given, f"{name}.")
        elif key in now and key in stored:
            yield f"~ {name}: {json.dumps(before)} -> {json.dumps(after)}"
        elif is_given(name, given):
            yield f"+ {name}: {json.dumps(after)}" if key in now else f"- {name}: {json.dumps(before)}"
