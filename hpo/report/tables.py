"""A study as tables, which the report, the dashboard and the command line read.

- A trial belongs to the precision that was *requested*. Its metric, speed and memory count only when that
  precision is what ran: requested = effective, and the observed dtypes agree.
- The speed of a trial that shared its device does not count. Kinds of device are kept apart, in scores too:
  kernels round differently, and in equal time (`max_seconds`) a faster device trains more.
- Wasted time is time in trials that ended as neither `complete` nor `pruned`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pandas as pd

from hpo.config.limits import violation
from hpo.device import DeviceInfo
from hpo.outcome import Outcome, concerns_precision
from hpo.precision.table import PRECISION, PRECISION_NAMES, support
from hpo.report.formats import BASELINE, format_bytes, format_metric, format_number
from hpo.report.number_formats import FORMATS, Formats, ran_otherwise, study_formats
from hpo.study.reading.study_record import best_trials, complete_trials, device_kinds

if TYPE_CHECKING:
    from hpo.study.reading.study_record import StudyRecord, TrialRecord

OUTCOMES = (*Outcome, "running", "waiting")
"""In the order of tables and charts."""

ON = " on "
"""Between a precision and a kind of device."""

QUANTITIES = (
    "train_examples_per_second",
    "train_tokens_per_second",
    "train_joules_per_example",
    "peak_memory_bytes",
)
"""The table by precision has their medians."""

_TELEMETRY = {
    # column: where a trial's telemetry has it
    "effective": "precision.effective",
    "support": "precision.support",
    "agrees": "precision.agrees",
    "disagreement": "precision.reason",
    "compatibility": "compatibility.verdict",
    "gradient_cosine": "compatibility.gradient_cosine",
    "shared": "device.shared",
    "train_examples_per_second": "throughput.train_examples_per_second",
    "train_tokens_per_second": "throughput.train_tokens_per_second",
    "train_joules_per_example": "throughput.train_joules_per_example",
    "evaluation_examples_per_second": "throughput.evaluation_examples_per_second",
    "peak_memory_bytes": "peak_memory_bytes",
    "device_utilization": "device_utilization",
    "skipped_steps": "scaler.skipped_steps",
    "fp32_fallbacks": "fp32_fallbacks",
    "num_steps": "num_steps",
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
    """The tables of one study, each made when it is first read and then kept. Do not change them."""

    def __init__(self, record: StudyRecord) -> None:
        self.record = record

    @cached_property
    def trials(self) -> pd.DataFrame:
        """One row per trial: outcome, precision facts, cost, `objective.<metric>`, `param.<name>`.

        `meets_limits` is known of complete trials. `counts` says whether the trial stands for its requested
        precision, `counts_for_speed` whether its throughput may be compared, `device` its kind.
        `start_seconds` and `end_seconds` are relative to the study's first trial.
        """
        trials, kinds = self.record.trials, device_kinds(self.record.trials)
        started = pd.to_datetime([trial.started for trial in trials], utc=True)
        ended = pd.to_datetime([trial.ended for trial in trials], utc=True)
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
            "meets_limits": pd.Series(
                [None if t.values is None else not violation(t.constraints) for t in trials], dtype=object
            ),
            "counts": False,
            "counts_for_speed": False,
            "worker": [trial.attributes.get("worker", "") for trial in trials],
            "start_seconds": (started - started.min()).total_seconds(),
            "end_seconds": (ended - started.min()).total_seconds(),
            "seconds": [trial.active_seconds for trial in trials],
        }
        for index, metric in enumerate(self.record.metric_names):
            column = [trial.values[index] if trial.values else None for trial in trials]
            columns[objective_column(metric)] = column
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

    def _requested_precision(self, trial: TrialRecord) -> str:
        return (
            _look_up(trial.telemetry, "precision.requested")
            or trial.params.get(PRECISION)
            or _look_up(self.record.definition, f"training.{PRECISION}")
            or "auto"
        )

    @cached_property
    def devices(self) -> list[str]:
        return sorted(self.trials["device"].dropna().unique())

    @cached_property
    def formats(self) -> Formats:
        """The formats of the trials' numbers, beside their precision."""
        return study_formats(self.record.trials, self.record.definition)

    @cached_property
    def format_columns(self) -> list[pd.Series]:
        """The requested formats in which trials differ, each a column of `trials`."""
        columns = self.formats.columns.items()
        return [pd.Series(values, self.trials.index, dtype=object, name=name) for name, values in columns]

    def groups(self, rows: pd.DataFrame) -> pd.Series:
        """Return the group of each row of `trials`: precision, formats that differ and, if there are several
        kinds, its device: `bf16, lora on Tesla T4`."""
        groups = rows["precision"]
        for column in self.format_columns:
            groups = groups + ", " + column[rows.index]
        return groups if len(self.devices) < 2 else groups + ON + rows["device"].fillna("not known")

    @cached_property
    def complete(self) -> pd.DataFrame:
        """The rows of `trials` that were trained and evaluated, each with finite values."""
        numbers = [trial.number for trial in complete_trials(self.record)]
        return self.trials[self.trials["number"].isin(numbers)]

    @cached_property
    def best(self) -> list[TrialRecord]:
        """The best complete trial; with several objectives the Pareto front. Maybe none."""
        return best_trials(self.record)

    @cached_property
    def undrawn(self) -> dict[str, str]:
        """The study's choices of precision that no trial asked for, each with the reason why no device that
        worked on the study can run it. The reason is empty where one can, or where that is not known."""
        devices = [device for trial in self.record.trials if (device := trial.telemetry.get("device"))]
        choices = _look_up(self.record.definition, f"search_space.{PRECISION}.choices") if devices else None
        allow_emulated = bool(_look_up(self.record.definition, "amp.allow_emulated"))
        undrawn = {}
        for name in sorted(set(choices or ()) - set(self.trials["precision"]), key=precision_order):
            reasons = {_why_not(name, device, allow_emulated) for device in devices}
            undrawn[name] = "" if "" in reasons else " ".join(sorted(reasons))
        return undrawn

    @cached_property
    def by_precision(self) -> pd.DataFrame:
        """One row per requested precision, per combination of other formats if trials differ in them, and
        per device if the study ran on several.

        Trials that ended for a reason that no precision has caused are in no row.

        Columns:

        - `precision`, each of `formats.columns`, `device`, `trials`, a count for each outcome, `fell_back`
        - `support`: native, emulated or unsupported. A choice that no trial of the study had is `not tried`,
          or `not run here` if no device of the study can run it.
        - `best_<metric>`: over the complete trials that count and meet the study's limits
        - `measured`: trials whose speed and memory count; median of each of `QUANTITIES`
        - `skipped_steps`, `fp32_fallbacks`: sums
        - `seconds`, `wasted_seconds`, `share_of_time` (0 to 1 of the study's)

        Missing numbers are NaN.
        """
        devices, several = self.devices, len(self.devices) > 1
        device = self.trials["device"].fillna("not known") if several else "".join(devices)
        concerned = [
            trial.state != "WAITING" and concerns_precision(trial.outcome, trial.telemetry)
            for trial in self.record.trials  # a trial that waits has no precision yet
        ]
        trials = self.trials.assign(device=device).loc[concerned]
        nothing = self.summary(trials.iloc[:0])
        formats = (column[trials.index] for column in self.format_columns)
        keys = [trials["precision"], *formats, trials["device"]]
        names = [str(key.name) for key in keys]
        rows = []
        for values, group in trials.groupby(keys):
            named = dict(zip(names, values, strict=True))
            records = [self.record.trials[index] for index in group.index]
            for name in self.formats.columns:
                named[name] += ran_otherwise(records, name, named[name])
            rows.append({**named, **self.summary(group)})
        for precision, reason in self.undrawn.items():
            named = {**dict.fromkeys(names, ""), "device": "" if several else "".join(devices)}
            support = "not run here" if reason else "not tried"
            rows.append({**named, "precision": precision, **nothing, "support": support})
        rows.sort(key=lambda row: (precision_order(row["precision"]), *(row[name] for name in names[1:])))
        return pd.DataFrame(rows, columns=[*names, *nothing])

    def summary(self, group: pd.DataFrame) -> dict[str, Any]:
        """The columns of `by_precision` after the first two, over these rows of `trials`."""
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
        """One row per evaluation of a trial: trial, precision, step, epoch, seconds, speed, every metric.

        A metric of a task is in the column `<task>/<metric>`.
        """
        rows = [
            {"number": trial.number, "precision": precision}
            | {name: value for name, value in vars(row).items() if name != "metrics"}
            | dict(_flat(row.metrics))
            for trial, precision in zip(self.record.trials, self.trials["precision"], strict=True)
            for row in trial.evaluations
        ]
        return pd.DataFrame(rows) if rows else pd.DataFrame(columns=["number", "precision", "step", "epoch"])


def objective_column(metric: str) -> str:
    """The column of an objective's values: its name alone may be that of a measured quantity."""
    return f"objective.{metric}"


def _look_up(values: Mapping[str, Any], path: str) -> Any:
    """`values["a"]["b"]` for the path `a.b`; None where that is missing."""
    value: Any = values
    for name in path.split("."):
        value = (value or {}).get(name)
    return value


def _flat(metrics: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The metrics with those of a task as `task/metric`."""
    for name, value in metrics.items():
        if isinstance(value, dict):
            for inner, of in _flat(value):
                yield f"{name}/{inner}", of
        else:
            yield name, value


def fell_back(trials: pd.DataFrame) -> pd.Series:
    return trials["effective"].notna() & trials["effective"].ne(trials["precision"])


def differing_settings(trials: pd.DataFrame) -> list[str]:
    """The searched settings that have several values in these rows of `trials`.

    Precision, seed and the formats of numbers are left out: the formats have rows of their own.
    """
    names = [name for name in searched_parameters(trials) if name not in ("seed", *FORMATS)]
    return sorted(name for name in names if trials[f"param.{name}"].nunique(dropna=False) > 1)


def searched_parameters(trials: pd.DataFrame) -> list[str]:
    """The parameters, but the precision, that have a column `param.<name>`."""
    names = (column.removeprefix("param.") for column in trials if column.startswith("param."))
    return [name for name in names if name != PRECISION]


def _why_not(name: str, facts: Mapping[str, Any], allow_emulated: bool) -> str:
    """Why a device, as a trial's telemetry describes it, cannot run the precision; empty if it may."""
    supported = support(name, DeviceInfo.from_facts(facts))
    runs = supported.level == "native" or (supported.level == "emulated" and allow_emulated)
    return "" if runs else supported.reason


def task_metrics_text(telemetry: Mapping[str, Any]) -> pd.DataFrame:
    """The metrics of a trial on validation and the best constant predictions, for people."""
    baseline = telemetry.get("baseline") or {}
    rows = [
        (task, metric, format_number(value), format_number(baseline.get(f"{task}/{metric}")))
        for task, values in (telemetry.get("metrics") or {}).items()
        for metric, value in values.items()
    ]
    return pd.DataFrame(rows, columns=["task", "metric", "value", BASELINE])


def source_metrics_text(telemetry: Mapping[str, Any]) -> pd.DataFrame:
    """The metrics of each source of the data, for people; no rows where no task is of several sources."""
    sources = telemetry.get("source_metrics") or {}
    return pd.DataFrame(
        {"task": task, "source": source, "metric": metric, "value": format_number(value)}
        for source, of_source in sources.items()
        for task, metrics in of_source.items()
        for metric, value in metrics.items()
    )


def group_order(label: str) -> tuple[tuple[int, str], str]:
    """Sorts what `StudyTables.groups` gives as the table of precisions."""
    return precision_order(label.partition(ON)[0].partition(", ")[0]), label


def _largest_logits_error(trial: TrialRecord) -> float | None:
    errors = _look_up(trial.telemetry, "compatibility.logits_relative_error") or {}
    return max(errors.values(), default=None)


def precision_order(precision: str) -> tuple[int, str]:
    """Sorts precisions as in the table of precisions, unknown names last."""
    known = precision in PRECISION_NAMES
    return (PRECISION_NAMES.index(precision) if known else len(PRECISION_NAMES), precision)


def brief_summary(tables: StudyTables) -> pd.DataFrame:
    """`StudyTables.by_precision` as text for people."""
    summary = tables.by_precision
    several_devices = summary["device"].nunique() > 1
    rows = []
    for row in summary.to_dict("records"):
        cells = {"precision": row["precision"]}
        cells |= {name.replace("_", " "): row[name] for name in tables.formats.columns}
        cells |= {"device": row["device"]} if several_devices else {}
        cells["support"] = row["support"] or "–"
        outcomes = [f"{row[name]} {name}" for name in OUTCOMES if row[name]]
        outcomes += [f"{row['fell_back']} fell back"] if row["fell_back"] else []
        cells["outcomes"] = ", ".join(outcomes)
        for metric in tables.record.metric_names:
            cells[f"{metric}, best"] = format_metric(metric, row[f"best_{metric}"])
        cells["examples/s"] = format_number(row["train_examples_per_second_median"])
        if summary["train_joules_per_example_median"].notna().any():
            cells["joules/example"] = format_number(row["train_joules_per_example_median"])
        cells["memory"] = format_bytes(row["peak_memory_bytes_median"])
        if not several_devices:
            cells["share of time"] = _percent(row["share_of_time"])
        rows.append(cells)
    return pd.DataFrame(rows)


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{share:.1%}"
