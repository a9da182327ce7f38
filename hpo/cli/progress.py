"""What a person sees in the terminal while a study runs.

A run shows this before its first trial, so nothing here imports pandas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from hpo.config.trial_config import build_trial_config
from hpo.outcome import Outcome
from hpo.report.formats import describe_params, format_metric, format_seconds
from hpo.study.study_record import best_trials

if TYPE_CHECKING:
    import threading

    from hpo.config.study_config import StudyConfig
    from hpo.study.study_record import StudyRecord
    from hpo.study.watch import TrialEvent

OUTCOME_STYLES: dict[str, str] = {
    **{outcome: "magenta" for outcome in Outcome if outcome.infeasible},
    Outcome.COMPLETE: "green",
    Outcome.PRUNED: "yellow",
    Outcome.PREEMPTED: "yellow",
    Outcome.CRASHED: "bold red",
    Outcome.FAILED: "bold red",
}


class StudyDisplay:
    """Progress of a running study: a bar for the study, one for each trial in hand, and the best so far.

    A context manager; give `update` to `hpo.study.watch.watching`. Where the output is no terminal (a log
    file, a batch job) it is a line for each evaluation and each trial that ended.

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
        stop: threading.Event,
        console: Console | None = None,
    ) -> None:
        self._console = console or Console()
        self._config = config
        self._objective = config.objective[0]
        self._num_done = num_done
        self._stop = stop
        self._best: tuple[float, int] | None = None
        for trial in best_trials(record)[:1]:
            self._note_best(trial.values, trial.number)
        self._study = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("trials"),
            TimeElapsedColumn(),
        )
        self._study_task = self._study.add_task(
            escape(config.name), total=sum(record.slots.values()), completed=record.slots["done"]
        )
        params = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        self._trials = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            TextColumn("{task.percentage:3.0f}%"),
            TextColumn("{task.fields[value]}"),
            TextColumn("{task.fields[params]}", style="dim", table_column=params),
            expand=True,
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
        number, params = event.number, escape(describe_params(event.params))
        if event.kind == "started":
            self._tasks[number] = self._trials.add_task(
                f"trial {number}",
                total=self._expected_evaluations(event),
                completed=event.num_evaluations,
                value="",
                params=params,
            )
        elif event.kind == "evaluated":
            if event.values:
                value = escape(f"{self._objective.metric} {self._format(event.values[0])}")
                self._trials.update(
                    self._tasks[number], completed=event.num_evaluations, value=value, params=params
                )
            if not self._console.is_terminal:
                self._print_evaluation(event)
        else:
            if (task := self._tasks.pop(number, None)) is not None:
                self._trials.remove_task(task)
            self._study.update(self._study_task, completed=self._num_done())
            if event.outcome == Outcome.COMPLETE:
                self._note_best(event.values, number)
            self._print_finished(event)

    def _expected_evaluations(self, event: TrialEvent) -> int:
        return self._config.evaluation.count(build_trial_config(self._config, event.params, "fp32").epochs)

    def _format(self, value: float) -> str:
        return format_metric(self._objective.metric, value)

    def _note_best(self, values: Sequence[float] | None, number: int) -> None:
        if not values:
            return
        sign = 1 if self._objective.direction == "maximize" else -1
        if self._best is None or sign * values[0] > sign * self._best[0]:
            self._best = (values[0], number)

    def _values(self, event: TrialEvent) -> str:
        pairs = zip(self._config.objective, event.values or (), strict=False)
        return ", ".join(format_metric(objective.metric, value) for objective, value in pairs)

    def _print_evaluation(self, event: TrialEvent) -> None:
        of = f"{event.num_evaluations} of {self._expected_evaluations(event)}"
        values = f"{self._objective.metric} {self._values(event)}"
        line = f"trial {event.number:>3}  evaluation {of}  {values}  {format_seconds(event.seconds)}"
        self._console.print(Text(line), soft_wrap=True)

    def _print_finished(self, event: TrialEvent) -> None:
        outcome = (f"{event.outcome:<12}", OUTCOME_STYLES.get(event.outcome, ""))
        head = Text.assemble(f"trial {event.number:>3}  ", outcome)
        values, params = self._values(event), describe_params(event.params)
        if not self._console.is_terminal:
            line = "  ".join(part for part in (head.plain, values, params, event.reason) if part)
            self._console.print(Text(line), soft_wrap=True)
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
        ready = Text("getting ready: data, encoder, precision", style="dim")
        parts: list[RenderableType] = [self._trials if self._tasks else ready, self._study, best]
        if self._stop.is_set():
            text = "Stopping when the checkpoint is written. Ctrl-C again ends at once, without one."
            parts.append(Text(text, style="yellow"))
        return Group(*parts)
