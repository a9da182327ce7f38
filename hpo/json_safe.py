"""Values for JSON, for databases, Optuna and the command line."""

import math
import sys
from collections.abc import Mapping, Sequence, Set
from typing import Any


def json_safe(value: Any) -> Any:
    """Return a copy in plain containers, with numpy and torch values unpacked, NaN and infinity as None."""
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, str) or value is None:
        return value
    if isinstance(value, Sequence | Set):
        return [json_safe(item) for item in value]
    if hasattr(value, "tolist"):
        return json_safe(value.tolist())
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number. True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
