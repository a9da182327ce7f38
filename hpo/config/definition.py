"""The definition of a study, as the database keeps it: all its keys, and which of them the file gave.

A study is resumed with the values that it was made with. A default that a later version changes does not
reach it, since the definition holds the old one, and writing a default out in the file changes nothing. Of
a key that the file gave and leaves out now the default holds, as in a new study.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from hpo.config.search_space import DISTRIBUTIONS
from hpo.config.study_file import section_of, show
from hpo.config.trial_settings import BUDGETS
from hpo.errors import StudyChangedError

CHANGEABLE = (
    "n_trials",
    "timeout",
    "max_retries",
    "sampler",
    "pruner",
    "device",
    "checkpoint",
    "amp.memory_fraction",
)
"""Keys of the study file that may change before a study is resumed: its results still compare."""


def given_keys(model: type[BaseModel] | None, content: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """The dotted keys that the `content` of a study file gives, of sections and of loss weights each key."""
    for key, value in content.items():
        field = model.model_fields.get(key) if model else None
        inner = section_of(field.annotation) if field else None
        value = value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
        if isinstance(value, Mapping) and ((inner and key != "search_space") or key == "loss_weight"):
            yield from given_keys(inner, value, f"{above}{key}.")
        else:
            yield f"{above}{key}"


def completed(model: type[BaseModel], stored: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The definition `now` of a study, a `model`, with the `stored` values of all keys that neither gives."""
    given = {*stored["given"], *now["given"]}
    merged = _completed(model, stored, now, given)
    merged |= {key: _completed_algorithm(stored[key], now[key], given, key) for key in ("sampler", "pruner")}
    return merged | {"given": now["given"]}


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
        return {key: stored.get(key, now[key]) if key == "seed" not in named else now[key] for key in now}
    left_out = {key: value for key, value in stored.items() if key not in named}
    return left_out | {key: value for key, value in now.items() if key in named}


def refuse_changes(name: str, stored: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise StudyChangedError where two definitions of a study differ in what its results depend on."""
    lines = space_diff(stored["search_space"], now["search_space"])
    what = "search space" if lines else "definition"
    for key in sorted((stored.keys() | now.keys()) - {"search_space", "given"}):
        lines += _differences(key, _without_folders(stored.get(key)), _without_folders(now.get(key)))
    if lines:
        raise StudyChangedError(
            f"The stored study `{name}` has another {what} than the study file, so its results would not "
            "compare. Restore the file, or give the study another `name`.\n  " + "\n  ".join(lines)
        )


def _without_folders(value: Any) -> Any:
    """Keep of absolute paths only the last part: the same data may lie elsewhere on another machine."""
    if isinstance(value, Mapping):
        return {key: _without_folders(item) for key, item in value.items()}
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def _differences(key: str, stored: Any, now: Any) -> list[str]:
    if stored == now or key in CHANGEABLE:
        return []
    if isinstance(stored, Mapping) and isinstance(now, Mapping):
        keys = sorted(stored.keys() | now.keys())
        return [line for k in keys for line in _differences(f"{key}.{k}", stored.get(k), now.get(k))]
    return [f"~ {key}: {json.dumps(stored)} -> {json.dumps(now)}"]


def space_hash(space: Mapping[str, Any]) -> str:
    """A name for what is searched: the same in every process, whatever the order of the settings."""
    return hashlib.sha256(json.dumps(space, sort_keys=True).encode()).hexdigest()[:16]


def space_diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """How the search space `new` differs from `old` (both as JSON), a line for each difference."""
    lines = [f"- {name}: {_brief(old[name])}" for name in old if name not in new]
    lines += [f"+ {name}: {_brief(new[name])}" for name in new if name not in old]
    for name in old:
        before, after = old[name], new.get(name, old[name])
        if before["type"] != after["type"]:
            lines.append(f"~ {name}: {_brief(before)} -> {_brief(after)}")
            continue
        for key in before:
            if before[key] != after[key]:
                lines.append(f"~ {name}: {key} {show(before[key], 200)} -> {show(after[key], 200)}")
    return lines


def _brief(dumped: Mapping[str, Any]) -> str:
    """`categorical, choices [1, 2]`: a distribution without the keys that are at their default."""
    fields = DISTRIBUTIONS[dumped["type"]].model_fields
    told = [
        f"{key} {show(value, 200)}"
        for key, value in dumped.items()
        if key != "type" and value != fields[key].get_default(call_default_factory=True)
    ]
    return ", ".join([dumped["type"], *told])
