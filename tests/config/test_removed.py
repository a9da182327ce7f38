from pathlib import Path
from typing import Any

import pytest
from support.command_line import hpo_command

from hpo.config.study_config import StudyConfig, load_study, stored_study, study_of
from hpo.config.trial_settings import check_name
from hpo.errors import InputError, StorageError, StudyFileError

TABLE = {
    "pace": "Use `budget`.",
    "training.rounding": "Leave it out.",
    "objective.unit": "Leave it out.",
    "hpo rank": "Use `hpo best`.",
    "hpo database turn": "Use `hpo database copy`.",
    "hpo best --rank": "Leave it out.",
}


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpo.config.removed.REMOVED", TABLE)


STUDY = {"name": "s", "data": {"source": "synthetic"}}


@pytest.mark.parametrize(
    ("keys", "where", "instead"),
    [
        ({"pace": 3}, "pace", "Use `budget`."),
        ({"training": {"rounding": "up"}}, "training.rounding", "Leave it out."),
        ({"search_space": {"rounding": ["up"]}}, "search_space.rounding", "Leave it out."),
        ({"objective": [{"metric": "score", "unit": "%"}]}, "objective.0.unit", "Leave it out."),
    ],
)
def test_removed_key_is_one_error(keys: dict[str, Any], where: str, instead: str) -> None:
    with pytest.raises(InputError) as refused:
        study_of(STUDY | keys)
    assert str(refused.value) == f"{where}: this key was removed. {instead}"


def test_removed_key_of_file_parameter_and_stored_study(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text("name: s\ndata: {source: synthetic}\npace: 3\n")
    with pytest.raises(StudyFileError, match=r"study\.yaml:3: pace: this key was removed\. Use `budget`\.$"):
        load_study(path)
    with pytest.raises(ValueError, match=r"^this key was removed\. Leave it out\.$"):
        check_name("rounding")
    definition = StudyConfig.model_validate(STUDY).definition()
    given = {**definition, "pace": 3, "given": [*definition["given"], "pace"]}
    with pytest.raises(StorageError, match=r"pace: this key was removed\. Use `budget`\."):
        stored_study("s", given)
    assert stored_study("s", {**given, "given": definition["given"]}).definition() == definition


@pytest.mark.parametrize(
    ("arguments", "typed"),
    [
        (["rank", "s", "--json"], "hpo rank"),
        (["database", "turn"], "hpo database turn"),
        (["best", "--rank=3", "s"], "hpo best --rank"),
    ],
)
def test_removed_command_is_one_error(tmp_path: Path, arguments: list[str], typed: str) -> None:
    ended = hpo_command(tmp_path, *arguments)
    assert (ended.exit_code, ended.out) == (2, "")
    assert ended.err == f"Error: `{typed}` was removed. {TABLE[typed]}\n"
