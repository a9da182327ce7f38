"""Pages from the templates of this folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape


def fill(template: str, **values: Any) -> str:
    """A page from a template of this folder; text in it is escaped."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"inline": lambda value: _inline(str(value)), "rows": _rows}
    return templates.get_template(template).render(**values)


@lru_cache(maxsize=2**16)
def _inline(text: str) -> Markup:
    """Return the escaped text, with `code` between backticks, as messages of this package write it."""
    escaped = escape(text)
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escaped))) if "`" in text else escaped


def _rows(frame: pd.DataFrame) -> Iterator[tuple[Any, ...]]:
    """Return the rows of a frame; `itertuples` takes several times as long for columns of texts."""
    return zip(*(frame.iloc[:, index].tolist() for index in range(frame.shape[1])), strict=True)
