"""Hyperparameter search for multitask transformer encoders with numeric precision as a searched dimension."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpo.inference.model import load as load

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`hpo.load`, imported when it is asked for: it needs PyTorch, and `hpo --help` must not."""
    if name == "load":
        from hpo.inference.model import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
