"""The READMEs are true where a test can tell: reference, commands, files, links."""

import os
import re
from pathlib import Path

import pytest
import yaml
from support import readme as files
from support.command_line import COMMANDS
from support.readme import README, READMES, ROOT

import hpo
from hpo.config.definition import CHANGEABLE
from hpo.config.study_config import load_study
from hpo.config.study_file import study_files

TEXT = README.read_text()
ALL = "\n".join(file.read_text() for file in READMES)


def test_reference_matches_the_models() -> None:
    text = files.REFERENCE.read_text()
    assert text.count(files.BEGIN) == text.count(files.END) == 1
    assert files.with_reference(text) == text, "run `make reference`"


def test_the_readme_is_short() -> None:
    assert len(TEXT.splitlines()) <= 200
    assert max(map(len, TEXT.splitlines())) <= 100


def test_readme_lists_exactly_the_commands() -> None:
    first_words = {name.split()[0] for name in COMMANDS}
    assert set(re.findall(r"`hpo\s([a-z]+)", ALL)) == first_words
    table = TEXT.split("## Commands", 1)[1].split("\n## ", 1)[0]
    first_cells = " ".join(re.findall(r"^\| ([^|]+)", table, re.MULTILINE))
    assert set(re.findall(r"`hpo ([a-z]+)", first_cells)) == first_words
    for name, option in re.findall(r"`hpo (\w+) STUDY` \|.*?`(--[a-z-]+)", table):
        assert option in [given for parameter in COMMANDS[name].params for given in parameter.opts]


def test_make_targets_in_the_readmes_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", ALL)) <= targets


def test_changeable_keys_are_listed() -> None:
    """Without those that `hpo compare` alone changes, in studies of its own."""
    resumed = r"A study is resumed by its name\.(.*?)may\s+change\."
    (sentence,) = re.findall(resumed, files.CLUSTER.read_text(), re.DOTALL)
    keys = {key for key in CHANGEABLE if not key.startswith("comparison.")}
    assert set(re.findall(r"`([a-z_.]+)`", sentence)) == keys


def test_every_folder_of_the_package_has_its_line_in_the_layout() -> None:
    folders = {path.parent.name for path in (ROOT / "hpo").glob("*/__init__.py")}
    assert set(re.findall(r"^hpo/(\w+) ", files.PACKAGE.read_text(), re.MULTILINE)) == folders


def test_the_findings_are_listed_and_have_their_form() -> None:
    scripts = {path.name: path for path in files.FINDINGS.parent.glob("*.sh")}
    assert re.findall(r"^\| `(.+\.sh)`", files.FINDINGS.read_text(), re.MULTILINE) == sorted(scripts)
    for path in scripts.values():
        head = path.read_text().split("\nset -", 1)[0]
        for title in ("An expert expects", "What happens", "Seen with", "Who is hurt", "Instead"):
            assert re.search(rf"^# {title}\b", head, re.MULTILINE), path
        assert os.access(path, os.X_OK), path


@pytest.mark.parametrize("file", sorted(set(re.findall(r"`((?:\w+/)*\w+\.py)`", ALL))))
def test_files_in_the_readmes_exist(file: str) -> None:
    assert (ROOT / "hpo" / file).is_file() or (ROOT / file).is_file()


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(readme: Path) -> None:
    links = re.findall(r"\]\((?!http)([^)]*)\)", readme.read_text())
    for link in links:
        name, _, anchor = link.partition("#")
        target = readme.parent / name if name else readme
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor else []
        anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert not anchor or anchor in anchors, link


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(("name", "path"), study_files(ROOT / "studies").items())
def test_the_studies_load_and_say_how_long_they_take(name: str, path: Path) -> None:
    study = load_study(path)
    assert study.name == name
    head = path.read_text().split("\nname:", 1)[0]
    assert f"# Command:  make hpo STUDY={name}" in head or path.parent.parent.name == "examples"
    for title in ("Question", "Command", "Takes"):
        assert re.search(rf"^# {title}: +\S", head, re.MULTILINE)


@pytest.mark.parametrize("block", re.findall(r"```yaml\n(.*?)```", ALL, re.DOTALL))
def test_the_study_files_of_the_readme_load(block: str, tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(block)
    assert isinstance(yaml.safe_load(block), dict)
    load_study(path)


def test_the_changelog_opens_with_this_version() -> None:
    """After the changes of the next one."""
    found = re.findall(r"^## (\S+)", files.CHANGELOG.read_text(), re.MULTILINE)
    assert next(one for one in found if one != "Unreleased") == hpo.__version__
    assert "Unreleased" not in found[1:]
