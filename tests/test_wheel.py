"""The wheel of the package: its files, and its commands in an empty folder."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.readme import ROOT

STUDIES = ROOT / "studies"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the unpacked wheel, built from a copy of the checkout."""
    pytest.importorskip("pip", reason="building a wheel needs pip")
    source, wheels = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    for folder in ("hpo", "studies"):
        ignored = shutil.ignore_patterns("__pycache__", "runs")
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignored)
    build = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    subprocess.run([sys.executable, *build, "--wheel-dir", str(wheels), str(source)], check=True)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        content.extractall(wheels / "site")
    return wheels / "site"


def hpo_of(installed: Path, folder: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed), "HPO_STORAGE": ""}
    command = [sys.executable, "-m", "hpo", *words]
    return subprocess.check_output(command, cwd=folder, env=environment, text=True)


def test_the_wheel_holds_every_file_of_the_package(installed: Path) -> None:
    files = [path for path in (ROOT / "hpo").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    names = [str(path.relative_to(ROOT)) for path in files]
    assert [name for name in names if not (installed / name).is_file()] == ["hpo/README.md"]
    assert (installed / "hpo/py.typed").is_file()


def test_the_wheel_holds_the_studies(installed: Path) -> None:
    def files(folder: Path) -> set[Path]:
        paths = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
        return {path for path in paths if path.parent.name != "__pycache__"}

    pictures = {path for path in files(STUDIES) if path.parent.name == "pictures"}
    assert files(installed / "hpo" / "studies") == files(STUDIES) - pictures


@pytest.mark.slow
def test_installed_studies_run_by_name_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    assert "topic" in hpo_of(installed, tmp_path, "check", "tickets"), "data beside an installed study"
    ran = hpo_of(installed, tmp_path, "run", "own_loop", "--n-trials", "1")
    assert "1 complete" in ran, "code beside one"
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


def test_an_installed_example_is_copied(installed: Path, tmp_path: Path) -> None:
    assert "own_loop" in hpo_of(installed, tmp_path, "new")
    hpo_of(installed, tmp_path, "new", "mine", "--from", "own_loop")
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {"study.yaml", "own_loop.py"}
