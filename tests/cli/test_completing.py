import ast
from pathlib import Path

import pytest
from support.command_line import finish, start_python
from support.tiny import write_study
from support.worker_process import study

from hpo.study.store.storage import open_storage
from hpo.study.store.studies import create_or_resume_study

SLOW = ("torch", "sqlalchemy", "optuna", "transformers", "pandas")


def completed(folder: Path, words: str, **environment: str) -> list[str]:
    """The words that a shell is offered for the last one. No slow module may be imported for it."""
    code = (
        "import sys, hpo.cli.commands\n"
        "try: hpo.cli.commands.main()\nexcept SystemExit: pass\n"
        f"print([name for name in {SLOW} if name in sys.modules])"
    )
    asked = {"_HPO_COMPLETE": "complete_bash", "COMP_WORDS": f"hpo {words}", "COMP_CWORD": "2"}
    *found, slow = finish(start_python(folder, "-c", code, **asked, **environment)).out.splitlines()
    assert ast.literal_eval(slow) == []
    return found


def test_a_shell_completes_the_names_and_files_of_studies(tmp_path: Path) -> None:
    write_study(tmp_path).rename(tmp_path / "tidy.yaml")
    (tmp_path / "studies").mkdir()
    write_study(tmp_path / "studies").rename(tmp_path / "studies" / "timed.yaml")
    with open_storage(f"sqlite:///{tmp_path}/ours.db") as storage:
        create_or_resume_study(storage, study(1))
    url = f"sqlite:///{tmp_path}/ours.db"
    assert completed(tmp_path, "status ti", HPO_STORAGE=url) == ["tickets", "tidy.yaml", "timed", "tiny"]


@pytest.mark.parametrize("url", ["postgresql://me@192.0.2.1/x", "@file", "sqlite:///none.db", ""])
def test_a_tab_opens_no_server_and_makes_no_file(tmp_path: Path, url: str) -> None:
    assert completed(tmp_path, "run smo", HPO_STORAGE=url) == ["smoke"]
    assert not any(tmp_path.iterdir())
