"""The definition of a study in the database: all its keys, and the names of the keys in its file.

A study resumes with its first values or is refused; a range may grow. A key that only one of two versions of
hpo knows counts if a file gave it. Keys keep the order of the file: heads have the order of the tasks.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from hpo.config.study_file import section_of
from hpo.config.trial_settings import WITH_FREE_PART
from hpo.errors import StudyChangedError

CHANGEABLE = (
    *("n_trials", "budget", "timeout", "stall_seconds", "max_retries", "sampler", "pruner", "tracker"),
    *("tags", "device", "checkpoint", "amp.memory_fraction", "comparison.num_seeds", "comparison.max_seeds"),
    "data.csv",  # the fingerprint of the data shows its effects
)
"""Keys that may change in an existing study: its results still compare."""


def given_keys(model: type[BaseModel] | None, content: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield the dotted keys in the `content` of a study file, including those of sections."""
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
    """Return a stored definition of a `model` without unknown settings.

    An unknown setting stays if a file gave it, so that the `model` refuses it.
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
    """Return True if a file gave the key, a key in it, or a key around it."""
    return any(f"{name}.".startswith(f"{one}.") or one.startswith(f"{name}.") for one in given)


def ordered_like(first: Any, value: Any) -> Any:
    """Return `value` with the keys of its mappings in the order of `first`."""
    if isinstance(first, list) and isinstance(value, list) and len(first) == len(value):
        return [ordered_like(one, other) for one, other in zip(first, value, strict=True)]
    if not isinstance(first, Mapping) or not isinstance(value, Mapping):
        return value
    keys = dict.fromkeys([*(key for key in first if key in value), *value])
    return {key: ordered_like(first.get(key), value[key]) for key in keys}


def widened_ranges(stored: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored ranges that have grown `now`, by setting. Old values keep their meaning."""
    wider = {}
    for name, before in stored["search_space"].items():
        after = now["search_space"].get(name, {})
        bounds = {key: after.get(key) for key in ("low", "high")}
        if before == after or before | bounds != after:
            continue
        shift = Decimal(str(before["low"])) - Decimal(str(after["low"]))
        keeps_steps = before["step"] is None or not shift % Decimal(str(before["step"]))
        if shift >= 0 and after["high"] >= before["high"] and keeps_steps:
            wider[name] = before
    return wider


def refuse_changes(name: str, stored: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise StudyChangedError if two definitions of a study differ, and its results depend on it."""
    given = frozenset([*stored["given"], *now["given"]])
    training, is_fixed = stored.get("training", {}), is_given("training.attention", given)
    if training.get("attention") == "sdpa" and not is_fixed:  # an earlier default, which ran the same
        stored = {**stored, "training": {**training, "attention": None}}
    now = {**now, "search_space": {**now["search_space"], **widened_ranges(stored, now)}}
    if lines := [*_differences(_without_folders(stored), _without_folders(now), given)]:
        what = "search space" if stored["search_space"] != now["search_space"] else "definition"
        raise StudyChangedError(
            f"The stored study `{name}` has another {what} than the study file, so its results would not "
            "compare. Write the stored values (left) into the file, or give the study another `name`; "
            f"`hpo delete {name}` removes the stored study. Only a range may grow. With another name, "
            f"`first: {{study: {name}, top: 3}}` begins with the best trials that fit.\n  "
            + "\n  ".join(lines)
        )


def _without_folders(value: Any) -> Any:
    """Reduce absolute paths to their last part: another machine may have the data elsewhere."""
    if isinstance(value, Mapping):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def _differences(
    stored: Mapping[str, Any], now: Mapping[str, Any], given: Collection[str], above: str = ""
) -> Iterator[str]:
    """Yield a line for each changed value, and for each key of a file that only one definition has."""
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
