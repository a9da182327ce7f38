"""The fewest layers that have to stay in float so that a model in int8 is as good as in fp32.

Layers are ranked by the error that each alone causes when it is the only one in int8. The shortest beginning
of that order which mends the model, of 1, 2, 4 ... layers, is then reduced as far as it can be
(`hpo.trial.smallest_set`). A few hundred texts judge it here; the test split confirms it later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpo.trial.smallest_set import Names, smallest_set

_logger = logging.getLogger("hpo.deploy")


@dataclass(frozen=True)
class SearchLimits:
    """When a search for layers ends with the best that it has."""

    tries: int = 60
    """Sets that are asked for, beside the ranking."""
    seconds: float = 600.0
    """Of the whole search."""


@dataclass(frozen=True)
class FloatLayers:
    """What a search has found."""

    names: Names
    num_quantizations: int
    """How many models in int8 it took."""
    is_smallest: bool
    """Whether it was shown that none of them can be left out; else a limit ended the search."""


class _Enough(Exception):
    """A limit of the search is reached."""


class FloatLayersSearch:
    """Searches for float layers of one model, for one way to quantise it after another.

    `sizes` are the weights of each layer by its name.
    """

    def __init__(self, sizes: Mapping[str, int], limits: SearchLimits = SearchLimits()) -> None:
        self._sizes = sizes
        self._limits = limits
        self._ranking: Names = ()
        self._found: Names = ()

    def search(self, error_of: Callable[[str], float], is_ok: Callable[[Names], bool]) -> FloatLayers | None:
        """The fewest layers for which `is_ok`; None where all of them are needed, or none were found in time.

        `error_of` is told a layer, and returns the error of a model in which it alone is int8; it is asked in
        the first search alone. What an earlier search has found is tried first.
        """
        asked = _Asked(is_ok, self._limits, self._sizes)
        try:
            if self._found and asked(self._found):
                beginning = self._found
            else:
                self._rank(error_of, asked)
                beginning = self._shortest_beginning(asked)
            singles = sorted(beginning, key=lambda name: self._sizes[name])
            found, is_smallest = smallest_set(beginning, singles, asked), True
        except _Enough:
            found, is_smallest = asked.best, False
        if not 0 < len(found) < len(self._sizes):
            return None
        self._found = found
        return FloatLayers(found, asked.num_quantizations, is_smallest)

    def _rank(self, error_of: Callable[[str], float], asked: _Asked) -> None:
        if self._ranking:
            return
        errors = {}
        for number, name in enumerate(self._sizes, 1):
            asked.check_time()
            errors[name] = error_of(name)
            asked.num_quantizations += 1
            _logger.info(
                "layer %d of %d alone in int8: %s %.2g", number, len(self._sizes), name, errors[name]
            )
        self._ranking = tuple(sorted(errors, key=lambda name: -errors[name]))

    def _shortest_beginning(self, asked: _Asked) -> Names:
        size = 1
        while size < len(self._ranking):
            if asked(self._ranking[:size]):
                return self._ranking[:size]
            size *= 2
        return self._ranking


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
            raise _Enough

    def __call__(self, names: Sequence[str]) -> bool:
        key = frozenset(names)
        if len(key) == len(self._sizes):
            return True  # a model in fp32
        if key not in self._answers:
            if len(self._answers) >= self._limits.tries:
                raise _Enough
            self.check_time()
            self._answers[key] = self._is_ok(tuple(names))
            self.num_quantizations += 1
            says = "is as good" if self._answers[key] else "is not"
            _logger.info("with %d of %d layers in float it %s", len(names), len(self._sizes), says)
            if self._answers[key] and not 0 < len(self.best) <= len(names):
                self.best = tuple(names)
        return self._answers[key]
