"""A study as tables for the report, the dashboard and the command line.

- A trial belongs to its *requested* precision. Its metric, speed and memory count only if that precision ran:
  requested = effective, and the observed dtypes agree.
- The speed of a trial that shared its device, with workers or other programs, does not count. Kinds of device
  are kept apart, in scores too: kernels round differently, and in equal time a faster device trains more.
- Wasted time is time in trials that ended as neither `complete` nor `pruned`.
"""

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import pandas as pd

from hpo.config.limits import violation
from hpo.device import DeviceInfo
from hpo.outcome import Outcome, concerns_precision
from hpo.precision.table import PRECISION, PRECISION_NAMES, support
from hpo.report.formats import MISSING, format_bytes, format_metric, format_number, format_percent
from hpo.report.terminal import Rows
from hpo.report.trial_precision import FORMATS, differing_formats, effective_note
from hpo.study.reading.study_record import (
    StudyRecord,
    TrialRecord,
    best_trials,
    complete_trials,
    device_kinds,
)

OUTCOMES = (*Outcome, "running", "waiting")  # order of outcomes in tables
ON = " on "  # separator of a precision and a kind of device
UNKNOWN = "unknown"
QUANTITIES = (
    "train_examples_per_second",
    "train_tokens_per_second",
    "train_joules_per_example",
    "peak_memory_bytes",
)
"""Quantities with a median in the table by precision."""
_TELEMETRY = {
    # column: path in a trial's telemetry
    "effective": "precision.effective",
    "support": "precision.support",
    "agrees": "precision.agrees",
    "disagreement": "precision.reason",
    "compatibility": "compatibility.verdict",
    "gradient_cosine": "compatibility.gradient_cosine",
    "shared": "device.shared",
    "busy": "device_time.busy",
    "train_examples_per_second": "throughput.train_examples_per_second",
    "train_tokens_per_second": "throughput.train_tokens_per_second",
    "train_joules_per_example": "throughput.train_joules_per_example",
    "evaluation_examples_per_second": "throughput.evaluation_examples_per_second",
    "peak_memory_bytes": "peak_memory_bytes",
    "device_utilization": "device_utilization",
    "skipped_steps": "scaler.skipped_steps",
    "fp32_fallbacks": "fp32_fallbacks",
    "num_steps": "num_steps",
    "fp32_parts": "fp32_parts.resolved",
    "base_precision": "base_precision.effective",
    "weights_bytes": "base_precision.observed.weights_bytes",
    "optimizer_state": "optimizer_state.effective",
    "state_bytes": "optimizer_state.bytes",
}
_NUMBERS = (
    *QUANTITIES,
    "gradient_cosine",
    "logits_error",
    "device_utilization",
    "skipped_steps",
    "fp32_fallbacks",
    "seconds",
)


class StudyTables:
    """The tables of one study, each made on first use and then kept. Do not change them."""

    def __init__(self, record: StudyRecord) -> None:
        self.record = record

    @cached_property
    def trials(self) -> pd.DataFrame:
        """One row per trial: outcome, precision facts, cost, `objective.<metric>`, `param.<name>`.

        `counts`: the trial ran its requested precision. `counts_for_speed`: its throughput may be compared.
        `device`: its kind.
        """
        trials, kinds = self.record.trials, device_kinds(self.record.trials)
        started = pd.to_datetime([trial.started for trial in trials], utc=True)
        ended = pd.to_datetime([trial.ended for trial in trials], utc=True)
        within = [None if t.values is None else not violation(t.constraints) for t in trials]
        facts = {
            name: [_look_up(trial.telemetry, path) for trial in trials] for name, path in _TELEMETRY.items()
        }
        columns: dict[str, Any] = {
            "number": [trial.number for trial in trials],
            "outcome": [trial.outcome for trial in trials],
            "reason": [trial.reason for trial in trials],
            "precision": [self._requested_precision(trial) for trial in trials],
            **facts,
            "device": pd.Series([kinds.get(trial.number) for trial in trials], dtype=object),
            "logits_error": [_largest_logits_error(trial) for trial in trials],
            "meets_limits": pd.Series(within, dtype=object),
            "counts": False,
            "counts_for_speed": False,
            "worker": [trial.attributes.get("worker", "") for trial in trials],
            "start_seconds": (started - started.min()).total_seconds(),
            "end_seconds": (ended - started.min()).total_seconds(),
            "seconds": [trial.active_seconds for trial in trials],
        }
        for index, metric in enumerate(self.record.metric_names):
            values = [trial.values[index] if trial.values else None for trial in trials]
            columns[objective_column(metric)] = values
        for name in dict.fromkeys(name for trial in trials for name in trial.params):
            columns[f"param.{name}"] = [trial.params.get(name) for trial in trials]
        table = pd.DataFrame(columns)
        for name in _NUMBERS:
            table[name] = pd.to_numeric(table[name])
        table.loc[table["outcome"].eq(Outcome.UNSUPPORTED), "support"] = "unsupported"
        table["disagreement"] = table["disagreement"].fillna("")
        table["shared"] = table["shared"].eq(True)
        table["counts"] = table["effective"].eq(table["precision"]) & table["agrees"].ne(False)
        measured = table["train_examples_per_second"].notna()
        table["counts_for_speed"] = table["counts"] & ~table["shared"] & measured
        return table

    @cached_property
    def search_space(self) -> Mapping[str, Mapping[str, Any]]:
        return self.record.definition.get("search_space") or {}

    def _requested_precision(self, trial: TrialRecord) -> str:
        """Return the precision; empty for a trial that has not drawn it."""
        return (
            _look_up(trial.telemetry, "precision.requested")
            or trial.params.get(PRECISION)
            or _look_up(self.record.definition, f"training.{PRECISION}")
            or ("" if PRECISION in self.search_space else "auto")
        )

    @cached_property
    def devices(self) -> list[str]:
        return sorted(self.trials["device"].dropna().unique())

    @cached_property
    def formats(self) -> dict[str, pd.Series]:
        """Requested formats that differ between trials, each a column of `trials`."""
        columns = differing_formats(self.record.trials, self.record.definition).items()
        return {
            name: pd.Series(values, self.trials.index, dtype=object, name=name) for name, values in columns
        }

    def groups(self, rows: pd.DataFrame) -> pd.Series:
        """Return the group of each row of `trials`: precision, differing formats, and device if several."""
        groups = rows["precision"]
        for column in self.formats.values():
            groups = groups + ", " + column[rows.index]
        return groups if len(self.devices) < 2 else groups + ON + rows["device"].fillna(UNKNOWN)

    @cached_property
    def complete(self) -> pd.DataFrame:
        numbers = [trial.number for trial in complete_trials(self.record)]
        return self.trials[self.trials["number"].isin(numbers)]

    @cached_property
    def best(self) -> list[TrialRecord]:
        """The best complete trial; with several objectives the Pareto front. May be empty."""
        return best_trials(self.record)

    @cached_property
    def undrawn(self) -> dict[str, str]:
        """Precisions of the search space without a trial, each with the reason if no device can run it."""
        devices = [device for trial in self.record.trials if (device := trial.telemetry.get("device"))]
        choices = _look_up(self.record.definition, f"search_space.{PRECISION}.choices") if devices else None
        allow_emulated = bool(_look_up(self.record.definition, "amp.allow_emulated"))
        undrawn = {}
        for name in sorted(set(choices or ()) - set(self.trials["precision"]), key=precision_order):
            reasons = {_lacking(name, device, allow_emulated) for device in devices}
            undrawn[name] = "" if "" in reasons else " ".join(sorted(reasons))
        return undrawn

    @cached_property
    def by_precision(self) -> pd.DataFrame:
        """One row per requested precision, combination of other formats, and device, as far as trials differ.

        Trials that ended for a reason not caused by a precision are in no row. Columns:

        - `precision`, each of `formats`, `device`, `trials`, a count for each outcome, `fell_back`
        - `support`: native, emulated or unsupported. A choice without a trial is `not tried`, or `not run
          here` if no device of the study can run it.
        - `best_<metric>`: over the complete trials that count and meet the study's limits
        - `measured`: trials with a speed that counts; median of each of `QUANTITIES`
        - `skipped_steps`, `fp32_fallbacks`: sums
        - `seconds`, `wasted_seconds`, `share_of_time` (0 to 1 of the study's)

        Missing numbers are NaN.
        """
        is_one_device = len(self.devices) < 2
        device = "".join(self.devices) if is_one_device else self.trials["device"].fillna(UNKNOWN)
        concerned = [
            trial.state != "WAITING" and concerns_precision(trial.outcome, trial.telemetry)
            for trial in self.record.trials  # a waiting trial has no precision yet
        ]
        trials = self.trials.assign(device=device).loc[concerned]
        empty = self._summary(trials.iloc[:0])
        formats = (column[trials.index] for column in self.formats.values())
        keys = [trials["precision"], *formats, trials["device"]]
        names = [str(key.name) for key in keys]
        rows = []
        for values, group in trials.groupby(keys):
            key = dict(zip(names, values, strict=True))
            records = [self.record.trials[index] for index in group.index]
            for name in self.formats:
                key[name] += effective_note(records, name, key[name])
            rows.append({**key, **self._summary(group)})
        for precision, reason in self.undrawn.items():
            key = {**dict.fromkeys(names, ""), "device": "".join(self.devices) if is_one_device else ""}
            support = "not run here" if reason else "not tried"
            rows.append({**key, "precision": precision, **empty, "support": support})
        rows.sort(key=lambda row: (precision_order(row["precision"]), *(row[name] for name in names[1:])))
        return pd.DataFrame(rows, columns=[*names, *empty])

    def _summary(self, group: pd.DataFrame) -> dict[str, Any]:
        counted = group[group["counts"]]
        complete = counted[counted["outcome"].eq(Outcome.COMPLETE)]
        trained = counted[counted["train_examples_per_second"].notna()]
        for_speed = counted[counted["counts_for_speed"]]
        row: dict[str, Any] = {
            "support": ", ".join(sorted(group["support"].dropna().unique())),
            "trials": len(group),
            **{str(outcome): int(group["outcome"].eq(outcome).sum()) for outcome in OUTCOMES},
            "fell_back": int(fell_back(group).sum()),
        }
        for metric, direction in zip(self.record.metric_names, self.record.directions, strict=True):
            values = pd.to_numeric(complete[objective_column(metric)])
            met = values[complete["meets_limits"].eq(True)]
            row[f"best_{metric}"] = met.max() if direction == "maximize" else met.min()
        row["measured"] = len(for_speed)
        for quantity in QUANTITIES:
            values = (trained if quantity == "peak_memory_bytes" else for_speed)[quantity]
            row[f"{quantity}_median"] = values.median()
        row |= {name: int(counted[name].sum()) for name in ("skipped_steps", "fp32_fallbacks")}
        wasted = group["outcome"].isin([outcome for outcome in Outcome if outcome.wasted])
        row["seconds"] = float(group["seconds"].sum())
        row["wasted_seconds"] = float(group["seconds"][wasted].sum())
        row["share_of_time"] = row["seconds"] / (self.trials["seconds"].sum() or math.nan)
        return row

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        """One row per evaluation of a trial; a metric of a task is in the column `<task>/<metric>`."""
        rows = [
            {"number": trial.number, "precision": precision}
            | {name: value for name, value in vars(row).items() if name != "metrics"}
            | dict(row.metrics)
            for trial, precision in zip(self.record.trials, self.trials["precision"], strict=True)
            for row in trial.evaluations
        ]
        return (
            pd.json_normalize(rows, sep="/")
            if rows
            else pd.DataFrame(columns=["number", "precision", "step", "epoch"])
        )


def precision_table(tables: StudyTables) -> Rows:
    summary = tables.by_precision
    has_devices = summary["device"].nunique() > 1
    has_energy = summary["train_joules_per_example_median"].notna().any()
    rows = []
    for row in summary.to_dict("records"):
        outcomes = [f"{row[name]} {name}" for name in OUTCOMES if row[name]]
        outcomes += [f"{row['fell_back']} fell back"] if row["fell_back"] else []
        cells = {"precision": row["precision"]}
        cells |= {name.replace("_", " "): row[name] for name in tables.formats}
        cells |= {"device": row["device"]} if has_devices else {}
        cells |= {"support": row["support"] or MISSING, "outcomes": ", ".join(outcomes)}
        for metric in tables.record.metric_names:
            cells[f"{metric}, best"] = format_metric(metric, row[f"best_{metric}"])
        cells["examples/s"] = format_number(row["train_examples_per_second_median"])
        if has_energy:
            cells["joules/example"] = format_number(row["train_joules_per_example_median"])
        cells["memory"] = format_bytes(row["peak_memory_bytes_median"])
        if not has_devices:
            cells["share of time"] = format_percent(row["share_of_time"])
        rows.append(cells)
    return rows


def objective_column(metric: str) -> str:
    """Return the column of an objective; a measured quantity may have its bare name."""
    return f"objective.{metric}"


def fell_back(trials: pd.DataFrame) -> pd.Series:
    return trials["effective"].notna() & trials["effective"].ne(trials["precision"])


def differing_settings(trials: pd.DataFrame) -> list[str]:
    """Return the searched settings with several values in these rows, without precision, seed and formats."""
    names = [name for name in searched_parameters(trials) if name not in ("seed", *FORMATS)]
    return sorted(name for name in names if trials[f"param.{name}"].nunique(dropna=False) > 1)


def searched_parameters(trials: pd.DataFrame) -> list[str]:
    names = (column.removeprefix("param.") for column in trials if column.startswith("param."))
    return [name for name in names if name != PRECISION]


def precision_order(precision: str) -> tuple[int, str]:
    """Sort key: the order of the table of precisions, then unknown names."""
    is_known = precision in PRECISION_NAMES
    return (PRECISION_NAMES.index(precision) if is_known else len(PRECISION_NAMES), precision)


def group_order(label: str) -> tuple[tuple[int, str], str]:
    return precision_order(label.partition(ON)[0].partition(", ")[0]), label


def _lacking(name: str, facts: Mapping[str, Any], allow_emulated: bool) -> str:
    supported = support(name, DeviceInfo.from_facts(facts))
    runs = supported.level == "native" or (supported.level == "emulated" and allow_emulated)
    return "" if runs else supported.reason


def _largest_logits_error(trial: TrialRecord) -> float | None:
    errors = _look_up(trial.telemetry, "compatibility.logits_relative_error") or {}
    return max(errors.values(), default=None)


def _look_up(values: Mapping[str, Any], path: str) -> Any:
    value: Any = values
    for name in path.split("."):
        value = (value or {}).get(name)
    return value
