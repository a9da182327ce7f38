"""Text and tables of a study in a terminal: status, studies, the best trials, progress lines of a run.

Nothing here imports transformers, pandas or plotly, so `hpo status` starts faster.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import sleep
from typing import Any

from optuna.trial import FrozenTrial
from rich.console import Console
from rich.text import Text

from hpo.config.study_config import StudyConfig
from hpo.device_time import MIN_SECONDS, REMEDY, DeviceTime, busy_text
from hpo.outcome import Outcome
from hpo.report.detailed import evaluations_of, headline
from hpo.report.formats import (
    describe_params,
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
from hpo.report.terminal import OUTCOME_STYLES, Part, warning
from hpo.report.trial_precision import precision_facts
from hpo.study.reading.study_record import StudyRecord, best_trials, is_over
from hpo.study.reading.watch import StudyProgress, outcome_of
from hpo.study.sampling.promotion import rungs_of

_LINE_SECONDS = 30.0


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
    yield from filter(None, [paused_message(record)])
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


def _worker(worker: Mapping[str, Any]) -> dict[str, str]:
    facts = {name: worker[name] for name in ("host", "device", "job", "trial")}
    cells = {name: "" if value is None else str(value) for name, value in facts.items()}
    last_seen = f"{format_seconds(worker['silent_seconds'])} ago"
    return {"live worker": str(worker["number"]), **cells, "last seen": last_seen}


def watched(read: Callable[[], StudyRecord], seconds: float) -> Iterator[tuple[object, Iterator[Part]]]:
    """Read a study at intervals until it is over: the facts that may change, and its status."""
    while True:
        record = read()
        numbers = study_status(record)
        yield [numbers[name] for name in ("state", "trials", "outcomes", "best")], status(record, numbers)
        if is_over(record):
            return
        sleep(seconds)


class StudyDisplay:
    """Prints a line for each ended trial, and every half minute one for each running trial."""

    def __init__(self, config: StudyConfig, *, console: Console | None = None) -> None:
        self._console = console or Console()
        self._objectives = config.objective
        self._total = "" if config.budget else f"/{config.num_trials}"
        self._printed_at = time.monotonic()
        self._machine, self._was_busy, self._machine_due = DeviceTime(), False, time.monotonic() + MIN_SECONDS

    def show(self, look: StudyProgress) -> None:
        """Print the due lines. `look` is the present state of the study."""
        self._show_machine()
        for trial in look.ended:
            outcome = outcome_of(trial)
            values, paused = trial.values if outcome == Outcome.COMPLETE else (), ""
            if outcome == Outcome.PAUSED:
                rung, reached = [*rungs_of(trial.user_attrs).items()][-1]
                values, paused = reached["values"], f"at {format_percent(rung)} of its training"
            is_best = look.best is not None and look.best[1] == trial.number
            self._print_line(
                trial,
                (f"{outcome:<12}", OUTCOME_STYLES.get(outcome, "")),
                paused,
                (self.values(values), "bold"),
                describe_params(trial.params),
                (trial.user_attrs.get("outcome_reason", ""), "dim"),
                (f"{look.num_done}{self._total} trials", "dim"),
                (f"best {self._objectives[0].metric} so far" if is_best else "", "bold"),
            )
        if time.monotonic() - self._printed_at < _LINE_SECONDS:
            return
        self._printed_at = time.monotonic()
        for trial, progress in look.running:
            self._print_line(trial, *self._facts(trial, progress))

    def _show_machine(self) -> None:
        """Print a line when other programs begin or cease to take CPUs from this process and its workers."""
        if (now := time.monotonic()) < self._machine_due:
            return
        self._machine_due, self._machine.totals = now + _LINE_SECONDS, {}
        self._machine.measure()
        if (facts := self._machine.facts()) and facts["busy"] != self._was_busy:
            self._was_busy, text = facts["busy"], busy_text(facts)
            line = f"This machine is {text}. {REMEDY}" if text else "This machine is no longer busy."
            self._console.print(Text(line), soft_wrap=not self._console.is_terminal)

    def _print_line(self, trial: FrozenTrial, *parts: str | tuple[str, str]) -> None:
        texts = [Text(*part) if isinstance(part, tuple) else Text(part) for part in parts]
        line = Text("  ").join([Text(f"trial {trial.number:>3}"), *filter(None, texts)])
        self._console.print(line, soft_wrap=not self._console.is_terminal)

    def values(self, values: Sequence[float]) -> str:
        """Return the values of the objectives, or of the first ones, with their names."""
        pairs = zip(self._objectives, values, strict=False)
        return ", ".join(f"{one.metric} {format_metric(one.metric, value)}" for one, value in pairs)

    def _facts(self, trial: FrozenTrial, progress: Mapping[str, Any]) -> list[str]:
        reported = [] if trial.last_step is None else [trial.intermediate_values[trial.last_step]]
        facts = [f"{progress['budget_used']:4.0%}"] if progress else []
        facts.append(self.values(reported))
        if progress:
            loss, rate = progress["train_loss"], progress["examples_per_second"]
            facts.append(f"step {progress['step']}")
            facts += [] if loss is None else [f"loss {loss:.3g}"]
            facts += [] if rate is None else [f"{rate:.3g} ex/s"]
        return facts if any(facts) else ["running, no step reported"]
