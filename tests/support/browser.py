"""A real Chromium for tests marked `browser`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
]
FLAGS += ["--disable-sync", "--disable-background-networking", "--disable-component-update"]


def without_plotly(path: Path) -> str:
    """The text of a page without plotly.js."""
    return re.sub(
        r'(<script type="application/gzip" id="plotly">).*?</script>', r"\1</script>", path.read_text()
    )


@contextmanager
def open_chromium() -> Iterator[Any]:
    """A running Chromium (Playwright's Browser); skips the test where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not installed")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def page_that_fits(browser: Any, path: Path, width: int, num_plots: int) -> Iterator[Any]:
    """The page of a file in a window of `width`, with so many plots at least.

    At the end of the block it must fit, with nothing asked for but the file and nothing to complain of.
    """
    page = browser.new_page(viewport={"width": width, "height": 900})
    problems: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_function(f"document.querySelectorAll('.js-plotly-plot .main-svg').length >= {num_plots}")
    yield page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    boxes = page.evaluate(
        "[...document.querySelectorAll('.scroll, .js-plotly-plot')].map(e => e.getBoundingClientRect().right)"
    )
    assert max(boxes) <= width
    assert problems == []
    assert requests == [path.as_uri()]
    page.close()
