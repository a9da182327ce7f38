"""Where the real, openly licensed sets lie: HPO_DATA_DIR, or beside the project.

It lies here because the benchmarks are scripts, which see their own folder alone; tests have the fixture
`real_set`.
"""

from __future__ import annotations

import os
from pathlib import Path

REAL_SETS = Path(os.environ.get("HPO_DATA_DIR", Path(__file__).parents[3] / "shared" / "data"))
