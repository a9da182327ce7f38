"""Text and tables of a study in a terminal: status, studies, the best trials, progress lines of a run.

Nothing here imports transformers, pandas or plotly, so `hpo status` starts faster.
"""

from collections.abc import Callable, Iterator, Mapping
from time import sleep
from typing import Any

from rich.text import Text

from hpo.outcome import Outcome
from hpo.report.detailed import evaluations_of, headline
from hpo.report.formats import (
    describe_params,
    format_cell,
    format_metric,
    format_number,
    format_percent,
    format_seconds,
    plural,
)
from hpo.report.status import (
    budget_messages,
    limit_messages,
    objective_values,
    paused_message,
    progress_message,
    rank_name,
    resume_message,
    score_message,
    study_status,
)
from hpo.report.terminal import Part, warning
from hpo.report.trial_precision import precision_facts
from hpo.study.reading.study_record import StudyRecord, best_trials, is_over


def best(record: StudyRecord) -> Iterator[Part]:
    """Show the best trial, or the Pareto front: values, parameters, precision, detailed evaluations."""
    trials = best_trials(record)
    if not trials:
        yield f"{plural(len(record.trials), 'trial')}, none complete."
    for trial in trials:
        values = ", ".join(map(" ".join, objective_values(record, trial).items()))
        name = (f"{rank_name(trial)} ", "bold")
        yield Text.assemble(name, f"trial {trial.number}: ", (values, "bold green"))
        yield f"     {describe_params(trial.params, in_full=True)}"
        yield f"     {precision_facts(trial)}"
        yield from (f"     {headline(one, record.metric_names)}" for one in evaluations_of(trial))
    yield from filter(None, [score_message(record)] if trials else [])
    yield from limit_messages(record)
    yield from budget_messages(record)
    for question, result in record.comparisons.items():
        unfinished = "" if result["has_ended"] else " (so far)"
        yield f"Comparison of {question} on new seeds{unfinished}: {result['recommendation']}"


def status(record: StudyRecord, numbers: Mapping[str, Any]) -> Iterator[Part]:
    """Show trials by outcome, live workers, rate and estimated end, and the best so far."""
    done, paused, total = numbers["trials"]["done"], numbers["trials"].get("paused", 0), numbers["n_trials"]
    counts = progress_message(numbers["trials"], has_budget=bool(numbers["budget"]))
    if not is_over(record):
        num_running = len({worker["trial"] for worker in numbers["workers"]} - {None})
        counts += f", {num_running} running"
        counts += "" if numbers["budget"] else f", {total - done - num_running - paused} not started"
    yield Text.assemble((record.name, "bold"), f": {counts}")
    if record.state != "open":
        yield f"The study is {record.state}. {resume_message(record.name)}"
    yield "", [{"outcome": name, "trials": str(count)} for name, count in numbers["outcomes"].items()]
    yield "", [_worker(one) for one in numbers["workers"]]
    yield "", [_paused(one) for one in numbers["paused"]]
    yield from filter(None, [paused_message(record), numbers["left_out_rungs"]])
    interrupted = [trial for trial in record.trials if trial.outcome == Outcome.PREEMPTED and not trial.ended]
    if interrupted:
        yield f"{plural(len(interrupted), 'interrupted trial')}: the next worker continues there."
    if not numbers["workers"] and record.state == "open" and not is_over(record):
        yield f"No worker is running. To start one: hpo worker {record.name}"
    if record.num_foreign:
        running = f" Still RUNNING: {record.num_foreign_running}. `hpo doctor --fix` ends these."
        text = f"Trials of other programs, which do not count: {record.num_foreign}."
        yield text + (running if record.num_foreign_running else "")
    if numbers["trials_per_hour"]:
        yield f"Rate: {format_number(numbers['trials_per_hour'])} trials an hour."
    if numbers["estimated_end"]:
        yield f"Estimated end: {numbers['estimated_end']}."
    yield from best(record)
    yield from map(warning, numbers["warnings"])
    yield from filter(None, [numbers["untried"]])


def _worker(worker: Mapping[str, Any]) -> dict[str, str]:
    facts = {name: worker[name] for name in ("host", "device", "job", "trial")}
    cells = {name: "" if value is None else str(value) for name, value in facts.items()}
    last_seen = f"{format_seconds(worker['silent_seconds'])} ago"
    return {"live worker": str(worker["number"]), **cells, "last seen": last_seen}


def _paused(one: Mapping[str, Any]) -> dict[str, str]:
    cells = {"paused trial": str(one["number"]), "at step": format_cell(one["step"])}
    values = {metric: format_metric(metric, value) for metric, value in one["values"].items()}
    return {**cells, "of its training": format_percent(one["rung"]), **values}


def watched(read: Callable[[], StudyRecord], seconds: float) -> Iterator[tuple[object, Iterator[Part]]]:
    """Read a study at intervals until it is over: the facts that may change, and its status."""
    while True:
        record = read()
        numbers = study_status(record)
        yield [numbers[name] for name in ("state", "trials", "outcomes", "best")], status(record, numbers)
        if is_over(record):
            return
        sleep(seconds)
