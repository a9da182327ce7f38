"""The name of a study, which is also that of its folder in `runs/`."""

from __future__ import annotations

import re

from hpo.errors import StorageError, shorten


def study_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        shown = shorten(name, 58)
        raise ValueError(f"must be letters, digits, `.`, `_` and `-`, at most 100, but got `{shown}`.")
    return name


def check_study_name(name: str) -> None:
    """Raise StorageError for a name that no study file can give: it would name another folder of `runs/`."""
    try:
        study_name(name)
    except ValueError as error:
        raise StorageError(f"The name of a study {error}") from None
