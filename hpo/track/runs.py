"""The runs of a study in a tracker: one for the study and one for each trial, made from its tables alone.

The key of a run is the same in any database, so another machine or a copy of the study finds the run again. A
paused and continued trial is one run. Anybody who can write to the database controls names and texts, so
control characters and names that MLflow refuses are replaced. Passwords and tokens are replaced too.

A setting has its name in the study file, such as `data.source`. A setting of `training` has its bare name,
so that `learning_rate` is one column, whether a study fixes or searches it.

TensorBoard and W&B have a folder for each run, with a note of the shown state. A folder with an outdated note
is written anew, because files do not show what a killed command left in them.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from hpo.config.definition import CHANGEABLE
from hpo.config.trial_settings import BUDGETS
from hpo.errors import printable, shorten
from hpo.json_safe import is_number
from hpo.outcome import Outcome
from hpo.redaction import HIDDEN, without_secrets
from hpo.report.formats import format_value
from hpo.report.trial_precision import observed_precision
from hpo.study.reading.study_record import StudyRecord, TrialRecord, best_trials, choosable_trials, is_over
from hpo.study.store.schema import EvaluationRow

_SECRET_NAME = re.compile(
    r"(?i)(?:password|passwd|passphrase|secret|(?:^|[._-])(?:pass|pwd|credentials?)|(?:^|\.)token|"
    r"(?:hf|api|access|auth|secret|private)[_-]?(?:key|token)s?|[_-](?:key|token))$"
)
_OTHER_NAME = re.compile(
    r"(?i)(?:^|[._-])(?:pad|cls|mask|sep|bos|eos|unk|text|label|sort|group|first|study)[_-](?:key|token|pass)$"
)
"""Names of other settings, such as those of a tokenizer."""

Status = Literal["running", "waiting", "finished", "stopped", "failed"]
MAX_NAME, MAX_TEXT = 200, 5000
"""MLflow's limits are 250 characters of a name, 6000 of a param and, in older versions, 5000 of a tag."""
_DEVICE = {"name": "device"} | {name: name for name in ("host", "torch", "transformers", "cuda", "rocm")}
"""Names of facts about the device. All others begin with `device.`."""
_MAY_BE_EMPTY = re.compile(r"best\..*|.*_(?:reason|observed|agrees|effective|support)")
"""Facts that may disappear from a run. In a tracker, an empty text then replaces their former values."""
NOTE = "hpo.json"


def is_secret(name: str) -> bool:
    """Return True if a setting of this name may hold a password or a token."""
    return bool(_SECRET_NAME.search(name)) and not _OTHER_NAME.search(name)


def without_secret_settings(content: Any) -> Any:
    """Return the content of a study file with `***` for the values of secret settings."""
    if isinstance(content, Mapping):
        return {
            name: HIDDEN if value and is_secret(name) else without_secret_settings(value)
            for name, value in content.items()
        }
    return [without_secret_settings(item) for item in content] if isinstance(content, list) else content


def is_changeable(name: str) -> bool:
    return any(f"{name}.".startswith(f"{key}.") for key in CHANGEABLE)


def study_settings(definition: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a study: distributions, named `search_space.NAME`, and fixed values."""
    space = section(definition, "search_space")
    settings = {f"search_space.{name}": distribution for name, distribution in space.items()}
    return settings | _fixed(definition, space)


def trial_settings(definition: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a trial: searched values, and fixed values that cannot change."""
    fixed = _fixed(definition, params).items()
    return {**params, **{name: value for name, value in fixed if name.partition(".")[0] not in CHANGEABLE}}


def _fixed(definition: Mapping[str, Any], searched: Mapping[str, Any]) -> dict[str, Any]:
    left_out = ("given", "name", "tags", "search_space", "training")
    fixed = _flat({key: value for key, value in definition.items() if key not in left_out})
    training = section(definition, "training")
    training |= section(training, "option")
    training.pop("option", None)
    if any(searched.get(budget) is not None for budget in BUDGETS):
        training = {name: value for name, value in training.items() if name not in BUDGETS}
    # These settings of `training` replace those of another section.
    for name, other in (("encoder", "model"), ("init_scale", "amp")):
        if name in searched or training.get(name) is not None:
            replaced = f"{other}.{name}."
            fixed = {key: value for key, value in fixed.items() if not f"{key}.".startswith(replaced)}
        else:
            training.pop(name, None)
    return {name: value for name, value in (_flat(training) | fixed).items() if name not in searched}


def section(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = content.get(name)
    return dict(value) if isinstance(value, Mapping) else {}


def _flat(content: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{above}{name}.")
        else:
            flat[f"{above}{name}"] = value
    return flat


@dataclass(frozen=True)
class Point:
    """One evaluation of a trial, or the state of a study."""

    step: int
    time: float  # seconds since 1970: start of the trial plus its training time
    metrics: Mapping[str, float]  # values by `task/metric`; the last metric is the `marker` of the run


@dataclass(frozen=True)
class Run:
    """Content of a run: a trial or a study."""

    key: str  # token of the study, and number of the trial or `study`
    name: str
    status: Status  # `waiting`: paused or preempted; `stopped`: by the pruner, a limit or a person
    started: float  # seconds since 1970, like `ended`
    ended: float | None
    params: Mapping[str, str | float]  # settings that cannot change, searched and fixed
    facts: Mapping[str, str]  # tags of the study, changeable settings, outcome, device and precisions
    points: Sequence[Point]
    results: Mapping[str, float]  # final values by `trial/NAME`; empty while the trial runs
    study: Run | None = None  # run of the trial's study; None: this is a study

    @property
    def marker(self) -> str:
        return "epoch" if self.study else "trials_ended"

    @property
    def digest(self) -> str:
        return digest_of(asdict(replace(self, study=None)))


def digest_of(content: Any) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def runs_of(record: StudyRecord, token: str) -> list[Run]:
    """Return a run for each started trial, in order. `token` identifies the study."""
    begun = [trial for trial in record.trials if trial.started is not None]
    if not begun:
        return []
    study = _study_run(record, token, begun)
    return [_trial_run(record, study, f"{token}-{trial.number}", trial) for trial in begun]


def _study_run(record: StudyRecord, token: str, begun: Sequence[TrialRecord]) -> Run:
    started = min(trial.started.timestamp() for trial in begun if trial.started)
    ends = [trial.ended.timestamp() for trial in begun if trial.ended]
    has_worker = any(worker.alive for worker in record.workers)
    status: Status = "running" if has_worker else "waiting"
    if is_over(record):
        status = "stopped" if record.state == "cancelled" else "finished"
    facts: dict[str, Any] = {"study": record.name, "state": record.state}
    facts |= {f"trials_{state}": count for state, count in record.counts.items()}
    metrics: dict[str, float] = {}
    for best in best_trials(record)[:1] if choosable_trials(record) else ():
        params = {**dict.fromkeys(section(record.definition, "search_space")), **best.params}
        facts |= {"best_trial": best.number, **{f"best.{name}": value for name, value in params.items()}}
        values = zip(record.metric_names, best.values or (), strict=False)
        metrics |= dict(named(_numbers(dict(values), "best/")))
    settings = study_settings(record.definition)
    return Run(
        key=f"{token}-study",
        name=f"study {record.name}",
        status=status,
        started=started,
        ended=max(ends, default=started) if status in ("finished", "stopped") else None,
        params=_params(settings),
        facts=_facts(record, settings, facts),
        points=[Point(len(ends), max(ends, default=started), {**metrics, "trials_ended": len(ends)})],
        results={},
    )


def _trial_run(record: StudyRecord, study: Run, key: str, trial: TrialRecord) -> Run:
    assert trial.started is not None
    started, status = trial.started.timestamp(), _status(trial)
    settings = trial_settings(record.definition, trial.params)
    facts = {"study": record.name, "trial": trial.number, **_trial_facts(trial, settings)}
    return Run(
        key=key,
        name=f"trial {trial.number}",
        status=status,
        started=started,
        ended=None if status in ("running", "waiting") or not trial.ended else trial.ended.timestamp(),
        params=_params(settings),
        facts=_facts(record, settings, facts),
        points=[_point(row, started) for row in trial.evaluations],
        results=dict(_results(record, trial)),
        study=study,
    )


def _status(trial: TrialRecord) -> Status:
    if trial.state == "COMPLETE":
        return "finished"
    if trial.state == "RUNNING":
        return "running" if trial.outcome == "running" else "waiting"
    return "stopped" if trial.outcome in (Outcome.PRUNED, Outcome.PREEMPTED) else "failed"


def _params(settings: Mapping[str, Any]) -> dict[str, str | float]:
    fixed = ((name, value) for name, value in settings.items() if not is_changeable(name))
    return {name: _value(name, value) for name, value in named(fixed)}


def _facts(record: StudyRecord, settings: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the study's tags, changeable settings and `facts`. A later one replaces one of the same name."""
    changeable = {name: value for name, value in settings.items() if is_changeable(name)}
    known = {**section(record.definition, "tags"), **changeable, **facts}
    kept = [item for item in known.items() if item[1] not in (None, "") or _MAY_BE_EMPTY.fullmatch(item[0])]
    return {name: "" if value is None else str(_value(name, value)) for name, value in named(kept)}


def _trial_facts(trial: TrialRecord, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the outcome, the device and the formats. A missing format is empty: no former one may stay."""
    telemetry = trial.telemetry
    device, precision = telemetry.get("device") or {}, telemetry.get("precision") or {}
    facts = {
        "outcome": trial.outcome,
        "outcome_reason": trial.reason,
        "compatibility": (telemetry.get("compatibility") or {}).get("verdict"),
        **{_DEVICE.get(name, f"device.{name}"): value for name, value in device.items()},
        **{f"environment.{name}": value for name, value in section(telemetry, "environment").items()},
    }
    for part in ("precision", "base_precision", "optimizer_state"):
        stored = telemetry.get(part) or {}
        if stored or part == "precision" or settings.get(part, "fp32") != "fp32":
            facts |= {
                f"{part}_{fact}": stored.get(fact) for fact in ("requested", "effective", "support", "reason")
            }
            facts |= {f"{part}_observed": stored.get("observed") or stored.get("dtypes")}
            facts |= {f"{part}_agrees": _agreement(stored)}
    if precision:
        facts["precision_observed"] = observed_precision(trial)
    in_fp32 = section(telemetry, "fp32_parts")
    facts |= {
        f"fp32_parts_{name}": in_fp32.get(name) for name in ("requested", "resolved", "reason", "by_part")
    }
    return facts


def _agreement(stored: Mapping[str, Any]) -> str | None:
    if not stored.get("observed"):
        return None
    return "unverified" if stored.get("agrees") is None else format_value(stored["agrees"])


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
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{above}{name}/")
        elif is_number(value):
            yield f"{above}{name}", float(value)


def named(items: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the items under unique names that every tracker accepts."""
    used: set[str] = set()
    for name, value in items:
        cleaned = re.sub(r"[^\w./\- :]", "_", _text(name))[:MAX_NAME]
        # MLflow refuses paths that are not normal: `a//b`, `./a`, `..a`.
        cleaned = "/".join(re.sub(r"^\.+", "_", part) or "_" for part in cleaned.split("/"))
        unique, count = cleaned, 1
        while unique in used:
            count += 1
            unique = f"{cleaned}_{count}"
        used.add(unique)
        yield unique, value


def _value(name: str, value: Any) -> str | float:
    if value and is_secret(name):
        return HIDDEN
    return value if is_number(value) else _text(format_value(value))


def _text(value: Any) -> str:
    return _sendable(str(value))


@lru_cache(10_000)  # the trials of a study share most of their texts
def _sendable(text: str) -> str:
    return shorten(without_secrets(printable(text.encode(errors="replace").decode())), MAX_TEXT)


def is_noted(folder: Path, run: Run) -> bool:
    return _note(folder / NOTE) == {"key": run.key, "digest": run.digest}


def note(folder: Path, run: Run) -> None:
    temporary = folder / f".{NOTE}"
    temporary.write_text(json.dumps({"key": run.key, "digest": run.digest}))
    temporary.replace(folder / NOTE)


def forget_other_studies(folder: Path, token: str) -> None:
    """Remove the runs of a deleted study of the same name, which had another token."""
    for path in folder.glob(f"*/{NOTE}"):
        if not str(_note(path).get("key")).startswith(f"{token}-"):
            shutil.rmtree(path.parent)


def _note(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
