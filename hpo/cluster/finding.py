"""What a check of `hpo doctor` finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """Something that is wrong."""

    severity: Literal["error", "warning", "note"]
    """Nothing can run as it is; something is lost or slow; to be known, as it may be meant so."""
    problem: str
    remedy: str = ""
    """What `mend` does or, without it, what to do."""
    mend: Callable[[], object] | None = field(default=None, repr=False, compare=False)
    check: str = ""
    mended: bool = False

    @property
    def remains(self) -> bool:
        """Whether there is something left to do."""
        return self.severity != "note" and not self.mended
