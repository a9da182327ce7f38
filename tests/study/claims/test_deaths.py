from __future__ import annotations

from pathlib import Path

from hpo.study.claims.deaths import last_saved_step


def test_last_saved_step(tmp_path: Path) -> None:
    assert last_saved_step(tmp_path / "absent") == 0
    for name in ("step-00000090", "step-00000120", "best-00000500", "step-00000900.tmp"):
        (tmp_path / name).mkdir()
    assert last_saved_step(tmp_path) == 120
