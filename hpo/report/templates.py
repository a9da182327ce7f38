"""Pages from the templates of this folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

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
    templates.filters["inline"] = _inline
    return templates.get_template(template).render(**values)


def _inline(text: Any) -> Markup:
    """Escaped, then `code` between backticks, as messages of this package write it."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(str(text)))))
