from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tiny import write_study
from support.worker_process import study
from typer.testing import CliRunner

import hpo
from hpo.api.opening import load_to_work
from hpo.cli.commands import app
from hpo.study.running.stopping import RunSummary
from hpo.study.store.storage import open_storage
from hpo.study.store.studies import create_or_resume_study


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "studies").mkdir()
    return tmp_path


def test_a_name_is_the_study_of_the_database_whatever_a_file_of_that_name_is_about(
    folder: Path, sqlite_url: str
) -> None:
    """`studies/foo.yaml` has `name: bar`, and both are in the database."""
    write_study(folder / "studies", name="bar").rename(folder / "studies" / "foo.yaml")
    with open_storage(sqlite_url) as storage:
        for name in ("foo", "bar"):
            create_or_resume_study(storage, study(2, name=name))
    for given, meant in (("foo", "foo"), ("bar", "bar"), ("studies/foo.yaml", "bar")):
        assert hpo.Study(given, storage=sqlite_url).record.name == meant
        assert load_to_work(given, sqlite_url)[0].name == meant
    foo = hpo.Study("foo", storage=sqlite_url)
    assert foo.config_of(foo.record).name == "foo"


def test_a_name_that_the_database_does_not_have_is_of_a_file(folder: Path, sqlite_url: str) -> None:
    write_study(folder / "studies", name="bar").rename(folder / "studies" / "foo.yaml")
    with open_storage(sqlite_url) as storage:
        create_or_resume_study(storage, study(2, name="bar"))
    assert hpo.Study("foo", storage=sqlite_url).record.name == "bar"


@pytest.mark.parametrize("option", [[], ["--timeout", "7"]])
def test_a_timeout_is_of_this_run_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, option: list[str]
) -> None:
    given: dict[str, Any] = {}

    def run_trials(_study: Any, config: Any, _: Any, stop: Any) -> Any:
        given.update(config=config, deadline=stop.deadline)
        raise SystemExit(RunSummary("finished").exit_code)

    monkeypatch.setattr(hpo.Study, "_run", run_trials)
    write_study(folder, timeout=9.0)
    assert CliRunner().invoke(app, ["run", "tiny.yaml", *option]).exit_code == 0
    assert given["config"].timeout == 9.0
    assert (given["deadline"] < float("inf")) == bool(option)
