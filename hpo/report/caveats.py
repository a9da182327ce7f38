"""Limits of the conclusions from a study, each with its remedy."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pandas as pd

from hpo.config.limits import MEASURED_METRICS
from hpo.outcome import Outcome
from hpo.report.best_screens import constant_warnings, split_warnings
from hpo.report.formats import format_percent, plural
from hpo.report.tables import ON, UNKNOWN, StudyTables, differing_settings, fell_back, precision_order
from hpo.study.reading.study_record import (
    StudyRecord,
    busy_devices,
    complete_trials,
    lost_updates,
    lost_weights,
    unverified_precisions,
)

LOW_UTILIZATION = 0.8
"""Largest share of busy time with advice on settings to raise. A busier GPU may still have much to spare:
see `hpo.device.Utilization`."""


class Notice(NamedTuple):
    text: str
    advice: str


def caveats(tables: StudyTables) -> list[Notice]:
    """Return the notices of this study, most serious first."""
    record = tables.record
    measure_again = "Measure it again on texts that were not used to choose the model."
    return [
        *_precision_caveats(tables.trials),
        *(Notice(*pair) for pair in lost_updates(record)),
        *(Notice(*pair) for pair in (*unverified_precisions(record), *lost_weights(record))),
        *(Notice(text, measure_again) for text in split_warnings(record)),
        *(Notice(text, "The model may have learned nothing.") for text in constant_warnings(record)),
        *_undrawn_caveats(tables.undrawn),
        *_speed_caveats(tables),
        *_lost_text(record),
        *_comparison_caveats(tables),
    ]


def _precision_caveats(trials: pd.DataFrame) -> Iterator[Notice]:
    invalid = trials[trials["outcome"].eq(Outcome.INVALID)]
    if len(invalid):
        yield Notice(
            f"Invalid: {_trials(invalid)}. {' '.join(invalid['reason'].unique())}",
            "They say nothing about a precision. Correct the model, the data or the metric.",
        )
    disagree = trials[trials["agrees"].eq(False) & trials["effective"].eq(trials["precision"])]
    if len(disagree):
        reasons = "; ".join(sorted({reason.rstrip(".") for reason in disagree["disagreement"]} - {""}))
        yield Notice(
            f"{_trials(disagree)}: the precision observed is not the one requested "
            f"({reasons or 'no reason is stored'}).",
            "They are not in the statistics by precision. Run `hpo verify` on that machine.",
        )
    others = trials[fell_back(trials)]
    if len(others):
        pairs = others["precision"] + " ran as " + others["effective"]
        yield Notice(
            f"{_trials(others)} fell back ({', '.join(sorted(pairs.unique()))}).",
            "They are in the statistics of neither precision. "
            "With `amp.on_unsupported: prune` such a trial ends at once instead.",
        )
    emulated = trials[trials["support"].eq("emulated") & trials["effective"].notna()]
    if len(emulated):
        yield Notice(
            f"Emulated, because the device has no instructions for it: {_on_devices(emulated)}.",
            "Its speed here says nothing about a device with such instructions. "
            "Leave `amp.allow_emulated` off where time matters.",
        )
    degraded = trials[trials["compatibility"].eq("degraded")]
    if len(degraded):
        yield Notice(
            f"{_trials(degraded)}: larger errors than usual against fp32 in the compatibility check "
            f"({_on_devices(degraded)}).",
            "Look at `compatibility` in the trial's telemetry before trusting a small difference in metric.",
        )


def _undrawn_caveats(undrawn: dict[str, str]) -> Iterator[Notice]:
    if lacking := {name: reason for name, reason in undrawn.items() if reason}:
        yield Notice(
            f"Not run here: {_names(lacking)}. {' '.join(dict.fromkeys(lacking.values()))}",
            "This study has no result for it. Start a worker on a device that supports it.",
        )
    if untried := undrawn.keys() - lacking.keys():
        yield Notice(
            f"No trial tried {_names(untried)}.", "This study has no result for it. Raise `n_trials`."
        )


def _speed_caveats(tables: StudyTables) -> Iterator[Notice]:
    trials, devices = tables.trials, tables.devices
    yield from (Notice(*pair) for pair in busy_devices(tables.record))
    quiet = trials[trials["busy"].ne(True)]
    shared = quiet[quiet["shared"]]
    if len(shared):
        yield Notice(
            f"{_trials(shared)} shared a device with other work.",
            "They are not in the comparisons of speed. Use one worker per device to measure speed.",
        )
    if len(devices) > 1:
        yield Notice(
            f"The study ran on {len(devices)} kinds of device ({', '.join(devices)}).",
            "Compare scores, speed and memory only within one kind: each kind has rows of its own.",
        )
        for metric in [name for name in tables.record.metric_names if name in MEASURED_METRICS]:
            yield Notice(
                f"The objective `{metric}` was measured on {len(devices)} kinds of device.",
                "The best trial may be best because of its device. Search on one kind of device.",
            )
    for device in devices:
        utilization = quiet["device_utilization"][quiet["device"].eq(device)].dropna()
        if utilization.median() < LOW_UTILIZATION:
            busy = f"{format_percent(utilization.median())} of the time"
            yield Notice(
                f"{device} was busy {busy} (median of {plural(len(utilization), 'trial')}).",
                "Raise `batch_size` (or `micro_batch_size`), or run more workers per device. On a GPU, NVML "
                "counts any running kernel as busy, so its real use may be lower.",
            )


def _lost_text(record: StudyRecord) -> Iterator[Notice]:
    losses = []
    for trial in record.trials:
        if data := trial.telemetry.get("data"):
            num_lost = sum(data["num_lost_spans"].values())
            losses += [(num_lost, data["num_cut_examples"], trial.number, data)]
    losses = [one for one in losses if one[0] or one[1]]
    if not losses:
        return
    # Trials may differ in max_length: the notice describes the one that lost most.
    _, num_cut, number, data = max(losses, key=lambda one: one[:3])
    has_windows = record.definition["data"].get("long_text") == "window"
    remedy = "`data.stride` for shorter spans" if has_windows else "set `data.long_text: window`"
    lost = {task: num for task, num in sorted(data["num_lost_spans"].items()) if num}
    spans = "".join(f", {num:,} true spans of {task} lost" for task, num in lost.items())
    yield Notice(
        f"Training text was lost at `max_length` in {plural(len(losses), 'trial')}; most in trial {number}: "
        f"{num_cut:,} of {data['num_examples']:,} texts cut{spans}.",
        f"Nothing is learned from it. Raise `max_length`, or {remedy}.",
    )


def _comparison_caveats(tables: StudyTables) -> Iterator[Notice]:
    complete = complete_trials(tables.record)
    if not complete:
        yield Notice("No trial is complete.", "Nothing can be concluded from this study yet.")
        return
    without_seed = [{**trial.params, "seed": None} for trial in complete]
    different = {json.dumps(params, sort_keys=True, default=str) for params in without_seed}
    if len(different) == len(complete) and not tables.record.comparisons:
        yield Notice(
            f"Each of the {len(complete)} complete configurations was trained with one seed only.",
            "Small differences may be chance. `hpo compare` trains the best ones on new seeds, under each "
            "precision.",
        )
    counted = tables.complete[tables.complete["counts"]]
    settings = differing_settings(counted)
    tried = {
        frozenset(map(tuple, group[[f"param.{name}" for name in settings]].astype(str).to_numpy()))
        for _, group in counted.groupby(tables.groups(counted))
    }
    if len(tried) > 1:
        yield Notice(
            f"The precision table compares different configurations (settings: {', '.join(settings)}).",
            "It shows the search's result under each precision, not the effect of precision alone.",
        )


def _trials(trials: pd.DataFrame) -> str:
    numbers = [str(number) for number in trials["number"]]
    shown = ", ".join(numbers[:8]) + (" ..." if len(numbers) > 8 else "")
    return f"{plural(len(numbers), 'trial')} (number {shown})"


def _on_devices(trials: pd.DataFrame) -> str:
    """`bf16 on Tesla T4, fp8 on Example CPU`."""
    pairs = trials["precision"] + ON + trials["device"].fillna(UNKNOWN)
    return ", ".join(sorted(pairs.unique()))


def _names(values: Iterable[Any]) -> str:
    return ", ".join(sorted(set(map(str, values)), key=precision_order))
