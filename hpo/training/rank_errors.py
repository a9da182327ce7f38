"""Errors of processes that train one model together: as one rank tells them to the others.

An error that all ranks know of is marked. Whatever is raised in its wake is the same on all of them, or
concerns one alone, so nobody is told of it; any other error is.
"""

from __future__ import annotations

import traceback
from typing import NamedTuple, TypeVar

import torch

from hpo import errors
from hpo.errors import HpoError, OutOfMemory, TrialEnd
from hpo.memory import is_out_of_memory

_E = TypeVar("_E", bound=Exception)


class RankError(Exception):
    """Another rank raised an exception that nobody meant to raise."""


class RankReport(NamedTuple):
    """What a rank raised, as the others get it."""

    kind: str
    """The class in `hpo.errors`; `memory`: an allocator's refusal that all may try again; else a bug."""
    message: str
    trace: str

    @classmethod
    def of(cls, error: Exception, *, ends_trial: bool) -> RankReport:
        kind = type(error).__name__ if isinstance(error, HpoError) else "bug"
        if is_out_of_memory(error):
            kind = OutOfMemory.__name__ if ends_trial else "memory"
        named = str(error) if isinstance(error, HpoError) else f"{type(error).__name__}: {error}"
        return cls(kind, named, "".join(traceback.format_exception(error)))

    def error(self, rank: int) -> Exception:
        if self.kind == "memory":
            return torch.OutOfMemoryError(f"rank {rank}: {self.message}")
        if self.kind == "bug":
            error: Exception = RankError(f"rank {rank} raised {self.message}")
            error.add_note(self.trace)
            return error
        found: type[HpoError] = getattr(errors, self.kind)
        return found(self.message if issubclass(found, TrialEnd) else f"rank {rank}: {self.message}")


def note_agreed(error: _E) -> _E:
    """Note on an error that all ranks know of it. Not the error itself, whose traceback holds activations."""
    vars(error)["hpo_agreed"] = True
    return error


def is_agreed(error: BaseException | None) -> bool:
    """Whether all ranks find their way out of it without a word: it, or what it was raised in the wake of."""
    while error is not None:
        if "hpo_agreed" in vars(error):
            return True
        error = error.__cause__ or error.__context__
    return False
