"""Installing is repeatable: the constraints pin every package that an installation brings."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, distribution, version
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIRED = [
    Requirement(line) for line in chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
]
CONSTRAINTS = ROOT / "docker" / "constraints.txt"
PINS = {
    canonicalize_name(requirement.name): str(requirement.specifier).removeprefix("==")
    for line in CONSTRAINTS.read_text().splitlines()
    if line and not line.startswith("#")
    for requirement in [Requirement(line)]
}


def installed_with(name: str, extras: frozenset[str], seen: dict[str, str]) -> dict[str, str]:
    """{package: version} of a package and all that it requires here, as far as it is installed."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return seen
    seen[canonicalize_name(name)] = version(name).partition("+")[0]
    if canonicalize_name(name) == "torch":  # which pins the packages of its CUDA build itself
        return seen
    for line in found.requires or ():
        requirement = Requirement(line)
        environments = [{"extra": extra} for extra in (*extras, "")]
        wanted = requirement.marker is None or any(map(requirement.marker.evaluate, environments))
        if wanted and canonicalize_name(requirement.name) not in seen:
            installed_with(requirement.name, frozenset(requirement.extras), seen)
    return seen


def test_everything_that_is_installed_is_pinned() -> None:
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
    admitted = {
        f"{one.name}=={release}"
        for one in REQUIRED
        for release in BAD_RELEASES.get(one.name, ())
        if one.specifier.contains(release)
    }
    assert {one.name for one in REQUIRED} >= set(BAD_RELEASES)
    assert admitted == set()


def test_every_pin_is_a_release_that_pyproject_admits() -> None:
    for one in REQUIRED:
        assert one.specifier.contains(PINS[canonicalize_name(one.name)]), one
