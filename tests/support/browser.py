"""Pages of reports, and the Chromium for tests marked `browser`."""

import re
from pathlib import Path

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = ["--headless=new", "--no-sandbox", "--no-first-run", "--disable-gpu", "--disable-quic"]
FLAGS += ["--disable-sync", "--disable-background-networking", "--disable-component-update"]


def without_plotly(path: Path) -> str:
    """The text of a page without plotly.js."""
    return re.sub(
        r'(<script type="application/gzip" id="plotly">).*?</script>', r"\1</script>", path.read_text()
    )
