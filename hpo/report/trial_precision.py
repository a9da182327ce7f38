"""The precision of a trial, and the other formats of its numbers: weights, moments, parts in fp32.

Statistics by precision group only trials with the same requested formats. If another format ran, it is named
beside the requested one.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hpo.config.trial_settings import AUTO, TrialSettings
from hpo.precision.table import PRECISION
from hpo.report.formats import MISSING
from hpo.study.reading.study_record import TrialRecord

PARTS = "fp32_parts"
FORMATS = ("adapter", "base_precision", "optimizer_state", PARTS, "attention", "compile")
"""Settings, other than `fp_precision`, of how numbers are stored or computed."""

_FULL = ("fp32", "tf32")  # precisions with all parts in fp32 anyway


def differing_formats(
    trials: Sequence[TrialRecord], definition: Mapping[str, Any]
) -> dict[str, Sequence[str]]:
    columns = _unusual_columns(trials, definition).items()
    return {name: values for name, values in columns if len({*values}) > 1}


def shared_formats(trials: Sequence[TrialRecord], definition: Mapping[str, Any]) -> str:
    """Name the formats that all trials request; empty if there are only defaults."""
    columns = _unusual_columns(trials, definition).items()
    shared = [(name, values[0]) for name, values in columns if len({*values}) == 1]
    texts = [f"{name}={value}{effective_note(trials, name, value)}" for name, value in shared]
    return f"All trials have {', '.join(texts)}." if texts else ""


def _unusual_columns(
    trials: Sequence[TrialRecord], definition: Mapping[str, Any]
) -> dict[str, Sequence[str]]:
    formats = [trial_formats(trial, definition) for trial in trials]
    columns = {name: [one[name] for one in formats] for name in FORMATS}
    space = definition.get("search_space") or {}
    usual = {name: {MISSING} if name in space else {MISSING, _default(name)} for name in FORMATS}
    return {name: values for name, values in columns.items() if not {*values} <= usual[name]}


def trial_formats(trial: TrialRecord, definition: Mapping[str, Any]) -> dict[str, str]:
    """Return the requested value of each of `FORMATS`; `MISSING` if it has no effect in the trial."""
    given = {**(definition.get("training") or {}), **trial.params}
    values = {name: _text(given[name]) if name in given else _default(name) for name in FORMATS}
    if (_precision(trial).get("requested") or given.get(PRECISION)) in _FULL:
        values[PARTS] = MISSING
    if values["adapter"] == _default("adapter"):
        values["base_precision"] = MISSING
    return values


def unusual_formats(trial: TrialRecord, definition: Mapping[str, Any]) -> dict[str, str]:
    """Return the formats of a trial other than defaults. Parts in fp32 are named with its precision."""
    return {
        name: value + effective_note([trial], name, value)
        for name, value in trial_formats(trial, definition).items()
        if value not in (MISSING, _default(name)) and name != PARTS
    }


def effective_note(trials: Iterable[TrialRecord], name: str, requested: str) -> str:
    """Return `, ran as fp32` if some of these trials ran that in place of the requested format."""
    effective = sorted({_effective_format(trial, name) for trial in trials} - {"", requested})
    if not effective or requested == MISSING:
        return ""
    return f"{': ' if requested == AUTO else ', ran as '}{' or '.join(effective)}"


def effective_precision(trial: TrialRecord) -> str:
    """`bf16, fp32 in heads`; empty if unknown."""
    effective = _precision(trial).get("effective") or ""
    parts = _effective_format(trial, PARTS)
    has_parts = effective not in ("", *_FULL) and parts not in ("", "none")
    return f"{effective}, {'bf16' if effective == 'fp8' else 'fp32'} in {parts}" if has_parts else effective


def precision_facts(trial: TrialRecord) -> str:
    """Describe the requested, effective and observed precision, and whether they agree."""
    precision = _precision(trial)
    if not precision:
        return "Nothing about its precision is stored."
    verdict = {
        True: "as requested",
        False: "this is NOT the requested precision",
        None: "the precision is unverified",
    }[precision.get("agrees") if precision.get("observed") else None]
    facts = (
        f"requested {precision['requested']}, ran {effective_precision(trial) or 'nothing'} "
        f"({precision['support']}), observed: {observed_precision(trial)}; {verdict}{_reason(precision)}."
    )
    for name in ("base_precision", "optimizer_state"):
        stored = trial.telemetry.get(name) or {}
        if stored.get("requested", "fp32") != "fp32" or stored.get("effective") not in ("fp32", None):
            verdict = "; this is NOT what was requested" if stored.get("agrees") is False else ""
            ran = stored["effective"] or "unknown"
            facts += f" {name}: requested {stored['requested']}, ran {ran}{verdict}{_reason(stored)}."
    return facts


def observed_precision(trial: TrialRecord) -> str:
    """The formats in which weights were multiplied, TF32 and compilation; or `nothing`."""
    observed = _precision(trial).get("observed") or {}
    if not observed:
        return "nothing"
    products = dict(observed.get("linear_products", {}))
    unmeasured = products.pop("unmeasured", 0)
    seen = [f"products of {count} weight matrices in {name}" for name, count in products.items()]
    seen += [f"{unmeasured} weights not measured"] if unmeasured else []
    seen += [f"{count} float8 layers"] if (count := observed.get("float8_linears")) else []
    seen.append("TF32 on" if observed["tf32"] else "TF32 off")
    seen.append("compiled" if observed["compiled"] else "not compiled")
    return ", ".join(seen)


def _precision(trial: TrialRecord) -> Mapping[str, Any]:
    return trial.telemetry.get("precision") or {}


def _reason(facts: Mapping[str, Any]) -> str:
    return f" ({facts['reason'].rstrip('.')})" if facts.get("reason") else ""


def _effective_format(trial: TrialRecord, name: str) -> str:
    facts = trial.telemetry.get(name)
    if not isinstance(facts, Mapping):
        return ""
    return _text(facts["resolved"]) if name == PARTS else str(facts.get("effective") or "")


def _default(name: str) -> str:
    return _text(TrialSettings.model_fields[name].default)


def _text(value: Any) -> str:
    if isinstance(value, str) and value.startswith("["):
        with suppress(ValueError):  # a name of the user's own code
            value = json.loads(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return MISSING if value is None else str(value)
