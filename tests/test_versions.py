"""Installation hints: each names the extra of this project, and never another project of PyPI."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from hpo.versions import Extra, install_hint

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = set(PROJECT["optional-dependencies"])
TEXTS = [
    path
    for name in ("hpo", "studies", "docker", "README.md", "Makefile", "tests/benchmarks/README.md")
    for path in [ROOT / name, *(ROOT / name).rglob("*")]
    if path.is_file() and path.suffix not in (".pyc", ".png")
]
_NAMED_EXTRAS = re.compile(r"EXTRAS=(?:'([\w ]+)'|(\w+))|\.\[([\w,]+)\]|\bextras=([\w,]+)")


def wrong_hints(text: str) -> list[str]:
    """The hints in a text that install another project, or an extra that does not exist."""
    joined = re.sub(r"\"\s*\n\s*f?\"", "", text)  # a literal that continues on the next line
    strangers = re.findall(r"hpo\[[\w{}]+\]|pip install[^`\n]*[ '\"]hpo\b(?![/.\[])", joined)
    named = {
        extra for found in _NAMED_EXTRAS.findall(joined) for extra in re.findall(r"\w+", " ".join(found))
    }
    return strangers + sorted(named - EXTRAS)


def test_hints_name_an_extra_of_this_project() -> None:
    found = {str(path.relative_to(ROOT)): wrong_hints(path.read_text()) for path in TEXTS}
    assert len(found) > 200
    assert {file: wrong for file, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("Install it: pip install 'hpo[fp8]'.", ["hpo[fp8]"]),
        ("pip install --upgrade hpo", ["pip install --upgrade hpo"]),
        ('"Install it: pip install "\n    "\'hpo[onnx]\'."', ["hpo[onnx]"]),
        ("`make install EXTRAS=fp9`", ["fp9"]),
        ("make install EXTRAS='onnx fp9'", ["fp9"]),
        ("pip install -e '.[onnx,fp9]'", ["fp9"]),
        ("`make install EXTRAS='onnx fp8'`, or pip install -e '.[onnx]'", []),
    ],
)
def test_a_wrong_hint_is_found(text: str, wrong: list[str]) -> None:
    assert wrong_hints(text) == wrong


def test_the_function_takes_only_extras_of_this_project() -> None:
    assert set(get_args(Extra)) <= EXTRAS
    assert install_hint("fp8") == "To install it, run `make install EXTRAS=fp8` in your clone of hpo."


def test_the_distribution_has_a_name_of_its_own() -> None:
    """PyPI has another project named hpo. The import and the command keep that name."""
    assert PROJECT["name"] != "hpo"
    assert PROJECT["scripts"] == {"hpo": "hpo.__main__:main"}
