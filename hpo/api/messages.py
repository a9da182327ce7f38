"""What the library says while it works, on the standard error."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from hpo.errors import printable


class _Stderr(logging.Handler):
    """Writes to `sys.stderr` as it is when a message is written: a test or a notebook may replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(printable(self.format(record)), err=True)


@contextmanager
def progress_shown(*, quiet: bool) -> Iterator[None]:
    """Show on stderr what the library logs of steps that may take long; warnings alone if `quiet`."""
    logger, handler = logging.getLogger("hpo"), _Stderr(logging.WARNING if quiet else logging.INFO)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(handler.level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
