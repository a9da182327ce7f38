"""The base of every section of a study file, and shared types of values."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from hpo.errors import shorten


class Section(BaseModel):
    """A part of a study file: frozen, without unknown keys, conversions (`"8"` is no number) and NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def switch(value: Any) -> Any:
    """Return YAML 1.1's words for booleans as booleans. In YAML 1.2 they are text."""
    words = {"yes": True, "on": True, "no": False, "off": False}
    return words.get(value.lower(), value) if isinstance(value, str) else value


def whole(value: Any) -> Any:
    """Return `1e3`, a float in YAML, as an int. Raises ValueError for a number beyond exact floats."""
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(value, int) and abs(value) > 2**53:
        raise ValueError(f"must be between -2^53 and 2^53, but got `{shorten(str(value), 40)}`.")
    return value


Switch = Annotated[bool, BeforeValidator(switch)]
Whole = Annotated[int, BeforeValidator(whole)]
Count = Annotated[Whole, Field(ge=1)]
