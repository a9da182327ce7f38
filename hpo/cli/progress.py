"""What a person sees in the terminal while a study runs.

A run shows this before its first trial, so nothing here imports pandas.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpo.outcome import Outcome
from hpo.report.formats import describe_params, format_metric
from hpo.study.reading.watch import Look

if TYPE_CHECKING:
    from hpo.config.study_config import StudyConfig
    from hpo.study.reading.watch import WatchedTrial

OUTCOME_STYLES: dict[str, str] = {
    **{outcome: "magenta" for outcome in Outcome if outcome.infeasible},
    Outcome.COMPLETE: "green",
    Outcome.PRUNED: "yellow",
    Outcome.PREEMPTED: "yellow",
    Outcome.CRASHED: "bold red",
    Outcome.FAILED: "bold red",
}

_LINE_SECONDS = 30.0
"""Between two lines of progress where the output is no terminal."""


class StudyDisplay:
    """Progress of a running study: a bar for the study, one for each running trial, and the best so far.

    A context manager; give `show` to `hpo.study.reading.watch.watching`. Where the output is no terminal (a
    log file, a batch job) it is a line for each trial that ended, and now and then one for each that runs.

    Args:
        num_done: how many of the study's trials were done before this run.
        stop: set when the run was told to stop.
    """

    def __init__(
        self,
        config: StudyConfig,
        num_done: int,
        *,
        stop: threading.Event,
        console: Console | None = None,
    ) -> None:
        self._console = console or Console()
        self._objectives = config.objective
        self._stop = stop
        self._look = Look()
        self._printed_at = time.monotonic()
        self._study = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} trials"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            speed_estimate_period=600,
        )
        self._of_study = self._study.add_task(escape(config.name), total=config.n_trials, completed=num_done)
        self._live = Live(
            console=self._console, get_renderable=self._render, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> StudyDisplay:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, look: Look) -> None:
        """Show a study as it is now."""
        self._look = look
        self._study.update(self._of_study, completed=look.num_done)
        for trial in look.ended:
            values = ", ".join(self._values(trial))
            outcome = (f"{trial.outcome:<12}", OUTCOME_STYLES.get(trial.outcome, ""))
            said = ((values, "bold"), describe_params(trial.params), (trial.reason, "dim"))
            self._print_line(f"trial {trial.number:>3}", outcome, *said)
        if self._console.is_terminal or time.monotonic() - self._printed_at < _LINE_SECONDS:
            return
        self._printed_at = time.monotonic()
        for running in look.running:
            self._print_line(f"trial {running.number:>3}", _percent(running), *self._facts(running))

    def _print_line(self, *parts: str | tuple[str, str]) -> None:
        said = [part if isinstance(part, tuple) else (part, "") for part in parts]
        line = Text("  ").join(Text(text, style) for text, style in said if text)
        self._console.print(line, soft_wrap=not self._console.is_terminal)

    def _values(self, trial: WatchedTrial) -> list[str]:
        pairs = zip(self._objectives, trial.values, strict=False)
        return [format_metric(objective.metric, value) for objective, value in pairs]

    def _facts(self, trial: WatchedTrial) -> list[str]:
        progress = trial.progress
        facts = [f"{self._objectives[0].metric} {value}" for value in self._values(trial)]
        if progress is not None:
            loss, rate = progress["train_loss"], progress["examples_per_second"]
            facts.append(f"step {progress['step']}")
            facts += [] if loss is None else [f"loss {loss:.3g}"]
            facts += [] if rate is None else [f"{rate:.3g} ex/s"]
        return facts

    def _render(self) -> Group:
        best = Text("best so far: none yet", style="dim")
        if self._look.best is not None:
            value, number = self._look.best
            metric = self._objectives[0].metric
            text = f"best so far: {metric} {format_metric(metric, value)} (trial {number})"
            best = Text(text, style="bold")
        parts = [self._trials(), self._study, best]
        if self._stop.is_set():
            text = "Stopping when the checkpoint is written. Ctrl-C again ends at once, without one."
            parts.append(Text(text, style="yellow"))
        return Group(*parts)

    def _trials(self) -> RenderableType:
        """A line for each running trial."""
        if not self._look.running:
            is_done = self._study.finished
            now = "evaluating the best trial" if is_done else "getting ready: data, encoder, precision"
            return Text(now, style="dim")
        lines = Table.grid(padding=(0, 1), expand=True)
        for _ in range(4):
            lines.add_column(no_wrap=True)
        lines.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        for trial in self._look.running:
            used = trial.progress["budget_used"] if trial.progress else None
            bar = ProgressBar(total=1.0, completed=used or 0.0, width=12, pulse=used is None)
            facts, params = Text(" ".join(self._facts(trial))), describe_params(trial.params)
            lines.add_row(f"trial {trial.number}", bar, _percent(trial), facts, Text(params, "dim"))
        return lines


def _percent(trial: WatchedTrial) -> str:
    """Of its budget; nothing before its worker's first heartbeat."""
    return f"{trial.progress['budget_used']:4.0%}" if trial.progress else ""
