"""The tables before they had a version; `upgrade` is never run."""

from __future__ import annotations

revision = "v1"
down_revision = None


def upgrade() -> None:
    raise AssertionError("a database without tables is made at the newest version")
