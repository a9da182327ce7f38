"""Versions of installed packages, and the installation of missing ones."""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

Extra = Literal["adapters", "fp8", "mlflow", "nvml", "onnx", "optunahub", "tensorboard", "wandb"]


def installed_versions(*packages: str) -> dict[str, str]:
    """Return {package: version}, without packages that are missing or have another name (onnxruntime-gpu)."""
    versions: dict[str, str] = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def install_hint(extra: Extra) -> str:
    """Return a sentence with the command for an extra.

    It must not name the package `hpo`: PyPI has another project with this name.
    """
    return (
        f"To install it, run `make install EXTRAS={extra}` in your clone of hpo, or `pip install "
        f"'WHEEL[{extra}]'` with the path of its wheel."
    )
