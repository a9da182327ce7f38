"""The base of every section of a study file, and the types of value that sections share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from hpo.errors import shorten


class Section(BaseModel):
    """A part of a study file: frozen, nothing unknown, no conversions (`"8"` is no number), no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def switch(value: Any) -> Any:
    """YAML 1.1's words for a boolean as booleans: a study file follows YAML 1.2, where they are text."""
    words = {"yes": True, "on": True, "no": False, "off": False}
    return words.get(value.lower(), value) if isinstance(value, str) else value


def whole(value: Any) -> Any:
    """`1e3`, which YAML reads as a float, as the int that it is.

    Raises ValueError for a number that no float holds exactly: nothing counts as far.
    """
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(value, int) and abs(value) > 2**53:
        raise ValueError(f"must be between -2^53 and 2^53, but got `{shorten(str(value), 40)}`.")
    return value


Switch = Annotated[bool, BeforeValidator(switch)]
Whole = Annotated[int, BeforeValidator(whole)]
Count = Annotated[Whole, Field(ge=1)]
