"""The formats of a trial's numbers, other than its precision: how weights, moments and products are kept.

Statistics by precision put together only trials with the same formats as they were requested. A format that
was requested and did not run is named beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpo.config.trial_settings import AUTO, TrialSettings
from hpo.precision.table import PRECISION

if TYPE_CHECKING:
    from hpo.study.reading.study_record import TrialRecord

PARTS = "fp32_parts"
FORMATS = ("adapter", "base_precision", "optimizer_state", PARTS, "attention", "compile")
"""The settings, other than `fp_precision`, that change how numbers are stored or computed."""

_FULL = ("fp32", "tf32")
"""The precisions in which all parts compute in fp32 anyway."""

ABSENT = "–"
"""Stands for a setting that does nothing in a trial."""


@dataclass(frozen=True)
class Formats:
    """The formats of a study's trials."""

    columns: Mapping[str, Sequence[str]]
    """The requested value for each trial, by setting, where trials differ."""
    shared: Mapping[str, str]
    """The values that all trials have. A default that is not searched is left out."""

    def text(self) -> str:
        """Name the values that all trials have."""
        values = ", ".join(f"{name}={value}" for name, value in self.shared.items())
        return f"All trials have {values}." if values else ""


def study_formats(trials: Sequence[TrialRecord], definition: Mapping[str, Any]) -> Formats:
    """Return the formats of these trials."""
    of_trials = [formats_of(trial, definition) for trial in trials]
    columns: dict[str, Sequence[str]] = {}
    shared: dict[str, str] = {}
    for name in FORMATS:
        values = [formats[name] for formats in of_trials]
        usual = {ABSENT} if name in (definition.get("search_space") or {}) else {ABSENT, _default(name)}
        if {*values} <= usual:
            continue
        if len({*values}) > 1:
            columns[name] = values
        else:
            shared[name] = values[0]
    return Formats(columns, shared)


def formats_of(trial: TrialRecord, definition: Mapping[str, Any]) -> dict[str, str]:
    """Return the requested value of each of `FORMATS`; `ABSENT` where it does nothing."""
    given = {**(definition.get("training") or {}), **trial.params}
    values = {name: _text(given[name]) if name in given else _default(name) for name in FORMATS}
    if ((trial.telemetry.get("precision") or {}).get("requested") or given.get(PRECISION)) in _FULL:
        values[PARTS] = ABSENT
    if values["adapter"] == _default("adapter"):
        values["base_precision"] = ABSENT
    return values


def _default(name: str) -> str:
    return _text(TrialSettings.model_fields[name].default)


def ran_otherwise(trials: Iterable[TrialRecord], name: str, requested: str) -> str:
    """Return `, ran as fp32` if that ran in some of these trials in place of the requested format."""
    ran = sorted({format_that_ran(trial, name) for trial in trials} - {"", requested})
    if not ran or requested == ABSENT:
        return ""
    return f"{': ' if requested == AUTO else ', ran as '}{' or '.join(ran)}"


def unusual_formats(trial: TrialRecord, definition: Mapping[str, Any]) -> dict[str, str]:
    """Return the formats of a trial that are no defaults. Parts in fp32 are named with its precision."""
    values = formats_of(trial, definition).items()
    return {name: value for name, value in values if value not in (ABSENT, _default(name)) and name != PARTS}


def format_that_ran(trial: TrialRecord, name: str) -> str:
    """Return the value of a format that ran; empty if it is not known or has no record."""
    facts = trial.telemetry.get(name)
    if not isinstance(facts, Mapping):
        return ""
    return _text(facts["resolved"]) if name == PARTS else str(facts.get("effective") or "")


def precision_that_ran(trial: TrialRecord) -> str:
    """`bf16, fp32 in heads`; empty if it is not known."""
    effective = (trial.telemetry.get("precision") or {}).get("effective") or ""
    parts = format_that_ran(trial, PARTS)
    has_parts = effective not in ("", *_FULL) and parts not in ("", "none")
    return f"{effective}, {'bf16' if effective == 'fp8' else 'fp32'} in {parts}" if has_parts else effective


def _text(value: Any) -> str:
    """A value in words: a list of parts by its names."""
    if isinstance(value, str) and value.startswith("["):
        with suppress(ValueError):  # a name of the user's own code
            value = json.loads(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return ABSENT if value is None else str(value)
