"""Installing is repeatable: the constraints pin every package that an installation brings."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
NAME = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
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
    installed = installed_with(NAME, frozenset({"dev", "bench"}), {})
    assert len(installed) > 50
    del installed[NAME]
    assert installed == {name: PINS.get(name) for name in installed}
