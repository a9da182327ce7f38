"""Versions of the packages that a record is made with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_versions(*packages: str) -> dict[str, str]:
    """By package; one that is missing, or has another name (onnxruntime-gpu), is left out."""
    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
