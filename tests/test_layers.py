"""Each folder imports only from the folders below it, so a trial is followed downwards; none goes round."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hpo"
FLOORS = (
    "cli",
    "report",
    "cluster",
    "compare",
    "study",
    "deploy",
    "trial",
    "inference",
    "evaluation",
    "training",
    "models",
    "data",
    "config",
    "precision",
)
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
KNOWS_OPTUNA = ("cli", "report", "cluster", "study", "config")


def floor(parts: tuple[str, ...]) -> int:
    """0 for the highest; files that lie in no folder are words that everyone uses."""
    return FLOORS.index(parts[0]) if parts[0] in FLOORS else len(FLOORS)


def imported(file: Path) -> set[str]:
    """The modules of the package that a file imports, other than for type annotations alone."""
    tree = ast.parse((PACKAGE / file).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("hpo."):
            inner = (f"{node.module}.{alias.name}" for alias in node.names)
            names |= {name if name in MODULES else str(node.module) for name in inner}
    return {name.removeprefix("hpo.") for name in names}


MODULES = {".".join(("hpo", *file.with_suffix("").parts)) for file in FILES}


def test_every_folder_is_a_floor() -> None:
    assert {file.parts[0] for file in FILES if len(file.parts) > 1} == set(FLOORS)


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_file_imports_only_from_its_floor_and_below(file: Path) -> None:
    if file.name != "__main__.py":
        above = {name for name in imported(file) if floor(tuple(name.split("."))) < floor(file.parts)}
        assert not above


def test_no_imports_go_round() -> None:
    graph = {".".join(file.with_suffix("").parts): imported(file) for file in FILES}
    assert len(tuple(TopologicalSorter(graph).static_order())) >= len(FILES)


def test_only_the_search_and_the_database_know_optuna() -> None:
    for file in FILES:
        source = (PACKAGE / file).read_text()
        if file.parts[0] not in KNOWS_OPTUNA:
            assert not re.search(r"^\s*(import|from) optuna", source, re.MULTILINE), file
