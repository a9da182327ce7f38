"""What a person sees in the terminal: progress while a study runs, tables when it is asked for.

Everything here draws what others computed. Where the output is no terminal (a log file, a batch job), a
line per finished trial takes the place of the progress bars.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from hpo.readable import (
    format_metric,
    format_number,
    format_value,
    precision_comparison,
    precision_facts,
    readable_summary,
)
from hpo.tables import best_trials, complete_trials
from hpo.trial_config import build_trial_config

if TYPE_CHECKING:
    import threading

    import pandas as pd

    from hpo.study_config import StudyConfig
    from hpo.study_record import StudyRecord, TrialRecord
    from hpo.verify import PrecisionCheck
    from hpo.worker import TrialEvent

OUTCOME_STYLES = {
    "complete": "green",
    "pruned": "yellow",
    "preempted": "yellow",
    "unsupported": "magenta",
    "incompatible": "magenta",
    "nonfinite": "magenta",
    "oom": "magenta",
    "failed": "bold red",
}


class StudyDisplay:
    """Progress of a running study: a bar for the study, one for each trial in hand, and the best so far.

    A context manager; give `update` to the workers as `on_event`. Where the output is not a terminal it is
    one line for each trial that ended. Quiet: nothing.

    Args:
        record: the study before this run.
        num_done: how many of the study's trials are done now, those of other workers included.
        stop: set when the run was told to stop.
    """

    def __init__(
        self,
        config: StudyConfig,
        record: StudyRecord,
        num_done: Callable[[], int],
        *,
        stop: threading.Event | None = None,
        quiet: bool = False,
        console: Console | None = None,
    ) -> None:
        self._console = console or Console(quiet=quiet)
        self._config = config
        self._objective = config.objective[0]
        self._num_done = num_done
        self._stop = stop
        self._best: tuple[float, int] | None = None
        for trial in best_trials(record):
            self._note_best(trial.values, trial.number)
        self._study = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("trials"),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._study.add_task(
            escape(config.name), total=sum(record.slots.values()), completed=record.slots["done"]
        )
        self._trials = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            TextColumn("{task.percentage:3.0f}%"),
            TextColumn("{task.fields[value]}"),
            TextColumn(
                "{task.fields[params]}",
                style="dim",
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
            console=self._console,
            expand=True,
        )
        self._tasks: dict[int, TaskID] = {}
        self._num_evaluations: Counter[int] = Counter()
        self._live = Live(
            console=self._console, get_renderable=self._render, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> StudyDisplay:
        if self._console.is_terminal and not self._console.quiet:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, event: TrialEvent) -> None:
        """Show that a trial began, was evaluated or ended."""
        if event.kind == "started":
            self._tasks[event.number] = self._trials.add_task(
                f"trial {event.number}", total=1.0, value="", params=escape(describe_params(event.params))
            )
        elif event.kind == "evaluated":
            self._num_evaluations[event.number] += 1
            if event.number in self._tasks and event.values:
                value = f"{self._objective.metric} {self._format(event.values[0])}"
                self._trials.update(
                    self._tasks[event.number], completed=self._budget_used(event), value=escape(value)
                )
        else:
            if (task := self._tasks.pop(event.number, None)) is not None:
                self._trials.remove_task(task)
            self._study.update(self._study.task_ids[0], completed=self._num_done())
            if event.outcome == "complete":
                self._note_best(event.values, event.number)
            self._print_finished(event)

    def _budget_used(self, event: TrialEvent) -> float:
        """As the trial says; of one in another process, the share of its evaluations."""
        if event.budget_used is not None:
            return event.budget_used
        evaluation = self._config.evaluation
        epochs = build_trial_config(self._config, event.params, "fp32").epochs
        num = evaluation.per_trial or math.ceil(epochs or 1) * evaluation.per_epoch
        return min(1.0, self._num_evaluations[event.number] / num)

    def _format(self, value: float) -> str:
        return format_metric(self._objective.metric, value)

    def _note_best(self, values: Sequence[float] | None, number: int) -> None:
        if not values:
            return
        sign = 1 if self._objective.direction == "maximize" else -1
        if self._best is None or sign * values[0] > sign * self._best[0]:
            self._best = (values[0], number)

    def _print_finished(self, event: TrialEvent) -> None:
        values = ", ".join(
            format_metric(objective.metric, value)
            for objective, value in zip(self._config.objective, event.values or (), strict=False)
        )
        head = Text.assemble(
            f"trial {event.number:>3}  ", (f"{event.outcome:<12}", OUTCOME_STYLES.get(event.outcome, ""))
        )
        params = describe_params(event.params)
        if not self._console.is_terminal:
            line = Text("  ").join(Text(part) for part in (head.plain, values, params, event.reason) if part)
            self._console.print(line, soft_wrap=True)
            return
        rest = Text.assemble((values, "bold"), "  " if values else "", params)
        if event.reason:
            rest.append(f"\n{event.reason}", style="dim")
        line_table = Table.grid(padding=(0, 1))
        line_table.add_column(no_wrap=True)
        line_table.add_row(head, rest)
        self._console.print(line_table)

    def _render(self) -> Group:
        best = Text("best so far: none yet", style="dim")
        if self._best is not None:
            text = f"best so far: {self._objective.metric} {self._format(self._best[0])}"
            best = Text(f"{text} (trial {self._best[1]})", style="bold")
        trials: RenderableType = self._trials
        if not self._tasks:
            trials = Text("getting ready: data, encoder, precision", style="dim")
        parts: list[RenderableType] = [trials, self._study, best]
        if self._stop is not None and self._stop.is_set():
            text = "Stopping when the checkpoint is written. Ctrl-C again ends at once, without one."
            parts.append(Text(text, style="yellow"))
        return Group(*parts)


def describe_params(params: Mapping[str, Any], *, in_full: bool = False) -> str:
    """`fp_precision=bf16 learning_rate=0.000314`; numbers with three digits unless `in_full`."""
    show = format_value if in_full else _three_digits
    return " ".join(f"{name}={show(value)}" for name, value in params.items())


def _three_digits(value: Any) -> str:
    if isinstance(value, float) and not (value.is_integer() and abs(value) < 1e6):
        return f"{value:.3g}"
    return f"{value:.0f}" if isinstance(value, float) else format_value(value)


def print_summary(record: StudyRecord) -> None:
    """The table by precision, the best configuration, and where to look next."""
    console = Console()
    if any(trial.ended for trial in record.trials):
        console.print(_precision_table(record, console))
    print_best(record)
    if complete_trials(record):
        name = escape(record.name)
        hints = (f"hpo report {name}", f"hpo dashboard {name}", f"hpo best {name} --evaluate test")
        console.print(f"[dim]{'   '.join(hints)}[/dim]", soft_wrap=True)


def _precision_table(record: StudyRecord, console: Console) -> Table:
    """A column per precision; where these do not fit the terminal, a row per precision with less in it."""
    title = f"{record.name}: by requested precision"
    table = dataframe_table(precision_comparison(record), title)
    if console.measure(table, options=console.options.update(width=1000)).maximum <= console.width:
        return table
    brief = readable_summary(record, brief=True)
    medians = [column for column in brief if column.endswith(", median")]
    brief = brief.drop(columns=["trials", "wasted", *medians])
    brief["outcomes"] = brief["outcomes"].str.replace(", ", ",\n")
    table = dataframe_table(brief.rename(columns=lambda name: name.replace(" ", "\n")), title)
    for column in table.columns:
        column.no_wrap = column.header != "outcomes"
    return table


def by_first_objective(record: StudyRecord) -> list[TrialRecord]:
    """The best trial; with several objectives the Pareto front, best first by the first of them."""
    sign = -1 if record.directions[0] == "maximize" else 1
    return sorted(best_trials(record), key=lambda trial: sign * trial.values[0] if trial.values else 0.0)


def print_best(record: StudyRecord) -> None:
    """The best trial (with several objectives, the Pareto front): values, parameters, precision facts."""
    console = Console(highlight=False)
    best = by_first_objective(record)
    if not best:
        console.print(f"No complete trial{f' of {len(record.trials)}' if record.trials else ' yet'}.")
    for trial in best:
        values = ", ".join(
            f"{metric} {format_metric(metric, value)}"
            for metric, value in zip(record.metric_names, trial.values or (), strict=True)
        )
        console.print(Text.assemble(("best ", "bold"), f"trial {trial.number}: ", (values, "bold green")))
        for line in (describe_params(trial.params, in_full=True), precision_facts(trial)):
            if console.is_terminal:
                console.print(Padding(Text(line), (0, 0, 0, 5)))
            else:
                console.print(Text(f"     {line}"), soft_wrap=True)


def print_metrics(metrics: Mapping[str, Mapping[str, float]], title: str) -> None:
    """{task: {metric: value}} as a table."""
    table = _table("task", "metric", "value", title=title)
    for task, values in metrics.items():
        for metric, value in values.items():
            table.add_row(escape(task), metric, format_metric(metric, value))
    Console().print(table)


def print_trial(record: Mapping[str, Any]) -> None:
    """What `hpo train` shows of the record of one trial."""
    console = Console(highlight=False)
    telemetry = record["telemetry"]
    if telemetry.get("metrics"):
        print_metrics(telemetry["metrics"], "Best evaluation")
    outcome = record["outcome"]
    head = Text(outcome, style=OUTCOME_STYLES.get(outcome, ""))
    console.print(Text.assemble(head, f": {record['outcome_reason']}" if record["outcome_reason"] else ""))
    for metric, value in (record["values"] or {}).items():
        console.print(f"{escape(metric)}: {format_metric(metric, value)}")
    for key, value in record.items():
        if key.startswith(("fp_precision", "train_", "peak_")):
            text = format_metric(key, value) if isinstance(value, float | int) else str(value)
            console.print(f"{key}: {text}", markup=False)


def print_status(record: StudyRecord, status: Mapping[str, Any]) -> None:
    """Trials by outcome, live workers, rate and estimated end, and the best so far."""
    console = Console(highlight=False)
    slots = status["trials"]
    console.print(
        f"[bold]{escape(record.name)}[/bold]: {slots['done']} of {status['n_trials']} trials done, "
        f"{slots['running']} running, {slots['open']} to come"
    )
    if status["outcomes"]:
        counts = _table("outcome", "trials")
        for outcome, count in status["outcomes"].items():
            counts.add_row(Text(outcome, style=OUTCOME_STYLES.get(outcome, "")), str(count))
        console.print(counts)
        states = (f"{count} {state}" for state, count in status["states"].items())
        console.print(f"In Optuna: {', '.join(states)}.", style="dim")
    if status["workers"]:
        workers = _table("live worker", "trial", "last seen")
        for worker in status["workers"]:
            trial = "" if worker["trial"] is None else str(worker["trial"])
            workers.add_row(worker["id"], trial, worker["last_seen"])
        console.print(workers)
    stranded = slots["running"] - sum(worker["trial"] is not None for worker in status["workers"])
    if stranded:
        console.print(f"Trials whose worker is gone: {stranded}. The next worker goes on with them.")
    elif not status["workers"]:
        console.print("No live worker.")
    if status["trials_per_hour"]:
        console.print(f"Rate: {format_number(status['trials_per_hour'])} trials an hour.")
    if status["estimated_end"]:
        console.print(f"Estimated end: {status['estimated_end']}.")
    print_best(record)


def print_verification(checks: Sequence[PrecisionCheck], device: str, advice: str) -> None:
    """What this machine does with each precision."""
    console = Console(highlight=False)
    console.print(f"[bold]{escape(device)}[/bold]")
    table = _table("precision", "support", "verdict", "logits\nerror", "gradient\ncosine", "speed", "memory")
    for check in checks:
        measured = check.compatibility.measurement if check.compatibility else None
        errors = list(measured.logits_relative_error.values()) if measured else []
        style = {"native": "green", "emulated": "yellow"}.get(check.support.level, "red")
        table.add_row(
            check.name,
            Text(check.support.level, style=style),
            check.compatibility.verdict if check.compatibility else "",
            f"{max(errors):.1e}" if errors else "",
            "" if measured is None or measured.gradient_cosine is None else f"{measured.gradient_cosine:.4f}",
            "" if measured is None or measured.speed_ratio is None else f"{measured.speed_ratio:.2f}x",
            "" if measured is None or measured.memory_ratio is None else f"{measured.memory_ratio:.2f}x",
        )
    console.print(table)
    console.print("Speed and memory against fp32, forward and backward of the check's batch.", style="dim")
    notes = Table.grid(padding=(0, 2))
    notes.add_column(no_wrap=True)
    for check in checks:
        if check.note:
            notes.add_row(check.name, escape(check.note))
    if notes.row_count:
        console.print(notes)
    console.print(Text(advice, style="bold"))


def _table(*columns: str, title: str | None = None) -> Table:
    return Table(
        *map(escape, columns),
        title=None if title is None else escape(title),
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )


def dataframe_table(frame: pd.DataFrame, title: str) -> Table:
    """A table of text cells; columns whose cells are all empty are left out."""
    shown = [column for column in frame.columns if any(str(cell) for cell in frame[column])]
    table = _table(*shown, title=title)
    for column in table.columns:
        column.overflow = "fold"  # a number that is cut is another number
    for row in frame[shown].itertuples(index=False):
        table.add_row(*(escape(str(cell)) for cell in row))
    return table
