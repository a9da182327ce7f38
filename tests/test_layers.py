"""Each file imports only from files before it in the README's list, so a trial is followed downwards."""

from __future__ import annotations

import ast
import re

import pytest
from readme import README

ROOT = README.parent
LAYOUT = README.read_text().split("## Where things are", 1)[1].split("\n## ", 1)[0]
ORDER = re.findall(r"`(\w+)\.py`", LAYOUT)


def imported(module: str) -> set[str]:
    """The files of the package that one imports, other than for type annotations alone."""
    tree = ast.parse((ROOT / "hpo" / f"{module}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    return {
        node.module.removeprefix("hpo.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hpo.")
    }


def test_the_list_names_every_file_once() -> None:
    assert len(ORDER) == len(set(ORDER))
    assert set(ORDER) == {path.stem for path in (ROOT / "hpo").glob("*.py")} - {"__init__", "__main__"}


@pytest.mark.parametrize("module", ORDER)
def test_a_file_imports_only_from_before_it(module: str) -> None:
    assert imported(module) <= set(ORDER[: ORDER.index(module)])


def test_only_the_search_and_the_database_know_optuna() -> None:
    for module in ORDER[: ORDER.index("process")]:
        source = (ROOT / "hpo" / f"{module}.py").read_text()
        if module not in ("distributions", "search_space", "sampler_config"):
            assert not re.search(r"^\s*(import|from) optuna", source, re.MULTILINE), module
