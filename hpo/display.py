"""What a person sees in the terminal: progress while a study runs, tables when it is asked for.

Everything here draws what others computed. Where the output is no terminal (a log file, a batch job), a
line per finished trial takes the place of the progress bars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from hpo.readable import format_metric, format_value, precision_comparison, precision_facts
from hpo.tables import best_trials

if TYPE_CHECKING:
    import pandas as pd

    from hpo.study_config import StudyConfig
    from hpo.study_record import StudyRecord
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

    A context manager; give `update` to the workers as `on_event`. Quiet: prints nothing.
    """

    def __init__(self, config: StudyConfig, done: int, quiet: bool = False) -> None:
        self._console = Console(quiet=quiet)
        self._objective = config.objective[0]
        self._best: tuple[float, int] | None = None
        self._studies = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("trials"),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._study = self._studies.add_task(escape(config.name), total=config.n_trials, completed=done)
        self._trials = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.percentage:3.0f}%"),
            TextColumn("{task.fields[note]}"),
            console=self._console,
        )
        self._tasks: dict[int, TaskID] = {}
        self._live = Live(
            console=self._console, get_renderable=self._render, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> StudyDisplay:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, event: TrialEvent) -> None:
        """Show that a trial began, was evaluated or ended."""
        if event.kind == "started":
            description = f"trial {event.number} {escape(describe_params(event.params))}"
            self._tasks[event.number] = self._trials.add_task(description, total=1.0, note="")
            return
        if event.kind == "evaluated":
            task = self._tasks.get(event.number)
            if task is not None and event.values:
                note = f"{self._objective.metric} {format_metric(self._objective.metric, event.values[0])}"
                self._trials.update(task, completed=event.budget_used or 0.0, note=note)
            return
        if (task := self._tasks.pop(event.number, None)) is not None:
            self._trials.remove_task(task)
        if event.outcome != "preempted":
            self._studies.advance(self._study)
        self._note_best(event)
        self._console.print(self._finished_line(event))

    def _note_best(self, event: TrialEvent) -> None:
        if event.outcome != "complete" or not event.values:
            return
        sign = 1 if self._objective.direction == "maximize" else -1
        if self._best is None or sign * event.values[0] > sign * self._best[0]:
            self._best = (event.values[0], event.number)

    def _finished_line(self, event: TrialEvent) -> Text:
        result = event.reason
        if event.values:
            result = ", ".join(format_metric(self._objective.metric, value) for value in event.values)
        return Text.assemble(
            f"trial {event.number:>3}  ",
            (f"{event.outcome:<12}", OUTCOME_STYLES.get(event.outcome, "")),
            f"  {describe_params(event.params)}  ",
            (result, "" if event.values else "dim"),
        )

    def _render(self) -> Group:
        best = Text("best so far: none yet", style="dim")
        if self._best is not None:
            value = format_metric(self._objective.metric, self._best[0])
            best = Text(
                f"best so far: {self._objective.metric} {value} (trial {self._best[1]})", style="bold"
            )
        return Group(self._trials, self._studies, best)


def describe_params(params: Mapping[str, Any], *, in_full: bool = False) -> str:
    """`fp_precision=bf16 learning_rate=0.000314`; numbers with three digits unless `in_full`."""
    return " ".join(
        f"{name}={value:.3g}" if isinstance(value, float) and not in_full else f"{name}={format_value(value)}"
        for name, value in params.items()
    )


def print_summary(record: StudyRecord) -> None:
    """The table by precision, the best configuration, and where to look next."""
    console = Console()
    comparison = precision_comparison(record)
    if not comparison.empty:
        console.print(dataframe_table(comparison, title=f"{record.name}: by requested precision"))
    print_best(record)
    name = escape(record.name)
    console.print(f"[dim]hpo report {name}   hpo dashboard {name}   hpo best {name} --evaluate test[/dim]")


def print_best(record: StudyRecord) -> None:
    """The best trial (with several objectives, the Pareto front): values, parameters, precision facts."""
    console = Console(highlight=False, soft_wrap=True)
    best = best_trials(record)
    if not best:
        console.print(f"No complete trial yet ({len(record.trials)} trials).")
    for trial in best:
        values = ", ".join(
            f"{metric} {format_metric(metric, value)}"
            for metric, value in zip(record.metric_names, trial.values or (), strict=True)
        )
        console.print(Text.assemble(("best ", "bold"), f"trial {trial.number}: ", (values, "bold green")))
        console.print(f"     {escape(describe_params(trial.params, in_full=True))}")
        console.print(f"     {escape(precision_facts(trial))}")


def print_metrics(metrics: Mapping[str, Mapping[str, float]], title: str) -> None:
    """{task: {metric: value}} as a table."""
    table = Table("task", "metric", "value", title=escape(title), title_justify="left")
    for task, values in metrics.items():
        for metric, value in values.items():
            table.add_row(escape(task), metric, format_metric(metric, value))
    Console().print(table)


def print_status(record: StudyRecord, status: Mapping[str, Any]) -> None:
    """Trials by outcome, live workers, rate and estimated end, and the best so far."""
    console = Console(highlight=False, soft_wrap=True)
    slots = status["trials"]
    console.print(
        f"[bold]{escape(record.name)}[/bold]: {slots['done']} of {status['n_trials']} trials done, "
        f"{slots['running']} running, {slots['open']} to come"
    )
    counts = Table("outcome", "trials", title="By outcome", title_justify="left")
    for outcome, count in status["outcomes"].items():
        counts.add_row(Text(outcome, style=OUTCOME_STYLES.get(outcome, "")), str(count))
    console.print(counts)
    workers = Table("worker", "host", "trial", "last seen", title="Live workers", title_justify="left")
    for worker in status["workers"]:
        workers.add_row(worker["id"], worker["host"], str(worker["trial"]), worker["last_seen"])
    if status["workers"]:
        console.print(workers)
    else:
        console.print("No live worker.")
    if status["trials_per_hour"]:
        console.print(f"Rate: {status['trials_per_hour']:.1f} trials an hour.")
    if status["estimated_end"]:
        console.print(f"Estimated end: {status['estimated_end']}.")
    print_best(record)


def print_verification(checks: Sequence[PrecisionCheck], device: str, advice: str) -> None:
    """What this machine does with each precision."""
    console = Console()
    console.print(f"[bold]{escape(device)}[/bold]")
    table = Table(
        "precision", "support", "verdict", "logits error", "gradient cosine", "speed", "memory", "notes"
    )
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
            escape(check.note),
        )
    console.print(table)
    console.print("[dim]Speed and memory against fp32, forward and backward of the check's batch.[/dim]")
    console.print(escape(advice))


def dataframe_table(frame: pd.DataFrame, title: str) -> Table:
    """A table of text cells; columns whose cells are all empty are left out."""
    shown = [column for column in frame.columns if any(str(cell) for cell in frame[column])]
    table = Table(*map(escape, shown), title=escape(title), title_justify="left")
    for row in frame[shown].itertuples(index=False):
        table.add_row(*(escape(str(cell)) for cell in row))
    return table
