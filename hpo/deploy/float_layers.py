"""Layers that have to stay in float so that a model in int8 is as good as in fp32: as few as a search finds.

Layers are ranked by the error that each alone causes when it is the only one in int8. The shortest beginning
of that order which mends the model, of 1, 2, 4 ... layers, is then reduced until none can be left out
(`hpo.trial.smallest_set`); another set may have fewer. Rows beside those of the report judge it here; the
report's rows confirm it later. Where int8 is as good on them without a layer in float, they cannot tell which
layer breaks it, and none is searched for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hpo.trial.smallest_set import Names, smallest_set

_logger = logging.getLogger("hpo.deploy")


@dataclass(frozen=True)
class SearchLimits:
    """When a search for layers ends with the best that it has."""

    tries: int = 60
    """Sets that are asked for, beside the ranking."""
    seconds: float = 600.0
    """Of the whole search; the ranking has half of it at most, and goes on in the next search."""


@dataclass(frozen=True)
class FloatLayers:
    """What a search has found."""

    names: Names
    num_quantizations: int
    """How many models in int8 it took."""
    is_smallest: bool
    """Whether it was shown that none of them can be left out; else a limit ended the search."""


@dataclass(frozen=True)
class NothingFound:
    """Why a search has found no layers."""

    reason: str
    """A whole sentence."""


class _Enough(Exception):
    """A limit of the search is reached; the message names it."""


class FloatLayersSearch:
    """Searches for float layers of one model, for one way to quantise it after another.

    `sizes` are the weights of each layer by its name.
    """

    def __init__(self, sizes: Mapping[str, int], limits: SearchLimits = SearchLimits()) -> None:
        self._sizes = sizes
        self._limits = limits
        self._errors: dict[str, float] = {}
        self._found: Names = ()

    def search(
        self, error_of: Callable[[str], float], is_ok: Callable[[Names], bool], *, tries: int | None = None
    ) -> FloatLayers | NothingFound:
        """Layers for which `is_ok`, and of which none can be left out, if no limit ends the search before.

        `error_of` is told a layer, and returns the error of a model in which it alone is int8; it is asked
        once for each layer, whatever the number of searches. What an earlier search has found is tried first.
        `tries` replaces that of the limits.
        """
        limits = replace(self._limits, tries=self._limits.tries if tries is None else tries)
        asked = _Asked(is_ok, limits, self._sizes)
        limit = ""
        try:
            if asked(()):
                return NothingFound(
                    "On the rows by which layers in float are found it is as good without any, so they "
                    "cannot tell which layers break it."
                )
            if self._found and asked(self._found):
                beginning = self._found
            else:
                beginning = self._shortest_beginning(self._ranked(error_of, asked), asked)
            singles = sorted(beginning, key=lambda name: self._sizes[name])
            found = smallest_set(beginning, singles, asked)
        except _Enough as reached:
            found, limit = asked.best, str(reached)
        if not 0 < len(found) < len(self._sizes):
            within = f" in {limit}" if limit else ""
            return NothingFound(f"No set of its layers in float was found{within} that mends it.")
        self._found = found
        return FloatLayers(found, asked.num_quantizations, is_smallest=not limit)

    def _ranked(self, error_of: Callable[[str], float], asked: _Asked) -> Names:
        """The layers by their errors, the largest first, as far as half of the time gave them one."""
        until = time.monotonic() + self._limits.seconds / 2
        for number, name in enumerate(self._sizes, 1):
            if name in self._errors:
                continue
            if time.monotonic() > until:
                _logger.info("ranked %d of %d layers in the time for it", len(self._errors), len(self._sizes))
                break
            self._errors[name] = error_of(name)
            asked.num_quantizations += 1
            _logger.info(
                "layer %d of %d alone in int8: %s %.2g", number, len(self._sizes), name, self._errors[name]
            )
        return tuple(sorted(self._errors, key=lambda name: -self._errors[name]))

    def _shortest_beginning(self, ranking: Names, asked: _Asked) -> Names:
        """That of `ranking`, or all layers, where no beginning mends it."""
        size = 1
        while size < len(ranking):
            if asked(ranking[:size]):
                return ranking[:size]
            size *= 2
        return ranking if asked(ranking) else tuple(self._sizes)


class _Asked:
    """Asks for each set once, within the limits, and keeps the best that was ok."""

    def __init__(
        self, is_ok: Callable[[Names], bool], limits: SearchLimits, sizes: Mapping[str, int]
    ) -> None:
        self._is_ok, self._limits, self._sizes = is_ok, limits, sizes
        self._answers: dict[frozenset[str], bool] = {}
        self._until = time.monotonic() + limits.seconds
        self.num_quantizations = 0
        self.best: Names = ()

    def check_time(self) -> None:
        if time.monotonic() > self._until:
            raise _Enough(f"{self._limits.seconds:g} s")

    def __call__(self, names: Sequence[str]) -> bool:
        key = frozenset(names)
        if len(key) == len(self._sizes):
            return True  # a model in fp32
        if key not in self._answers:
            if len(self._answers) >= self._limits.tries:
                raise _Enough(f"{self._limits.tries} tries")
            self.check_time()
            self._answers[key] = self._is_ok(tuple(names))
            self.num_quantizations += 1
            says = "is as good" if self._answers[key] else "is not"
            _logger.info("with %d of %d layers in float it %s", len(names), len(self._sizes), says)
            if self._answers[key] and not 0 < len(self.best) <= len(names):
                self.best = tuple(names)
        return self._answers[key]
