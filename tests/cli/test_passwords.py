from pathlib import Path

import pytest
from support.command_line import hpo_command, ok
from support.planted_int8 import write_mood_study
from support.postgres import PASSWORD


@pytest.mark.postgres
def test_no_written_file_contains_the_password(tmp_path: Path, postgres_url: str) -> None:
    quoted = postgres_url.split(":")[2].partition("@")[0]
    study = write_mood_study(tmp_path, n_trials=1)
    storage = ("--storage", postgres_url)
    commands = [
        ("run", str(study), *storage),
        ("best", "mood", *storage, "--export", "model", "--evaluate", "test"),
        ("deploy", "mood", *storage, "--artifacts", "fp32"),
        ("report", "mood", *storage),
    ]
    for command in commands:
        finished = ok(hpo_command(tmp_path, *command))
        for text in (finished.out, finished.err):
            assert PASSWORD not in text
            assert quoted not in text
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert names >= {"deploy.json", "hpo.json", "report.html", "model.safetensors"}
    for path in files:
        content = path.read_bytes()
        for secret in (PASSWORD, quoted):
            assert secret.encode() not in content, path
