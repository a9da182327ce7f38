"""Versions of the packages that a record is made with."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version


def installed_versions(*packages: str) -> dict[str, str]:
    """By package; one that is missing, or has another name (onnxruntime-gpu), is left out."""
    versions: dict[str, str] = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
