"""The settings of a study and of its trials as flat names and values, without secrets.

A setting has its name in the study file, such as `data.source`. A setting of `training` has its bare name,
so that `learning_rate` is one column, whether a study fixes or searches it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hpo.config.definition import CHANGEABLE
from hpo.config.trial_settings import BUDGETS
from hpo.redaction import HIDDEN

_SECRET_NAME = re.compile(
    r"(?i)(?:password|passwd|passphrase|secret|(?:^|[._-])(?:pass|pwd|credentials?)|(?:^|\.)token|"
    r"(?:hf|api|access|auth|secret|private)[_-]?(?:key|token)s?|[_-](?:key|token))$"
)
_OTHER_NAME = re.compile(
    r"(?i)(?:^|[._-])(?:pad|cls|mask|sep|bos|eos|unk|text|label|sort|group|first|study)[_-](?:key|token|pass)$"
)
"""Names of other settings, such as those of a tokenizer."""


def is_secret(name: str) -> bool:
    """Return True if a setting of this name may hold a password or a token."""
    return bool(_SECRET_NAME.search(name)) and not _OTHER_NAME.search(name)


def without_secret_settings(content: Any) -> Any:
    """Return the content of a study file with `***` for the values of secret settings."""
    if isinstance(content, Mapping):
        return {
            name: HIDDEN if value and is_secret(name) else without_secret_settings(value)
            for name, value in content.items()
        }
    return [without_secret_settings(item) for item in content] if isinstance(content, list) else content


def is_changeable(name: str) -> bool:
    """Return True if the setting of an existing study may change."""
    return any(f"{name}.".startswith(f"{key}.") for key in CHANGEABLE)


def study_settings(definition: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a study: distributions, named `search_space.NAME`, and fixed values."""
    space = section(definition, "search_space")
    settings = {f"search_space.{name}": distribution for name, distribution in space.items()}
    return settings | _fixed(definition, space)


def trial_settings(definition: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a trial: searched values, and fixed values that cannot change."""
    fixed = _fixed(definition, params).items()
    return {**params, **{name: value for name, value in fixed if name.partition(".")[0] not in CHANGEABLE}}


def _fixed(definition: Mapping[str, Any], searched: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fixed settings except `searched` ones."""
    left_out = ("given", "name", "tags", "search_space", "training")
    fixed = _flat({key: value for key, value in definition.items() if key not in left_out})
    training = section(definition, "training")
    training |= section(training, "option")
    training.pop("option", None)
    if any(searched.get(budget) is not None for budget in BUDGETS):
        training = {name: value for name, value in training.items() if name not in BUDGETS}
    # These settings of `training` replace those of another section.
    for name, other in (("encoder", "model"), ("init_scale", "amp")):
        if name in searched or training.get(name) is not None:
            replaced = f"{other}.{name}."
            fixed = {key: value for key, value in fixed.items() if not f"{key}.".startswith(replaced)}
        else:
            training.pop(name, None)
    return {name: value for name, value in (_flat(training) | fixed).items() if name not in searched}


def section(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a copy of the mapping of this name, or {} if there is none."""
    value = content.get(name)
    return dict(value) if isinstance(value, Mapping) else {}


def _flat(content: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{above}{name}.")
        else:
            flat[f"{above}{name}"] = value
    return flat
