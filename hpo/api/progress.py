"""What a person sees in a terminal or a notebook while a study runs.

A run shows this before its first trial, so nothing here imports pandas.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from hpo.outcome import Outcome
from hpo.report.formats import describe_params, format_metric, format_seconds, trials_done
from hpo.study.reading.watch import Look, StudyWatch, outcome_of, watching
from hpo.study.store.database import place

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from hpo.config.study_config import StudyConfig
    from hpo.study.running.run import OpenStudy

OUTCOME_STYLES: dict[str, str] = {
    **{outcome: "magenta" for outcome in Outcome if outcome.infeasible},
    Outcome.COMPLETE: "green",
    Outcome.PRUNED: "yellow",
    Outcome.PREEMPTED: "yellow",
    Outcome.CRASHED: "bold red",
    Outcome.FAILED: "bold red",
}

_LINE_SECONDS = 30.0
"""Between two lines of a trial that runs."""


class StudyDisplay(Progress):
    """Progress of a running study: a line for each trial that ended, and now and then one for each that runs.

    A terminal has a bar of the study beside them, with the best so far. A context manager; give `show` to
    `hpo.study.reading.watch.watching`.

    Args:
        num_done: how many of the study's trials were done before this run.
    """

    def __init__(self, config: StudyConfig, num_done: int, *, console: Console | None = None) -> None:
        console = console or Console()
        self._objectives = config.objective
        self._printed_at = time.monotonic()
        self._begun: dict[int, tuple[float, float]] = {}
        """When a trial's first progress was shown, and how much of its budget was used then."""
        facts = TextColumn("{task.fields[facts]}", table_column=Column(no_wrap=True, ratio=1))
        super().__init__(
            *(TextColumn("{task.description}"), BarColumn(12), TextColumn("{task.fields[done]}")),
            *(TimeRemainingColumn(compact=True), "left", facts),
            console=console,
            refresh_per_second=4,
            speed_estimate_period=600,
            transient=True,
            disable=not console.is_terminal,
            expand=True,
        )
        name = f"[bold]{escape(config.name)}"
        self._num_trials = config.n_trials
        self._has_budget = config.budget is not None
        self._bar = self.add_task(name, total=config.n_trials, done="", facts="")
        self.show(Look(num_done=num_done))

    def show(self, look: Look) -> None:
        """Show a study as it is now."""
        for trial in look.ended:
            outcome = outcome_of(trial)
            values = ", ".join(self._values(trial.values if outcome == Outcome.COMPLETE else ()))
            reason = trial.user_attrs.get("outcome_reason", "")
            style = OUTCOME_STYLES.get(outcome, "")
            said = ((values, "bold"), describe_params(trial.params), (reason, "dim"))
            self._print_line(trial, (f"{outcome:<12}", style), *said)
        used = sum(progress.get("budget_used", 0.0) for _, progress in look.running)
        num_done, total = look.work or (look.num_done, self._num_trials)
        if self._has_budget:
            completed, done = min(num_done, total), f"{num_done:.3g}/{total:.3g} device-hours"
        else:
            done = f"{num_done:.3g}/{total:.3g} {'whole ' if look.work else ''}trials"
            completed = min(num_done + used, total)
        self.update(self._bar, completed=completed, total=total, done=done, facts=self._state(look))
        is_due = time.monotonic() - self._printed_at >= _LINE_SECONDS
        for trial, progress in look.running:
            is_first = bool(progress) and trial.number not in self._begun
            if is_first:
                self._begun[trial.number] = time.monotonic(), progress["budget_used"]
            if is_due or is_first:
                self._print_line(trial, *self._facts(trial, progress))
        if is_due:
            self._printed_at = time.monotonic()

    def _state(self, look: Look) -> str:
        if look.best is None:
            return "[bold]best so far: none yet"
        (value, number), metric = look.best, self._objectives[0].metric
        return f"[bold]best so far: {escape(metric)} {format_metric(metric, value)} (trial {number})"

    def _print_line(self, trial: FrozenTrial, *parts: str | tuple[str, str]) -> None:
        said = [
            part if isinstance(part, tuple) else (part, "") for part in (f"trial {trial.number:>3}", *parts)
        ]
        line = Text("  ").join(Text(text, style) for text, style in said if text)
        self.console.print(line, soft_wrap=not self.console.is_terminal)

    def _values(self, values: Sequence[float]) -> list[str]:
        pairs = zip(self._objectives, values, strict=False)
        return [format_metric(objective.metric, value) for objective, value in pairs]

    def _facts(self, trial: FrozenTrial, progress: Mapping[str, Any]) -> list[str]:
        """Of a trial that runs; nothing of its progress before its worker's first heartbeat."""
        reported = [] if trial.last_step is None else [trial.intermediate_values[trial.last_step]]
        facts = [f"{progress['budget_used']:4.0%}"] if progress else []
        facts += [f"{self._objectives[0].metric} {value}" for value in self._values(reported)]
        if progress:
            loss, rate = progress["train_loss"], progress["examples_per_second"]
            facts.append(f"step {progress['step']}")
            facts += [] if loss is None else [f"loss {loss:.3g}"]
            facts += [] if rate is None else [f"{rate:.3g} ex/s"]
            since, before = self._begun[trial.number]
            if (used := progress["budget_used"]) > before:
                left = (time.monotonic() - since) * (1 - used) / (used - before)
                facts.append(f"{format_seconds(left)} left")
        return facts


@contextmanager
def shown(opened: OpenStudy, *, quiet: bool, own: bool = False) -> Iterator[None]:
    """Say which study is run and what of it is not, and show its progress during the block.

    `own`: of the trials of this process alone, and less often, as there may be a hundred such workers.
    """
    if quiet:
        yield
        return
    stored, storage, config = opened.stored, opened.storage, opened.config
    done = stored.slots["done"]
    state = "finished" if done == config.n_trials else "resumed" if done or stored.has_trained else "new"
    counts = trials_done(stored.slots, has_budget=config.budget is not None)
    typer.echo(
        f"Study {config.name} ({state}): {counts}, in {place(storage.url)}. "
        f"Sampler {config.sampler.name}, pruner {config.pruner.name}."
    )
    if opened.left_out:
        reasons = " ".join(dict.fromkeys(opened.left_out.values()))
        typer.echo(
            f"Not run here: {', '.join(opened.left_out)}. {reasons} Workers on other devices may run them; "
            "`amp.on_unsupported` and `amp.allow_emulated` change that."
        )
    display = StudyDisplay(config, done)
    seconds = 2.0 if own else 0.5
    with display, watching(StudyWatch(storage, config, own=own), display.show, seconds):
        yield
