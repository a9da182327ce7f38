"""Each folder imports only from the folders below it, so a trial is followed downwards; none goes round."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import optuna
import pytest

from hpo.tasks.registry import KINDS

PACKAGE = Path(__file__).parents[1] / "hpo"
FLOORS = (
    "cli",
    "api",
    "track",
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
    "tasks",
    "precision",
)
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
KNOWS_OPTUNA = ("api", "cli", "report", "cluster", "study", "config")


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


def test_only_the_kinds_of_task_know_their_names() -> None:
    """What depends on a task's kind asks the kind; the generator's set names those of its own tasks."""
    of_kinds = {kind.__module__.removeprefix("hpo.") for kind in KINDS.values()}
    naming, importing = set(), set()
    for file in FILES:
        nodes = ast.walk(ast.parse((PACKAGE / file).read_text()))
        constants = {node.value for node in nodes if isinstance(node, ast.Constant)}
        if file.parts[0] != "tasks" and constants & KINDS.keys():
            naming.add(file.as_posix())
        if file.parts[0] != "tasks" and imported(file) & of_kinds:
            importing.add(file.as_posix())
    assert naming == {"data/synthetic.py"}
    assert not importing


def test_only_the_search_and_the_database_know_optuna() -> None:
    for file in FILES:
        source = (PACKAGE / file).read_text()
        if file.parts[0] not in KNOWS_OPTUNA:
            assert not re.search(r"^\s*(import|from) optuna", source, re.MULTILINE), file


@pytest.mark.parametrize("room", ["running", "claims"])
def test_functions_of_workers_stay_short(room: str) -> None:
    for file in sorted((PACKAGE / "study" / room).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args
                names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                names += [each.arg for each in (given.vararg, given.kwarg) if each]
                assert len([name for name in names if name != "self"]) <= 6, (file.name, node.name)
                assert (node.end_lineno or node.lineno) - node.lineno < 60, (file.name, node.name)


def private_to_optuna(file: Path) -> set[str]:
    """What a file uses of Optuna's private modules, names and attributes of studies, trials and storages."""
    study = optuna.create_study()
    known = {name for thing in (study, study._storage, study.ask(), study.trials[0]) for name in dir(thing)}
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "super()"):
            found |= {f"optuna.{node.attr}"} & {f"optuna.{name}" for name in known}
    return {name for name in found if re.match(r"optuna\b.*\._(?!_)", name)}


def test_one_file_uses_what_is_private_to_optuna() -> None:
    using = {file.as_posix() for file in FILES if private_to_optuna(file)}
    assert using == {"study/store/optuna_internals.py"}
