"""Installation hints name the extras of this project, and pins make an installation repeatable."""

import tomllib
from importlib.metadata import PackageNotFoundError, distribution, version
from itertools import chain
from pathlib import Path
from typing import get_args

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hpo.versions import Extra

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


LINES = chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
REQUIRED = [Requirement(line) for line in LINES]
CONSTRAINTS = (ROOT / "docker" / "constraints.txt").read_text().splitlines()
PINNED = [Requirement(line) for line in CONSTRAINTS if line and not line.startswith("#")]
PINS = {canonicalize_name(one.name): str(one.specifier).removeprefix("==") for one in PINNED}


def test_hints_name_extras_of_this_project() -> None:
    assert set(get_args(Extra)) <= PROJECT["optional-dependencies"].keys()


def requirements_of(name: str, extras: frozenset[str]) -> list[Requirement]:
    """Requirements of an installed package on Linux with any Python that the project supports.

    The list is empty for a package that is not installed.
    """
    try:
        lines = distribution(name).requires or ()
    except PackageNotFoundError:
        return []
    pythons = [{"python_version": one, "python_full_version": f"{one}.0"} for one in ("3.11", "3.12", "3.13")]
    environments = [{"extra": extra, **python} for extra in (*extras, "") for python in pythons]
    requirements = map(Requirement, lines)
    return [one for one in requirements if not one.marker or any(map(one.marker.evaluate, environments))]


def installed_with(name: str, extras: frozenset[str], seen: dict[str, str]) -> dict[str, str]:
    """{package: version} of a package and all that it requires here, as far as it is installed."""
    try:
        seen[canonicalize_name(name)] = version(name).partition("+")[0]
    except PackageNotFoundError:
        return seen
    if canonicalize_name(name) == "torch":  # which pins the packages of its CUDA build itself
        return seen
    for requirement in requirements_of(name, extras):
        if canonicalize_name(requirement.name) not in seen:
            installed_with(requirement.name, frozenset(requirement.extras), seen)
    return seen


def test_every_installed_package_is_pinned() -> None:
    installed = installed_with(PROJECT["name"], frozenset({"dev", "bench"}), {})
    assert len(installed) > 50, "the name of the distribution has changed: run `make install` again"
    del installed[PROJECT["name"]]
    assert installed == {name: PINS.get(name) for name in installed}


BAD_RELEASES = {
    "lightning": ("2.6.2", "2.6.3"),  # malware, removed from PyPI
    "filelock": ("3.15.0", "3.15.2"),  # yanked: "broken release", "breaks virtualenv"
    "pandas": ("3.0.4",),  # yanked: "Reported segfaults with datetime-related functionality"
}


def test_no_requirement_admits_a_bad_release() -> None:
    assert {one.name for one in REQUIRED} >= set(BAD_RELEASES)
    for one in REQUIRED:
        assert not [*one.specifier.filter(BAD_RELEASES.get(one.name, ()))], one


def test_pyproject_admits_every_pin() -> None:
    for one in REQUIRED:
        assert one.specifier.contains(PINS[canonicalize_name(one.name)]), one
