"""Plain words: docstrings and test names may not become denser.

A docstring starts with a noun or a verb ("Return the lease."), not with a clause ("What a worker holds.").
Relative words make long sentences; two short sentences are plainer.
"""

import ast
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
CLAUSE = re.compile(r"(?i)^(of|as|those|that|what|where|whether|which|so|likewise|such|nor|beside|whose)\b")
RELATIVE = re.compile(r"(?i)\b(that|which|what|those|who|whose|whom|whoever|whichever)\b")


class Text(NamedTuple):
    """A docstring, or the words of a test's name."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text.splitlines()[0]}"


def docstrings(file: str, source: str) -> list[Text]:
    """Return the docstrings of modules, classes, functions and attributes (a string after an assignment)."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for before, statement in zip([None, *node.body], node.body, strict=False):
                if before is None or isinstance(before, ast.Assign | ast.AnnAssign):
                    match statement:
                        case ast.Expr(value=ast.Constant(value=str(text))):
                            found.append(Text(file, statement.lineno, text.strip()))
    return found


def names(file: str, source: str) -> list[Text]:
    """Return the names of a file's tests, as words."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    tests = [node for node in functions if node.name.startswith("test_")]
    return [Text(file, node.lineno, node.name.replace("_", " ")) for node in tests]


def sources(folder: str, pattern: str) -> list[tuple[str, str]]:
    files = sorted((ROOT / folder).rglob(pattern))
    return [(str(file.relative_to(ROOT)), file.read_text()) for file in files]


DOCSTRINGS = [text for source in sources("hpo", "*.py") for text in docstrings(*source)]
NAMES = [text for source in sources("tests", "test_*.py") for text in names(*source)]


def worst(offenders: dict[Text, int]) -> str:
    """Return ten offenders: first those of uncommitted files, then those with the most hits."""
    diff = subprocess.run(["git", "diff", "--name-only", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    changed = set(diff.stdout.splitlines())
    ordered = sorted(offenders, key=lambda text: (text.file not in changed, -offenders[text]))
    return "\n".join(map(str, ordered[:10]))


@pytest.mark.parametrize(
    ("texts", "pattern", "per_word", "limit"),
    [
        pytest.param(DOCSTRINGS, CLAUSE, False, 2.0, id="docstrings-open-with-a-clause"),
        pytest.param(DOCSTRINGS, RELATIVE, True, 1.5, id="relative-words-of-docstrings"),
        pytest.param(NAMES, RELATIVE, False, 2.0, id="test-names-with-a-relative-word"),
    ],
)
def test_text_stays_plain(texts: list[Text], pattern: re.Pattern[str], per_word: bool, limit: float) -> None:
    hits = {text: len(pattern.findall(text.text)) for text in texts}
    offenders = {text: number for text, number in hits.items() if number}
    if per_word:
        rate = 100 * sum(offenders.values()) / sum(len(text.text.split()) for text in texts)
    else:
        rate = 100 * len(offenders) / len(texts)
    assert rate <= limit, f"rewrite some of these in plain words:\n{worst(offenders)}"
