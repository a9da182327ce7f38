"""What limits the conclusions that a study allows, and what can be done about it.

Everything here follows from what the trials stored about themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from hpo.report.tables import precision_order, trials_table
from hpo.study.study_record import complete_trials

if TYPE_CHECKING:
    from hpo.study.study_record import StudyRecord

LOW_UTILIZATION = 0.8
"""Under this share of busy time a device could do more: the report says what to raise."""


@dataclass(frozen=True)
class Notice:
    """Something a reader must know before drawing conclusions, and what can be done about it."""

    text: str
    advice: str


def caveats(record: StudyRecord) -> list[Notice]:
    """What limits the conclusions of this study, most serious first, each with what to do about it."""
    trials = trials_table(record)
    found: list[Notice] = []

    def add(text: str, advice: str) -> None:
        found.append(Notice(text, advice))

    disagree = trials[trials["agrees"].eq(False) & trials["effective"].eq(trials["precision"])]
    if len(disagree):
        reasons = "; ".join(sorted({reason.rstrip(".") for reason in disagree["disagreement"]} - {""}))
        reasons = reasons or "no reason is stored"
        add(
            f"{_trials(disagree)}: the precision observed is not the one requested ({reasons}).",
            "Left out of the statistics by precision. Run `hpo verify` on that machine.",
        )
    fell_back = trials[trials["effective"].notna() & trials["effective"].ne(trials["precision"])]
    if len(fell_back):
        pairs = fell_back["precision"] + " ran as " + fell_back["effective"]
        add(
            f"{_trials(fell_back)} fell back ({', '.join(sorted(pairs.unique()))}).",
            "Left out of the statistics of both precisions. "
            "With `amp.on_unsupported: prune` such a trial ends at once instead.",
        )
    emulated = trials[trials["support"].eq("emulated") & trials["effective"].notna()]
    if len(emulated):
        add(
            f"{_names(emulated['precision'])} ran emulated on {_names(emulated['device'].dropna())}, which "
            "has no instructions for it.",
            "Its speed here says nothing about a device that has them. "
            "Leave `amp.allow_emulated` off where time matters.",
        )
    degraded = trials[trials["compatibility"].eq("degraded")]
    if len(degraded):
        add(
            f"{_trials(degraded)}: the compatibility check found larger errors than usual against fp32 "
            f"({_names(degraded['precision'])}).",
            "Look at `compatibility` in the trial's telemetry before trusting a small difference in metric.",
        )
    shared = trials[trials["shared"].astype(bool)]
    if len(shared):
        add(
            f"{_trials(shared)} shared a device with other work.",
            "Left out of speed comparisons. Use one worker per device to measure speed.",
        )
    devices = sorted(trials["device"].dropna().unique())
    if len(devices) > 1:
        add(
            f"The study ran on {len(devices)} kinds of device ({', '.join(devices)}).",
            "Compare speeds within one device only; the precision table has a row for each.",
        )
    utilization = pd.to_numeric(trials["device_utilization"]).dropna()
    if len(utilization) and utilization.median() < LOW_UTILIZATION:
        add(
            f"The device was busy {utilization.median():.0%} of the time (median of {len(utilization)} "
            "trials).",
            "Raise `batch_size` (or `micro_batch_size`), or run more workers per device.",
        )
    if losing := [
        (_num_lost(data), data["num_cut_examples"], trial.number, data)
        for trial in record.trials
        if (data := trial.telemetry.get("data")) and (data["num_cut_examples"] or _num_lost(data))
    ]:
        # Trials may differ in max_length: the one that lost most speaks for all.
        num_lost, num_cut, number, data = max(losing, key=lambda one: one[:3])
        by_task = ", ".join(f"{task} {num:,}" for task, num in sorted(data["num_lost_spans"].items()) if num)
        spans = f"{num_lost:,} true spans lost ({by_task})" if num_lost else "no true span lost"
        add(
            f"{len(losing)} trial{'s' if len(losing) > 1 else ''} lost training text at `max_length`; most "
            f"in trial {number}: {num_cut:,} of {data['num_examples']:,} texts cut, {spans}.",
            "Nothing is learned from it. Raise `max_length`, or set `data.long_text: window`; a span that no "
            "window holds whole needs a larger `data.stride`.",
        )
    complete = complete_trials(record)
    if not complete:
        add("No trial is complete.", "Nothing can be concluded from this study yet.")
    else:
        configurations = {
            json.dumps({**trial.params, "seed": None}, sort_keys=True, default=str) for trial in complete
        }
        if len(configurations) == len(complete):
            add(
                f"Each of the {len(complete)} complete configurations was trained with one seed only.",
                "Small differences may be chance: no interval can be given. To say that one precision is as "
                "good as another, train the same configurations under both with several seeds.",
            )
        add(
            "The precision table compares different configurations (learning rate, batch size ...).",
            "It shows what the search found under each precision, not the effect of precision alone.",
        )
    return found


def _trials(trials: pd.DataFrame) -> str:
    numbers = [str(number) for number in trials["number"]]
    shown = ", ".join(numbers[:8]) + (" ..." if len(numbers) > 8 else "")
    return f"{len(numbers)} trial{'s' if len(numbers) > 1 else ''} (number {shown})"


def _num_lost(data: Mapping[str, Any]) -> int:
    return int(sum(data["num_lost_spans"].values()))


def _names(values: Iterable[Any]) -> str:
    names = sorted(set(map(str, values)), key=precision_order)
    return ", ".join(names) or "this device"
