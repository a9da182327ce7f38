"""Imports go downward: by floor, and inside `study` by room. No imports form a circle, for types too."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import optuna
import pytest

from hpo.tasks.kind import KINDS

PACKAGE = Path(__file__).parents[1] / "hpo"
FLOORS = (
    *("cli", "api", "track", "report", "cluster", "compare", "study", "deploy", "trial", "inference"),
    *("evaluation", "training", "models", "data", "config", "tasks", "precision"),
)
ROOMS = ("running", "reading", "checkpoints", "claims", "sampling", "store")
"""The rooms of `study`, the highest first."""
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
MODULES = {".".join(("hpo", *file.with_suffix("").parts)) for file in FILES}
IMPORTED_AS = {"mlflow-skinny": "mlflow", "nvidia-ml-py": "pynvml", "tensorboard": "torch.utils.tensorboard"}
KNOWS_OPTUNA = ("api", "cli", "report", "cluster", "study", "config")


def floor(parts: tuple[str, ...]) -> int:
    """Return the number of a floor: 0 is the highest, and files in no folder are the lowest."""
    return FLOORS.index(parts[0]) if parts[0] in FLOORS else len(FLOORS)


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text())


@cache
def imported(file: Path) -> frozenset[str]:
    """Return the modules of the package that a file imports, for types too."""
    names: set[str] = set()
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("hpo."):
            inner = (f"{node.module}.{alias.name}" for alias in node.names)
            names |= {name if name in MODULES else str(node.module) for name in inner}
    return frozenset(name.removeprefix("hpo.") for name in names)


def late_imports(file: Path) -> Iterator[str]:
    """Yield the modules that a file imports in a function or under `if TYPE_CHECKING:`."""
    for node in ast.walk(tree_of(file)):
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if is_for_types or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Import):
                    yield from (alias.name for alias in inner.names)
                elif isinstance(inner, ast.ImportFrom):
                    yield str(inner.module)


def packages_of_extras() -> tuple[str, ...]:
    """Return the import names of the optional dependencies, each with a dot at its end."""
    content = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    extras = content["optional-dependencies"]
    needed = [name for extra in extras if extra not in ("dev", "bench") for name in extras[extra]]
    names = {re.split(r"[^\w.-]", name)[0] for name in needed}
    return tuple(f"{IMPORTED_AS.get(name, name)}." for name in names)


def test_every_folder_is_a_floor() -> None:
    assert {file.parts[0] for file in FILES if len(file.parts) > 1} == set(FLOORS)
    assert {file.parts[1] for file in FILES if file.parts[0] == "study"} == set(ROOMS)


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_file_imports_only_from_its_floor_and_below(file: Path) -> None:
    if file.name != "__main__.py":
        above = {name for name in imported(file) if floor(tuple(name.split("."))) < floor(file.parts)}
        assert not above


def test_rooms_of_study_import_downward() -> None:
    for file in (file for file in FILES if file.parts[0] == "study"):
        rooms = {name.split(".")[1] for name in imported(file) if name.startswith("study.")}
        assert not [room for room in rooms if ROOMS.index(room) < ROOMS.index(file.parts[1])], file


def test_no_circle_of_imports() -> None:
    graph = {".".join(file.with_suffix("").parts): imported(file) for file in FILES}
    assert len(tuple(TopologicalSorter(graph).static_order())) >= len(FILES)


def test_imports_are_at_the_top_of_a_file() -> None:
    """The command line imports late, for a fast `--help`, and any file may import an extra late.

    `Study` imports plotly and optuna-dashboard late, for a worker.
    """
    late_modules = (*packages_of_extras(), "hpo.api", "hpo.report.dashboard", "hpo.data.frames")
    for file in FILES:
        if file.parts[0] not in ("cli", "__main__.py"):
            assert not [name for name in late_imports(file) if not f"{name}.".startswith(late_modules)], file


def test_a_worker_loads_neither_plotly_nor_optuna_dashboard() -> None:
    names = ("plotly", "optuna_dashboard")
    code = f"import sys, hpo.api.study\nprint([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.stdout.split() == ["[]"], done.stderr


def test_only_the_kinds_of_task_know_their_names() -> None:
    """Code that depends on a task's kind asks the kind; the generator names the kinds of its own tasks."""
    of_kinds = {kind.__module__.removeprefix("hpo.") for kind in KINDS.values()}
    for file in (file for file in FILES if file.parts[0] != "tasks"):
        constants = {node.value for node in ast.walk(tree_of(file)) if isinstance(node, ast.Constant)}
        assert not constants & KINDS.keys() or file.as_posix() == "data/synthetic.py", file
        assert not imported(file) & of_kinds, file


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
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "super()"):
            found |= {f"optuna.{node.attr}"} & {f"optuna.{name}" for name in known}
    return {name for name in found if re.match(r"optuna\b.*\._(?!_)", name)}


def test_one_file_uses_private_names_of_optuna() -> None:
    using = {file.as_posix() for file in FILES if private_to_optuna(file)}
    assert using == {"study/store/optuna_internals.py"}
