"""The parts of a model that a precision needs in fp32, found by measuring sets of parts.

Errors of parts do not add: two parts may break only together, and one part may undo the error of another. So
each candidate set runs through the compatibility check of a trial, forward and backward on a batch of the
study's data. The search takes these steps, for n parts (embeddings, each layer, each head, others):

    1. Check no part and all parts in fp32. If all parts do not help, no set is searched.
    2. Check each part alone in the low precision, all others in fp32. Its error gives an order.
    3. From all parts in fp32, take groups back to the low precision, starting with the smallest errors. A
       group that breaks the check is halved, as in delta debugging (Zeller and Hildebrandt 2002).
    4. Replace a remaining part by the modules inside it, if the check stays good, and repeat 3 on these.

Steps 1 to 3 make at most 3 n + 1 checks; all four stop after `MAX_CHECKS`. Each remaining part is necessary:
without it, the check got worse. A smaller set of other parts may exist.

All checks are uncompiled. They are cached like those of trials, so an interrupted search continues. Its
result is cached too, for each kind of device.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpo.config.trial_settings import AUTO
from hpo.errors import Incompatible
from hpo.models.model_parts import inner_parts, smallest_named_parts
from hpo.trial.compat import Compatibility, CompatibilityCache, cache_key, check_compatibility
from hpo.trial.parts import TrialParts

MAX_CHECKS = 150
_logger = logging.getLogger(__name__)
_RANKS = {"ok": 0, "degraded": 1, "incompatible": 2}
Check = Callable[[Sequence[str]], Compatibility]
"""Checks the model with these parts in fp32."""


@dataclass(frozen=True)
class FoundParts:
    """The parts that `fp32_parts: auto` stands for on this kind of device."""

    parts: tuple[str, ...]
    before: str
    """The verdict without them."""
    after: str
    num_checks: int = 0
    reason: str = ""
    """The reason if no set of parts helps, or the search stopped early."""

    def telemetry(self) -> dict[str, Any]:
        """Return the record of a trial."""
        facts = {"verdict_without": self.before, "verdict": self.after, "reason": self.reason}
        return {"requested": AUTO, "resolved": self.parts, "num_checks": self.num_checks} | facts


def find_parts(
    parts: TrialParts, cache: CompatibilityCache | None, before_check: Callable[[], None] = lambda: None
) -> FoundParts:
    """Find the parts that the trial's precision needs in fp32 on this device.

    `before_check` runs before each check. An error of it ends the search. Raises Incompatible if the study
    makes no compatibility check.
    """
    precision = parts.resolution.precision
    if precision.autocast is None:
        return FoundParts((), "", "", reason=f"{precision.name} has no autocast, so no part needs fp32.")
    if precision.float8:
        return FoundParts((), "", "", reason="fp8 needs `compile`, and parts are checked uncompiled.")
    text = f"{cache_key(parts)}/{parts.study.compat.model_dump_json()}/{MAX_CHECKS}"
    key = hashlib.sha256(text.encode()).hexdigest()
    if cache and (known := cache.get_compat(key)):
        return FoundParts(**{**known, "parts": tuple(known["parts"])})
    check = check_of(parts, cache, before_check)
    names = smallest_named_parts(parts.model)
    result = search(CheckedSets(check), names, lambda part: inner_parts(parts.model, part))
    if cache and result.before in _RANKS:
        cache.put_compat(key, asdict(result))
    return result


def check_of(
    parts: TrialParts, cache: CompatibilityCache | None, before_check: Callable[[], None] = lambda: None
) -> Check:
    """Return the check of a trial's uncompiled model with parts in fp32."""
    if not parts.study.compat.enabled:
        raise Incompatible(
            "fp32_parts: the parts are found by the compatibility check, but compat.enabled is false. Set "
            "it to true, or name the parts."
        )
    plain = replace(parts, compile=None, config=parts.config.model_copy(update={"compile": "none"}))

    def check(names: Sequence[str]) -> Compatibility:
        before_check()
        return check_compatibility(plain.with_float32_parts(names), cache)

    return check


def search(sets: CheckedSets, parts: Sequence[str], inner: Callable[[str], Sequence[str]]) -> FoundParts:
    """Search the parts of a model. `inner` returns the parts inside one. See the docstring of this file."""
    before = sets.check(()).verdict
    if before not in _RANKS or before == "ok":  # without a reference there is nothing to compare with
        return FoundParts((), before, before, len(sets.checks))
    best = sets.check(parts)
    wanted = _RANKS.get(best.verdict, 3)
    if wanted >= _RANKS[before]:
        return FoundParts((), before, before, len(sets.checks), _no_help(best, len(parts)))
    _logger.info(
        "searching the parts that need fp32 among %d, in at most %d checks", len(parts), sets.max_checks
    )
    errors = {part: _error(sets.check([one for one in parts if one != part])) for part in parts}
    ordered = sorted(parts, key=lambda part: errors[part])
    needed = sets.without(ordered, ordered, wanted)
    queue = list(needed)
    while queue:
        part = queue.pop(0)
        inside = list(inner(part))
        finer = [*(one for one in needed if one != part), *inside]
        if inside and sets.is_good(finer, wanted):
            needed = sets.without(finer, inside, wanted)
            queue += [one for one in needed if one in inside]
    reason = ""
    if len(sets.checks) >= sets.max_checks:
        reason = f"the search stopped after {sets.max_checks} checks, so a part of these may not be needed."
    order = {part: number for number, part in enumerate(parts)}
    needed.sort(key=lambda part: (order.get(part, len(order)), part))
    return FoundParts(tuple(needed), before, best.verdict, len(sets.checks), reason)


def _error(check: Compatibility) -> float:
    """Return the largest error of logits or gradients; infinite if something is not finite."""
    measured = check.measurement
    if not measured.finite:
        return float("inf")
    gradients = 0.0 if measured.gradient_cosine is None else 1 - measured.gradient_cosine
    return max(gradients, *measured.logits_relative_error.values(), 0.0)


def _no_help(check: Compatibility, num_parts: int) -> str:
    return (
        f"no set of parts helps: with all {num_parts} parts in fp32 the check is {check.verdict} too "
        f"({' '.join(check.reasons)}). The fault lies outside the modules, or in all of them. Use another "
        "fp_precision."
    )


class CheckedSets:
    """Checks of sets of parts, each made once."""

    def __init__(self, check: Check, max_checks: int = MAX_CHECKS) -> None:
        self._check = check
        self.max_checks = max_checks
        self.checks: dict[frozenset[str], Compatibility] = {}

    def check(self, parts: Sequence[str]) -> Compatibility:
        key = frozenset(parts)
        if key not in self.checks:
            self.checks[key] = self._check(parts)
        return self.checks[key]

    def is_good(self, parts: Sequence[str], wanted: int) -> bool:
        """Return true if the verdict is at least the wanted one; false for a check beyond `max_checks`."""
        if frozenset(parts) not in self.checks and len(self.checks) >= self.max_checks:
            return False
        return _RANKS.get(self.check(parts).verdict, 3) <= wanted

    def without(self, kept: list[str], group: Sequence[str], wanted: int) -> list[str]:
        """Return `kept`, which is good, without the parts of `group` that it does not need."""
        rest = [part for part in kept if part not in group]
        if self.is_good(rest, wanted):
            return rest
        if len(group) == 1:
            return kept
        half = len(group) // 2
        return self.without(self.without(kept, group[:half], wanted), group[half:], wanted)
