from __future__ import annotations

from pathlib import Path

import pytest
from support.command_line import hpo_command, ok, refused


def test_no_database(tmp_path: Path) -> None:
    assert hpo_command(tmp_path, "database", "stop").out == "The database in runs/postgres was not running.\n"
    status = hpo_command(tmp_path, "database", "status", "--json")
    assert (status.exit_code, status.json) == (1, {"running": False})
    assert not (tmp_path / "runs").exists()
    refused(hpo_command(tmp_path, "copy", "tiny", "--to", "sqlite:///b.db"), "Error: There is no")
    assert not list(tmp_path.iterdir())


@pytest.mark.postgres
def test_a_url_in_a_file_is_a_storage(folder: Path, postgres_url: str) -> None:
    file = folder / "url"
    file.write_text(postgres_url)
    file.chmod(0o644)
    refused(hpo_command(folder, "copy", "tiny", "--to", "@url"), "only its owner may read it")
    file.chmod(0o600)
    ok(hpo_command(folder, "copy", "tiny", "--to", "@url"))
    assert "tiny" in ok(hpo_command(folder, "status", "tiny", "--storage", "@url")).out
