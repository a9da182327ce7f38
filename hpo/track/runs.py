"""The runs that a tracker shows: one for each trial, made from the study's tables alone.

The key of a run is the same in any database, so another machine or a copy of the study finds it again. A
trial that paused and continues is one run. Anybody who can write to the database decides on names and texts,
so control characters, and in names what MLflow refuses, are replaced.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hpo.errors import printable, shorten
from hpo.json_safe import is_number
from hpo.outcome import Outcome
from hpo.report.formats import format_value, observed_precision, stored_precisions
from hpo.study.reading.study_record import EvaluationRow, StudyRecord, TrialRecord

Status = Literal["running", "waiting", "finished", "stopped", "failed"]
MAX_NAME, MAX_TEXT = 200, 2000


@dataclass(frozen=True)
class Point:
    """One evaluation."""

    step: int
    time: float
    """Seconds since 1970: the start of the trial and what it had trained."""
    metrics: Mapping[str, float]
    """As `task/metric`; `epoch` is the last."""


@dataclass(frozen=True)
class Run:
    """A trial as it is shown."""

    key: str
    """The token of the study and the number of the trial that started: letters, digits and `-`."""
    name: str
    status: Status
    """`waiting`: it is paused or preempted; `stopped`: by the pruner, a limit or a person."""
    started: float
    """Seconds since 1970, as `ended`."""
    ended: float | None
    params: Mapping[str, str | float]
    facts: Mapping[str, str]
    """Outcome, device, and its precisions as requested and effective, the reason, and what was observed."""
    points: Sequence[Point]
    results: Mapping[str, float]
    """Of the whole trial, each as `trial/NAME`; empty while it runs."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(asdict(self)).encode()).hexdigest()[:16]


def runs_of(record: StudyRecord, token: str) -> list[Run]:
    """The runs of a study whose token this is, in the order of their trials."""
    begun = [trial for trial in record.trials if trial.started is not None]  # the others wait
    return [_run(record, f"{token}-{trial.number}", trial) for trial in begun]


def is_over(record: StudyRecord) -> bool:
    return record.state == "cancelled" or record.counts["done"] == sum(record.counts.values())


def _run(record: StudyRecord, key: str, trial: TrialRecord) -> Run:
    assert trial.started is not None
    started, status = trial.started.timestamp(), _status(trial)
    params = {name: _value(value) for name, value in named(trial.params.items())}
    return Run(
        key=key,
        name=f"trial {trial.number}",
        status=status,
        started=started,
        ended=None if status in ("running", "waiting") or not trial.ended else trial.ended.timestamp(),
        params=params,
        facts={"study": record.name, "trial": str(trial.number), **_facts(trial)},
        points=[_point(row, started) for row in trial.evaluations],
        results=dict(_results(record, trial)),
    )


def _status(trial: TrialRecord) -> Status:
    if trial.state == "COMPLETE":
        return "finished"
    if trial.state == "RUNNING":
        return "running" if trial.outcome == "running" else "waiting"
    return "stopped" if trial.outcome in (Outcome.PRUNED, Outcome.PREEMPTED) else "failed"


def _facts(trial: TrialRecord) -> dict[str, str]:
    precision, device = trial.telemetry.get("precision") or {}, trial.telemetry.get("device") or {}
    facts = {
        "outcome": trial.outcome,
        "outcome_reason": trial.reason,
        "precision_requested": precision.get("requested"),
        "precision_effective": precision.get("effective"),
        "precision_observed": observed_precision(trial) if precision else None,
        "precision_agrees": _agreement(precision),
        "precision_reason": precision.get("reason"),
        "compatibility": (trial.telemetry.get("compatibility") or {}).get("verdict"),
        "device": device.get("name"),
        "host": device.get("host"),
        "torch": device.get("torch"),
    }
    for name, stored in stored_precisions(trial).items():
        facts |= {f"{name}_{fact}": stored.get(fact) for fact in ("requested", "effective", "reason")}
    # An empty reason replaces that of a pause.
    return {name: _text(value) for name, value in facts.items() if value or name == "outcome_reason"}


def _agreement(precision: Mapping[str, Any]) -> str | None:
    if not precision.get("observed"):
        return None
    return "unverified" if precision.get("agrees") is None else format_value(precision["agrees"])


def _point(row: EvaluationRow, started: float) -> Point:
    rates = {name: getattr(row, name) for name in ("train_examples_per_second", "train_tokens_per_second")}
    known = {**row.metrics, **rates, "epoch": row.epoch}
    return Point(row.step, started + row.seconds, dict(named(_numbers(known))))


def _results(record: StudyRecord, trial: TrialRecord) -> Iterator[tuple[str, float]]:
    if trial.ended is None:
        return iter(())
    telemetry = trial.telemetry
    values = dict(zip(record.metric_names, trial.values or (), strict=False))
    measured = {
        name: telemetry.get(name) for name in ("peak_memory_bytes", "train_seconds", "fp32_fallbacks")
    }
    known = {**measured, **(telemetry.get("throughput") or {}), **values}
    known["test"] = telemetry.get("test_metrics") or {}
    return named((f"trial/{name}", value) for name, value in _numbers(known))


def _numbers(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers among nested values, as `outer/inner`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{above}{name}/")
        elif is_number(value):
            yield f"{above}{name}", float(value)


def named(items: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The items by names that every tracker takes, each another one; in their order."""
    taken: set[str] = set()
    for name, value in items:
        cleaned = re.sub(r"[^\w./\- :]", "_", _text(name))[:MAX_NAME]
        # MLflow refuses what would be another path: `a//b`, `./a`, `..a`.
        cleaned = "/".join(re.sub(r"^\.+", "_", part) or "_" for part in cleaned.split("/"))
        again = (f"{cleaned}_{count}" for count in range(2, len(taken) + 3))
        unique = cleaned if cleaned not in taken else next(one for one in again if one not in taken)
        taken.add(unique)
        yield unique, value


def _value(value: Any) -> str | float:
    return value if is_number(value) else _text(format_value(value))


def _text(value: Any) -> str:
    """`value` as text that can be sent and shown: half a surrogate pair cannot."""
    return shorten(printable(str(value).encode(errors="replace").decode()), MAX_TEXT)
