"""Precision by part on this machine, before a search: `hpo verify --parts`.

For each low precision that runs here, each part of the model is measured alone in it, with all others in
fp32: its errors and overflow. The pass of a micro-batch is timed with each part alone in fp32, with the rest
in the low precision: the time and memory that the part saves. The errors give the parts that the check needs
in fp32 (`hpo.trial.part_search`). The times give the parts that are faster in fp32, and the set of all of
these is measured again, because times of parts do not add either.

Nothing is trained and nothing stored.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from hpo.errors import TrialEnd
from hpo.models.model_parts import inner_parts, smallest_named_parts
from hpo.precision.effective import some
from hpo.precision.table import PRECISION, PRECISIONS, Support, support
from hpo.trial.compat import Compatibility
from hpo.trial.costs import Costs, costs_of_parts
from hpo.trial.executor import Executor
from hpo.trial.part_search import Check, CheckedSets, FoundParts, PartError, check_of, own_errors, search
from hpo.trial.parts import TrialParts, build_trial

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PartCheck:
    """One part in a low precision."""

    own: PartError
    costs: Costs | None
    """With the part in fp32, against all parts in the low precision. None: not measured."""


@dataclass(frozen=True)
class PartsCheck:
    """The parts of a study's model in one precision on this machine."""

    precision: str
    support: Support
    parts: tuple[PartCheck, ...] = ()
    found: FoundParts | None = None
    """The parts that the check needs in fp32. None: not measured; `note` says why."""
    fastest: tuple[str, ...] = ()
    """The parts in fp32 of the fastest set whose check is as good as that of `found`; (): none."""
    costs: Costs | None = None
    """Those of `fastest`, against no part in fp32."""
    note: str = ""


def verify_parts(executor: Executor, repeats: int) -> list[PartsCheck]:
    """Measure the parts in bf16 and fp16, if this device may run them in a trial of the study."""
    checks = []
    for name, precision in PRECISIONS.items():
        supported = support(name, executor.device)
        if precision.autocast is None or precision.float8:  # which is compiled
            continue
        try:
            params = {PRECISION: name, "fp32_parts": ()}
            resolved = executor.resolved.with_amp(on_unsupported="prune")
            parts = build_trial(resolved, params, executor.loader)
            checks.append(_verify(parts, supported, repeats))
        except TrialEnd as error:
            checks.append(PartsCheck(name, supported, note=str(error)))
    return checks


def _verify(parts: TrialParts, supported: Support, repeats: int) -> PartsCheck:
    names = smallest_named_parts(parts.model)
    measure = check_of(parts, None)

    def check(of: Sequence[str]) -> Compatibility:
        _logger.info("checking %s with fp32 in %s", parts.resolution.effective, some(of) or "no part")
        return measure(of)

    sets = CheckedSets(check)
    found = search(sets, names, lambda part: inner_parts(parts.model, part))
    errors = own_errors(sets.check, names)
    _logger.info("timing each of %d parts in fp32, %d times", len(names), repeats)
    costs = costs_of_parts(parts, [(name,) for name in names], repeats) or {}
    checks = tuple(PartCheck(one, costs.get((one.part,))) for one in errors)
    fastest, of_fastest = _fastest(parts, sets.check, found, checks, repeats)
    return PartsCheck(
        parts.resolution.effective, supported, checks, found, fastest, of_fastest, supported.reason
    )


def _fastest(
    parts: TrialParts, check: Check, found: FoundParts, checks: Sequence[PartCheck], repeats: int
) -> tuple[tuple[str, ...], Costs | None]:
    """The fastest of three sets, and its costs: `found`, those faster in fp32, and these together."""
    faster = [one.own.part for one in checks if one.costs and one.costs.least_speed_ratio > 1]
    sets = dict.fromkeys([found.parts, tuple(faster), tuple(dict.fromkeys([*found.parts, *faster]))])
    good = [names for names in sets if check(names).verdict == found.after]
    costs = costs_of_parts(parts, good, repeats) or {}
    fastest = max(good, key=lambda names: costs[names].speed_ratio if costs else 0.0)
    sure = costs and costs[fastest].least_speed_ratio > 1
    chosen = fastest if sure else found.parts
    return chosen, costs.get(chosen)
