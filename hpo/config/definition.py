"""The definition of a study, as the database keeps it: all its keys, and which of them the file gave.

A study is resumed with the values that it was made with: the definition holds the defaults of that version,
and to write a default into the file changes nothing. A key that the file gave and no longer gives has its
default. Keys are in the order of the file that made the study, since a model's heads are in the order of the
tasks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from hpo.config.study_file import section_of
from hpo.config.trial_settings import BUDGETS, LOSS_WEIGHT
from hpo.errors import InputError, StudyChangedError

CHANGEABLE = (
    "n_trials",
    "priority",
    "timeout",
    "stall_seconds",
    "max_retries",
    "sampler",
    "pruner",
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
        if isinstance(value, Mapping) and ((inner and key != "search_space") or f"{key}." == LOSS_WEIGHT):
            yield from given_keys(inner, value, f"{above}{key}.")
        else:
            yield f"{above}{key}"


def completed(model: type[BaseModel], stored: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The definition `now` of a study, a `model`, with the `stored` values of all keys that neither gives."""
    given = {*stored["given"], *now["given"]}
    merged = _completed(model, stored, now, given)
    merged |= {key: _completed_algorithm(stored[key], now[key], given, key) for key in ("sampler", "pruner")}
    merged |= {"given": now["given"]}
    return ordered_like(stored, merged) if has_order(stored) else merged


def has_order(definition: Mapping[str, Any]) -> bool:
    """Whether the keys are in the order of the file: earlier versions stored them sorted."""
    return list(definition) != sorted(definition)


def ordered_like(first: Any, value: Any) -> Any:
    """`value`, the keys of its mappings in the order that they have in `first`."""
    if not isinstance(first, Mapping) or not isinstance(value, Mapping):
        return value
    keys = dict.fromkeys([*(key for key in first if key in value), *value])
    return {key: ordered_like(first.get(key), value[key]) for key in keys}


def _completed(
    model: type[BaseModel],
    stored: Mapping[str, Any],
    now: Mapping[str, Any],
    given: set[str],
    above: str = "",
) -> dict[str, Any]:
    merged = dict(now)
    for key in model.model_fields.keys() & stored.keys():
        inner = section_of(model.model_fields[key].annotation)
        if inner and isinstance(now.get(key), Mapping) and isinstance(stored[key], Mapping):
            merged[key] = _completed(inner, stored[key], now[key], given, f"{above}{key}.")
        elif not _is_given(f"{above}{key}", given):
            merged[key] = stored[key]
    return merged


def _is_given(key: str, given: set[str]) -> bool:
    section, _, name = key.rpartition(".")
    # A trial has one budget: who gives one leaves none of the others to its default.
    names = [f"{section}.{budget}" for budget in BUDGETS] if name in BUDGETS else [key]
    return any(one == name or one.startswith(f"{name}.") for one in given for name in names)


def _completed_algorithm(
    stored: Mapping[str, Any], now: Mapping[str, Any], given: set[str], section: str
) -> dict[str, Any]:
    """A sampler or pruner: options belong to a name, and one that is in neither is at Optuna's default."""
    named = {key for key in (*stored, *now) if f"{section}.{key}" in given}
    if "name" in named and stored["name"] != now["name"]:
        keeps_seed = "seed" in stored and "seed" not in named
        return {**now, "seed": stored["seed"]} if keeps_seed else dict(now)
    left_out = {key: value for key, value in stored.items() if key not in named}
    return left_out | {key: value for key, value in now.items() if key in named}


def refuse_changes(name: str, stored: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise StudyChangedError where two definitions of a study differ in what its results depend on."""
    if lines := [*_differences(_without_folders(stored), _without_folders(now))]:
        what = "search space" if stored["search_space"] != now["search_space"] else "definition"
        raise StudyChangedError(
            f"The stored study `{name}` has another {what} than the study file, so its results would not "
            "compare. Restore the file, or give the study another `name`.\n  " + "\n  ".join(lines)
        )


def refuse_other_code(name: str, file: Mapping[str, Any], merged: Mapping[str, Any]) -> None:
    """Refuse encoders that the file does not name where it trusts the code that comes with its encoder.

    The values that a study was made with come from the database, which does not decide whose code runs.
    A search space is never completed.

    Raises:
        InputError: `merged`, the file's definition completed, has other encoders or another revision.
    """
    if not file["model"]["trust_remote_code"]:
        return
    for section, key in (("model", "encoder"), ("model", "revision"), ("training", "encoder")):
        before, after = (each[section].get(key) for each in (file, merged))
        if before != after:
            raise InputError(
                f"{section}.{key}: the stored study `{name}` has {json.dumps(after)}, of which its file says "
                "nothing, and the file trusts the code that comes with its encoder. Read that code, then "
                "write this value into the file."
            )


def _without_folders(value: Any) -> Any:
    """Keep of absolute paths only the last part: the same data may lie elsewhere on another machine."""
    if isinstance(value, Mapping):
        return {key: _without_folders(item) for key, item in value.items()}
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def _differences(stored: Mapping[str, Any], now: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """A line for each key that is in one of the two alone, or has another value."""
    for key in sorted(stored.keys() | now.keys()):
        name, before, after = f"{above}{key}", stored.get(key), now.get(key)
        if before == after or name in ("given", "folder") or name in CHANGEABLE:
            continue
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _differences(before, after, f"{name}.")
        elif key not in now:
            yield f"- {name}: {json.dumps(before)}"
        elif key not in stored:
            yield f"+ {name}: {json.dumps(after)}"
        else:
            yield f"~ {name}: {json.dumps(before)} -> {json.dumps(after)}"
